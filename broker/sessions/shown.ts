// Sessions as REST shows them: one, or a page of them.
import type { Api, Handlers, Reply } from '../../shared/api/index.ts';
import { sessions as routes } from '../../shared/api/sessions.ts';
import { iso } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import type { History } from '../history.ts';
import { filtersOf, pageOfRows, reachableOnly } from '../paging.ts';
import type { MachineFacts } from '../presence/machine-facts.ts';
import { fromRow, type Records, type Session } from './records.ts';
import type { Run, Runs } from './run.ts';

interface Rooms {
  history: History;
  machineFacts: MachineFacts;
  records: Records;
  runs: Runs;
}

export interface Shown {
  list: Handlers['sessions']['list'];
  /** With who is attached. Throws session_not_found. */
  detail(session_id: string): Reply<Api['sessions']['get']>;
}

export function showing({ history, machineFacts, records, runs }: Rooms): Shown {
  return {
    detail(session_id) {
      const run = runs.get(session_id);
      const clients = [...(run?.clients.values() ?? [])];
      const attached_clients = clients.map(({ attached: { client_id, key_name, mode, attached_at } }) => ({
        client_id,
        key_name,
        mode,
        attached_at: iso(attached_at),
      }));
      return { ...shown(run?.session ?? known(records, session_id), run, machineFacts), attached_clients };
    },
    list(input, caller) {
      const { session_id } = input;
      const page = pageOfRows(
        history,
        { table: 'sessions', columns: '*' },
        [
          reachableOnly(caller.reachable()),
          ...filtersOf(routes.list, input, { session_id: session_id ? ['id = ?', session_id] : undefined }),
        ],
        input,
      );
      const items = page.items.map((row) => {
        const session = fromRow(row);
        const run = runs.get(session.id);
        return shown(run?.session ?? session, run, machineFacts);
      });
      return { items, total: page.total };
    },
  };
}

/** Throws session_not_found. */
export function known(records: Records, session_id: string): Session {
  const session = records.find(session_id);
  if (session) return session;
  throw new AppError('session_not_found', 'no such session', { session_id });
}

function shown(
  { instance_id: _, ending: __, ...session }: Session,
  run: Run | undefined,
  machineFacts: MachineFacts,
) {
  const { id, connected_at, grace_period_started_at, ended_at } = session;
  const live = run?.link && !run.ended ? machineFacts.of(session.machine_id)?.last_seen : undefined;
  const time = (ms: number | null): string | null => (ms === null ? null : iso(ms));
  return {
    ...session,
    session_id: id,
    created_at: iso(session.created_at),
    connected_at: time(connected_at),
    last_heartbeat_at: time(live ?? session.last_heartbeat_at),
    grace_period_started_at: time(grace_period_started_at),
    ended_at: time(ended_at),
    attached_count: run?.clients.size ?? 0,
  };
}
