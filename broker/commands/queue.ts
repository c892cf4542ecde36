// Commands that no agent has yet: they wait for their machine, for a place on it, or for their turn in a batch.
import { after, now } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { History } from '../history.ts';
import type { Link, Presence } from '../presence/index.ts';
import type { State } from '../state/index.ts';
import type { Places } from './places.ts';
import type { Command, Records, Spec } from './records.ts';
import type { End } from './reports.ts';
import { type Run, waits } from './run.ts';
import type { Turns } from './turns.ts';

export interface QueueRooms {
  state: State;
  history: History;
  records: Records;
  presence: Presence;
  turns: Turns;
  /** Whether the key behind a command may still have it run there. */
  mayRun(command: Command): boolean;
  places: Places;
  /** How many more an agent may have. */
  roomOn(machineId: string): number;
  start(run: Run, link: Link, spec: Spec): void;
  /** Resolves when it is on disk; never rejects. */
  end(run: Run, how: End): Promise<void>;
}

export interface Queue {
  /** Looks, once in this turn, whether any that waits may go. */
  look(): void;
  /** One more waits. */
  add(run: Run): void;
  /** Whether a command that its machine never heard of waits again. */
  again(run: Run): boolean;
  stop(): void;
}

/** So long after the broker's start, machines of commands that waited then may still be on their way back. */
const returnMs = 60_000;
/** What did not work is tried again after this. */
const againMs = 1_000;

export function openQueue(rooms: QueueRooms, log: Logger): Queue {
  const { state, history, records, presence, turns, places } = rooms;
  let looking = false;
  let closed = false;
  const returning = new Set(places.all());
  const stopWaiting = after(returnMs, () => {
    returning.clear();
    look();
  });

  const stopWatching = state.watch(() => {
    for (const run of places.all()) if (run.stored && waits(run)) judge(run);
  });

  /** Whether its key still allows it; else it has ended. */
  function judge(run: Run): boolean {
    if (rooms.mayRun(run.command)) return true;
    void rooms.end(run, { status: 'cancelled', reason: 'key_revoked' });
    return false;
  }

  function look(): void {
    if (looking || closed) return;
    looking = true;
    queueMicrotask(() => {
      looking = false;
      const room = new Map<string, number>();
      for (const run of places.all()) if (run.stored && waits(run)) consider(run, room);
    });
  }

  function consider(run: Run, room: Map<string, number>): void {
    const { machine_id, batch_id, queue_until } = run.command;
    const next = turns.next(batch_id);
    if (next === 'never') void rooms.end(run, { status: 'expired', reason: 'max_failures' });
    if (next !== 'go') return;
    if (!presence.online(machine_id)) {
      if (queue_until === null && !returning.has(run)) missTurn(run);
      return;
    }
    const left = room.get(machine_id) ?? rooms.roomOn(machine_id);
    room.set(machine_id, left - 1);
    if (left > 0) give(run, presence.get(machine_id)).catch((error: unknown) => failed(run, error));
  }

  /** Its turn is over when that is counted: it may have been one failure too many. */
  function missTurn(run: Run): void {
    const { batch_id } = run.command;
    turns.began(batch_id);
    void rooms.end(run, { status: 'expired', reason: 'machine_offline' }).then(() => {
      turns.gaveBack(batch_id);
      look();
    });
  }

  /** Writes first that an agent may have it from now on: at most once. */
  async function give(run: Run, link: Link): Promise<void> {
    if (!judge(run)) return;
    const spec = records.specOf(run.command.id);
    if (!spec) return rooms.end(run, { status: 'expired', reason: 'no_spec' });
    run.cancelTimer();
    // Nobody else is to ask the agent about it before it has it.
    run.following = true;
    run.command = { ...run.command, journal_id: link.journalId };
    turns.began(run.command.batch_id);
    try {
      await history.write(() => records.update(run.command));
    } catch (error) {
      if (!run.end) takeBack(run);
      throw error;
    }
    // Its machine may have been removed meanwhile.
    if (run.end) return;
    if (run.command.cancel) await rooms.end(run, { status: 'cancelled' });
    else rooms.start(run, link, spec);
  }

  function failed(run: Run, error: unknown): void {
    log.error({ err: error, command_id: run.command.id }, 'a command that waited could not be started');
    after(againMs, look);
  }

  function takeBack(run: Run): void {
    run.following = false;
    run.command = { ...run.command, journal_id: '' };
    turns.gaveBack(run.command.batch_id);
    expireLater(run);
  }

  function expireLater(run: Run): void {
    const { queue_until } = run.command;
    if (queue_until === null) return;
    run.cancelTimer = after(Math.max(0, queue_until - now()), () => {
      if (waits(run)) void rooms.end(run, { status: 'expired', reason: 'queue_expired' });
    });
  }

  return {
    look,
    add(run) {
      expireLater(run);
      look();
    },
    again(run) {
      const { id, queue_until, cancel, started_at } = run.command;
      if (
        started_at !== null ||
        queue_until === null ||
        queue_until <= now() ||
        cancel ||
        !records.specOf(id)
      )
        return false;
      takeBack(run);
      history
        .write(() => records.update(run.command))
        .catch((error: unknown) => log.error({ err: error }, 'that a command waits again was not noted'))
        .finally(() => after(againMs, look));
      return true;
    },
    stop() {
      closed = true;
      stopWaiting();
      stopWatching();
    },
  };
}
