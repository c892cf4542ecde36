// Events: what happens, as it happens, over the handler of the event log.
import type { EventsRequest__Output } from '../../proto/types/farhand/client/v1/EventsRequest.ts';
import { api, type Handlers } from '../../shared/api/index.ts';
import { type AccessRooms, guardOf } from '../admission/authorize.ts';
import { present, type Rpc } from './call.ts';

const route = api.events.stream;

export function eventRpcs(services: AccessRooms & { handlers: Handlers }) {
  const Events: Rpc<'Events', typeof route, EventsRequest__Output> = {
    guard: guardOf(route, services),
    raw: ({ types, machine_id, after_id }) => ({
      query: {
        ...(types.length > 0 && { types: types.join(',') }),
        ...present({ machine_id }),
      },
      headers: present({ last_event_id: after_id }),
    }),
    async run(call, { input, caller }) {
      for await (const { data } of await services.handlers.events.stream(input, caller)) {
        await call.send({ ...data, data: JSON.stringify(data.data) });
      }
      return undefined;
    },
  };
  return { Events };
}
