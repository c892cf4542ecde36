// Commands that have not ended: they wait for their machine or their turn, run once, and are followed to their end over
// lost links and broker restarts.
import type { Journal } from '../../shared/api/index.ts';
import { after, every, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Events } from '../events.ts';
import type { History } from '../history.ts';
import type { Link, Presence } from '../link/presence.ts';
import type { Vitals } from '../machines/vitals.ts';
import type { State } from '../state/index.ts';
import { openFollowing } from './following.ts';
import { openForgetting } from './forgetting.ts';
import { openLedger } from './ledger.ts';
import { type Outputs, streams } from './output.ts';
import { openQueue } from './queue.ts';
import type { Command, Records, Spec } from './records.ts';
import type { End } from './reports.ts';
import { type Run, runOf, waits } from './run.ts';
import type { Turns } from './turns.ts';

export interface Rooms {
  state: State;
  history: History;
  events: Events;
  presence: Presence;
  vitals: Vitals;
  /** Whether a key may still have its command run there. */
  mayRun(command: Command): boolean;
}

/** A new command and what is to be started. */
export interface Draft {
  command: Command;
  spec: Spec;
}

export interface Runs {
  /** Persists a command with `also` and starts it, or lets it wait where it may; resolves once it is on disk. */
  add(draft: Draft, requestId: string, also: (journal: Journal) => void): Promise<Run>;
  /** Persists commands that wait for their turn. */
  addAll(drafts: Draft[], requestId: string, also: (journal: Journal) => void): Promise<Run[]>;
  get(id: string): Run | undefined;
  waitingFor(machineId: string): Run[];
  /** Resolves when the command has ended durably, after `ms`, or when the signal fires. */
  ended(run: Run, ms: number, signal?: AbortSignal): Promise<void>;
  /** Asks for its end, now or when its machine is back; what waits never runs. */
  cancel(run: Run): Promise<void>;
  /** Wakes everybody who waits; nothing is started any more. */
  stop(): void;
  /** Gives the files back, once no link is left. */
  close(): Promise<void>;
}

/** Commands that agents have at once, a machine. */
const maxOpen = 64;
/** Commands that wait for one machine. */
const maxWaiting = 1000;
const killGraceMs = 10_000;
/** A command that was lost sight of while its machine is linked is looked for again after this. */
const followAgainMs = 1_000;
/** After this long without its machine, a command's outcome is called unknown. */
const noReportMs = 24 * 3_600_000;

export function openRuns(
  { records, outputs, turns, ...rooms }: Rooms & { records: Records; outputs: Outputs; turns: Turns },
  opened: readonly Run[],
  log: Logger,
): Runs {
  const { state, history, events, presence, vitals } = rooms;
  const runs = new Map(opened.map((run) => [run.command.id as string, run]));
  const ledger = openLedger({ ...rooms, records }, over, log);
  const following = openFollowing(ledger, { again: (run) => queue.again(run), lost: lookAgain }, log);
  const roomOn = (machineId: string): number => maxOpen - given(machineId).length;
  const forgetting = openForgetting(presence, log);
  const queue = openQueue(
    { ...rooms, records, turns, runs, roomOn, start: following.start, end: ledger.ended },
    log,
  );
  let closed = false;

  function given(machineId: string): Run[] {
    return [...runs.values()].filter((run) => run.command.machine_id === machineId && !waits(run));
  }

  function waitingFor(machineId: string): Run[] {
    return [...runs.values()].filter((run) => run.command.machine_id === machineId && waits(run));
  }

  /** The link to start it on, or undefined where it waits. Throws machine_offline or unavailable. */
  function placeOf({ machine_id, queue_until }: Command): Link | undefined {
    if (presence.online(machine_id) && roomOn(machine_id) > 0) return presence.get(machine_id);
    if (queue_until === null) {
      const link = presence.get(machine_id);
      throw full(link.machineId, `${maxOpen} commands are open`, maxOpen);
    }
    refuseLongQueue(machine_id);
    return undefined;
  }

  function refuseLongQueue(machineId: string): void {
    if (waitingFor(machineId).length >= maxWaiting)
      throw full(machineId, `${maxWaiting} commands wait`, maxWaiting);
  }

  /** Writes new commands; they take their places before they are on disk. */
  async function store(
    drafts: { command: Command; spec: Spec | undefined }[],
    requestId: string,
    also: (journal: Journal) => void,
  ): Promise<Run[]> {
    const added = drafts.map(({ command }) => runOf(command, outputs.fresh(command.id), requestId));
    for (const run of added) runs.set(run.command.id, run);
    try {
      await history.write((transaction) => {
        for (const { command, spec } of drafts) records.insert(command, spec);
        also(transaction);
      });
    } catch (error) {
      for (const { command } of drafts) runs.delete(command.id);
      throw error;
    }
    for (const run of added) {
      run.stored = true;
      if (!state.machines.has(run.command.machine_id))
        end(run, { status: 'expired', reason: 'machine_removed' });
    }
    return added;
  }

  // ---- Those that an agent has

  /** Everything of a machine that is back: follow it again, and pass on what was asked meanwhile. */
  function resume(machineId: string): void {
    const link = presence.get(machineId);
    for (const run of given(machineId)) {
      if (!run.stored || run.following || run.end) continue;
      following.resume(run, link);
      if (run.command.cancel) kill(run, link);
    }
    // Ended while the agent could not be told.
    const ended = link.processIds.filter((id) => !runs.has(id) && records.find(id)?.finished_at);
    forgetting.add(machineId, ended);
  }

  /** A newer link may have come while the old one was still ending, or the machine was only slow. */
  function lookAgain(run: Run): void {
    const { machine_id } = run.command;
    after(followAgainMs, () => {
      if (!closed && presence.online(machine_id)) resume(machine_id);
    });
  }

  function kill(run: Run, link: Link): void {
    link.stub
      .killProcess({ id: run.command.id, grace_ms: killGraceMs }, { request_id: newId('request') })
      .catch((error: unknown) => log.warn({ err: error, command_id: run.command.id }, 'could not cancel'));
  }

  // ---- Ends

  function end(run: Run, how: End): void {
    void ledger.ended(run, how);
  }

  function over(run: Run): void {
    const { id, machine_id, batch_id, status, journal_id, kept_bytes } = run.command;
    runs.delete(id);
    turns.ended(batch_id, { ran: journal_id !== '', completed: status === 'completed' });
    outputs.ended(kept_bytes);
    for (const wake of run.waiters) wake();
    run.output.changed.wake();
    if (journal_id !== '') forgetting.add(machine_id, [id]);
    queue.look();
  }

  function abandon(test: (command: Command) => boolean, reason: string): void {
    for (const run of [...runs.values()].filter(({ command, stored }) => stored && test(command))) {
      end(run, { status: waits(run) ? 'expired' : 'lost', reason });
    }
  }

  function isSilent({ machine_id, created_at, journal_id }: Command): boolean {
    if (journal_id === '' || presence.online(machine_id)) return false;
    return now() - Math.max(created_at, vitals.of(machine_id)?.last_seen ?? 0) > noReportMs;
  }

  const stops = [
    presence.watch((machineId, online) => {
      if (online) resume(machineId);
      queue.look();
    }),
    events.listen(({ type, data }) => {
      if (type === 'machine.removed')
        abandon((command) => command.machine_id === data.machine_id, 'machine_removed');
    }),
    state.watch(() => {
      for (const run of runs.values()) {
        if (waits(run) && !rooms.mayRun(run.command))
          end(run, { status: 'cancelled', reason: 'key_revoked' });
      }
    }),
    every(3_600_000, () => abandon(isSilent, 'no_report')),
  ];
  abandon((command) => !state.machines.has(command.machine_id), 'machine_removed');
  for (const run of runs.values()) if (waits(run)) queue.add(run);

  return {
    async add({ command, spec }, requestId, also) {
      const link = placeOf(command);
      const accepted = { ...command, journal_id: link?.journalId ?? '' };
      // Only what may wait is kept for later: it can hold secrets.
      const kept = command.queue_until === null ? undefined : spec;
      const [run] = await store([{ command: accepted, spec: kept }], requestId, also);
      if (!run) throw new Error('nothing was stored');
      if (link) following.start(run, link, spec);
      else queue.add(run);
      return run;
    },
    async addAll(drafts, requestId, also) {
      for (const { command } of drafts) refuseLongQueue(command.machine_id);
      const added = await store(drafts, requestId, also);
      for (const run of added) queue.add(run);
      return added;
    },
    get: (id) => runs.get(id),
    waitingFor,
    ended: endOf,
    async cancel(run) {
      if (waits(run)) return ledger.ended(run, { status: 'cancelled' });
      run.command = { ...run.command, cancel: true };
      await history.write(() => {
        if (!run.end) records.update(run.command);
      });
      const { machine_id } = run.command;
      if (!run.end && presence.online(machine_id)) kill(run, presence.get(machine_id));
    },
    stop() {
      closed = true;
      queue.close();
      forgetting.close();
      for (const stop of stops) stop();
      for (const run of runs.values()) {
        run.cancelTimer();
        for (const wake of run.waiters) wake();
        run.output.changed.wake();
        for (const stream of streams) run.output[stream].release();
      }
    },
    async close() {
      const open = [...runs.values()].flatMap(({ output }) => streams.map((stream) => output[stream]));
      await Promise.all(open.map((log) => log.close()));
    },
  };
}

function endOf(run: Run, ms: number, signal?: AbortSignal): Promise<void> {
  if (run.over || ms === 0 || signal?.aborted) return Promise.resolve();
  return new Promise((resolve) => {
    const done = (): void => {
      cancel();
      run.waiters.delete(done);
      signal?.removeEventListener('abort', done);
      resolve();
    };
    const cancel = after(ms, done);
    run.waiters.add(done);
    signal?.addEventListener('abort', done, { once: true });
  });
}

function full(machineId: string, what: string, limit: number): AppError {
  return new AppError('unavailable', `${what} on this machine already: try again later`, {
    machine_id: machineId,
    limit,
  });
}
