// The states of a session: each change on disk with its event, the end for sure.
import type { EventType } from '../../shared/api/events.ts';
import type { Journal } from '../../shared/api/index.ts';
import { after, now, sleep } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Events } from '../events.ts';
import type { History } from '../history.ts';
import type { Link } from '../presence/index.ts';
import type { MachineFacts } from '../presence/machine-facts.ts';
import type { State } from '../state/index.ts';
import type { Records, Session } from './records.ts';
import type { Run } from './run.ts';

/** How a session ends. */
export interface End {
  exit_code?: number | null;
  signal?: string | null;
  reason: string | null;
}

export interface Life {
  /** Its event, with the change that causes it. */
  tell(journal: Journal, type: EventType, session: Session, more?: object): void;
  /** An agent has the terminal, and tells so. */
  connected(run: Run, link: Link): void;
  /** The link to its agent is lost: what runs there outlives that for the grace period. */
  away(run: Run): void;
  /** It is over; of several ends the first counts. Resolves when that is on disk, or the broker stops. Never rejects. */
  ended(run: Run, end: End): Promise<void>;
  /** Its terminal has another size; of many in a second the last is kept. */
  resized(run: Run, size: { cols: number; rows: number }): void;
  /** Writes what waits of these; nothing else is begun. Never rejects. */
  stop(runs: readonly Run[]): Promise<void>;
}

interface LifeRooms {
  state: State;
  history: History;
  events: Events;
  machineFacts: MachineFacts;
  records: Records;
}

const resizeMs = 1_000;
/** An end that could not be written is tried again after this. */
const rewriteMs = 5_000;

/** `over` is called for each end that is on disk. */
export function openLife(rooms: LifeRooms, over: (run: Run) => void, log: Logger): Life {
  const { state, history, events, machineFacts, records } = rooms;
  const stopped = new AbortController();
  const resizing = new Set<Run>();

  function tell(journal: Journal, type: EventType, session: Session, more: object = {}): void {
    const { id, machine_id, status } = session;
    const machine = state.machines.get(machine_id) ?? { id: machine_id, name: '' };
    events.emit(journal, type, machine, { session_id: id, status, ...more });
  }

  async function write(session: Session, type: EventType | undefined): Promise<void> {
    await history.write((transaction) => {
      records.put(session);
      if (type) tell(transaction, type, session);
    });
  }

  /** What could not be written goes with the next change, and its end is written for sure. */
  async function change(run: Run, changes: Partial<Session>, type?: EventType): Promise<void> {
    run.session = { ...run.session, ...changes };
    const { session } = run;
    run.changed.wake();
    try {
      await write(session, type);
      run.written = session.status;
      run.changed.wake();
    } catch (error) {
      log.error({ err: error, session_id: session.id }, 'a session could not be written');
    }
  }

  const heard = ({ machine_id }: Session): number | null => machineFacts.of(machine_id)?.last_seen ?? null;

  const life: Life = {
    tell,
    connected(run, link) {
      if (run.session.status === 'CONNECTED' || run.ended) return;
      run.cancelGrace();
      const connected_at = run.session.connected_at ?? now();
      const { instanceId: instance_id } = link;
      const last_heartbeat_at = heard(run.session);
      const since = { grace_period_started_at: null, last_heartbeat_at };
      void change(run, { status: 'CONNECTED', connected_at, instance_id, ...since }, 'session.connected');
    },
    away(run) {
      run.link = undefined;
      if (run.ended) return run.changed.wake();
      if (run.session.ending) return void life.ended(run, { reason: 'ended' });
      const began = run.session.grace_period_started_at ?? now();
      // A clock that was set back must not stretch it.
      const left = Math.min(Math.max(0, began + run.session.grace_period - now()), run.session.grace_period);
      run.cancelGrace();
      run.cancelGrace = after(left, () => void life.ended(run, { reason: 'grace_period_over' }));
      if (run.session.status === 'GRACE_PERIOD') return;
      const last_heartbeat_at = heard(run.session);
      const changes = { status: 'GRACE_PERIOD', grace_period_started_at: began, last_heartbeat_at } as const;
      void change(run, changes, 'session.grace_period');
    },
    async ended(run, { exit_code = null, signal = null, reason }) {
      if (run.ended) return;
      run.ended = true;
      run.changed.wake();
      run.cancelGrace();
      run.cancelResize();
      resizing.delete(run);
      const last_heartbeat_at = run.link ? heard(run.session) : run.session.last_heartbeat_at;
      const end = { exit_code, signal, reason, ended_at: now(), last_heartbeat_at };
      const session: Session = { ...run.session, status: 'DISCONNECTED', ...end };
      while (!stopped.signal.aborted) {
        try {
          await write(session, 'session.disconnected');
          run.session = session;
          run.written = session.status;
          run.over = true;
          over(run);
          return run.changed.wake();
        } catch (error) {
          log.error({ err: error, session_id: session.id }, 'the end of a session could not be written');
          await sleep(rewriteMs, stopped.signal);
        }
      }
    },
    resized(run, { cols, rows }) {
      if (run.ended || (run.session.cols === cols && run.session.rows === rows)) return;
      run.session = { ...run.session, cols, rows };
      run.cancelResize();
      resizing.add(run);
      run.cancelResize = after(resizeMs, () => {
        resizing.delete(run);
        void change(run, {});
      });
    },
    async stop(runs) {
      stopped.abort();
      for (const run of runs) run.cancelResize();
      await Promise.all([...resizing].map((run) => change(run, {})));
    },
  };
  return life;
}
