// Events: what happens, as it happens, over the handler of the event log.
import type { EventsRequest__Output } from '../../proto/types/farhand/client/v1/EventsRequest.ts';
import type { EventsResponse } from '../../proto/types/farhand/client/v1/EventsResponse.ts';
import { api, type Handlers } from '../../shared/api/index.ts';
import type { AccessRooms } from '../admission/access.ts';
import { entranceOf } from '../admission/index.ts';
import type { Call } from './call.ts';

export function eventCalls(rooms: AccessRooms & { handlers: Handlers }) {
  const following = entranceOf(api.events.stream, rooms);
  return {
    async events(call: Call<never, EventsResponse>, request: EventsRequest__Output): Promise<void> {
      const { types, machine_id, after_id } = request;
      const raw = {
        query: {
          ...(types.length > 0 && { types: types.join(',') }),
          ...(machine_id !== undefined && { machine_id }),
        },
        headers: after_id === undefined ? {} : { last_event_id: after_id },
      };
      const { input, caller } = call.admit(call.knock(following), raw);
      for await (const { data } of await rooms.handlers.events.stream(input, caller)) {
        await call.send({ ...data, data: JSON.stringify(data.data) });
      }
    },
  };
}
