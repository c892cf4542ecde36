// The list of clients in a terminal: who types, and who only watches.
import { client } from '../api-client.ts';
import { Icon } from '../parts/icon.tsx';
import * as icons from '../parts/icons.ts';
import { Ago } from '../parts/small-components.tsx';
import { useData } from '../parts/use-data.ts';

interface ParticipantsProps {
  session: string;
  /** The id of this page's own client; undefined while it is not attached. */
  own: string | undefined;
}

export function Participants({ session, own }: ParticipantsProps) {
  const { data } = useData(
    (signal) => client.sessions.get({ session_id: session }, { signal }),
    [session, own],
    ({ type, data }) => type.startsWith('session.client') && data.session_id === session,
  );
  const all = data?.attached_clients ?? [];
  if (all.length === 0) return null;
  return (
    <details class="people">
      <summary aria-label={`${all.length} in this terminal`}>
        <Icon of={icons.people} />
        {all.length}
      </summary>
      <ul aria-label="In this terminal">
        {all.map(({ client_id, key_name, mode, attached_at }) => (
          <li key={client_id}>
            <strong class="cut">{key_name}</strong>
            {client_id === own && <span class="tag">you</span>}
            <span>{mode === 'operator' ? 'types' : 'watches'}</span>
            <span class="muted">
              <Ago at={attached_at} />
            </span>
          </li>
        ))}
      </ul>
    </details>
  );
}
