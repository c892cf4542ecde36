// Sessions as REST lists them: one, or a page of them.
import type { Handlers } from '../../shared/api/index.ts';
import { sessions as routes } from '../../shared/api/sessions.ts';
import { iso } from '../../shared/clock.ts';
import { filtersOf, pageOfRows, reachableOnly } from '../paging.ts';
import { type Session, sessionOf } from './records.ts';
import type { OpenSession, SessionContext } from './session.ts';

type Listing = Pick<Handlers['sessions'], 'get' | 'list'>;

/** Those that are open are as they are in memory. */
export function serializer({ history, machineFacts, records, sessions }: SessionContext) {
  function serialize({ instance_id: _, ending: __, ...record }: Session, open: OpenSession | undefined) {
    const live = open?.link && !open.ended ? machineFacts.of(record.machine_id)?.last_seen : undefined;
    return {
      ...record,
      session_id: record.id,
      created_at: iso(record.created_at),
      connected_at: time(record.connected_at),
      last_heartbeat_at: time(live ?? record.last_heartbeat_at),
      grace_period_started_at: time(record.grace_period_started_at),
      ended_at: time(record.ended_at),
      attached_count: open?.clients.size ?? 0,
    };
  }

  return {
    get({ session_id }) {
      const open = sessions.get(session_id);
      const clients = [...(open?.clients.values() ?? [])];
      const attached_clients = clients.map(({ attached: { client_id, key_name, mode, attached_at } }) => ({
        client_id,
        key_name,
        mode,
        attached_at: iso(attached_at),
      }));
      return { ...serialize(open?.record ?? records.get(session_id), open), attached_clients };
    },
    list(input, caller) {
      const { session_id } = input;
      const own = { session_id: session_id ? (['id = ?', session_id] as const) : undefined };
      const conditions = [reachableOnly(caller.reachable()), ...filtersOf(routes.list, input, own)];
      const page = pageOfRows(history, { table: 'sessions', columns: '*' }, conditions, input);
      const items = page.items.map((row) => {
        const record = sessionOf(row);
        const open = sessions.get(record.id);
        return serialize(open?.record ?? record, open);
      });
      return { items, total: page.total };
    },
  } satisfies Listing;
}

function time(ms: number | null): string | null {
  return ms === null ? null : iso(ms);
}
