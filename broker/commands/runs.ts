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
import { openLedger } from './ledger.ts';
import { type Outputs, streams } from './output.ts';
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
  add(draft: Draft, requestId: string, also: (journal: Journal) => void): Promise<void>;
  /** Persists commands that wait for their turn. */
  addAll(drafts: Draft[], requestId: string, also: (journal: Journal) => void): Promise<void>;
  get(id: string): Run | undefined;
  waitingFor(machineId: string): Run[];
  /** Resolves when the command has ended durably, after `ms`, or when the signal fires. */
  ended(id: string, ms: number, signal?: AbortSignal): Promise<void>;
  /** Asks for its end, now or when its machine is back; what waits never runs. */
  cancel(run: Run): Promise<void>;
  close(): void;
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
/** So long after the broker's start, machines of commands that waited then may still be on their way back. */
const returnMs = 60_000;

export function openRuns(
  { records, outputs, turns, ...rooms }: Rooms & { records: Records; outputs: Outputs; turns: Turns },
  opened: readonly Run[],
  log: Logger,
): Runs {
  const { state, history, events, presence, vitals } = rooms;
  const runs = new Map(opened.map((run) => [run.command.id as string, run]));
  const ledger = openLedger({ ...rooms, records }, over, log);
  const following = openFollowing(ledger, { again, lost: lookAgain }, log);
  /** Commands that are being written: they count already. */
  const arriving = new Set<Command>();
  /** Commands of an earlier broker, while their machines may still be on their way back. */
  const returning = new Set(opened);
  let closed = false;

  function given(machineId: string): Run[] {
    return [...runs.values()].filter((run) => run.command.machine_id === machineId && !waits(run));
  }

  function waitingFor(machineId: string): Run[] {
    return [...runs.values()].filter((run) => run.command.machine_id === machineId && waits(run));
  }

  /** How many an agent has or is about to have, or how many wait for it. */
  function count(machineId: string, kind: 'given' | 'waiting'): number {
    const soon = [...arriving].filter(
      ({ machine_id, journal_id }) =>
        machine_id === machineId && (journal_id === '') === (kind === 'waiting'),
    );
    return (kind === 'given' ? given(machineId) : waitingFor(machineId)).length + soon.length;
  }

  /** Writes new commands; they count from now on. */
  async function arrive(commands: Command[], write: (journal: Journal) => void): Promise<void> {
    for (const command of commands) arriving.add(command);
    try {
      await history.write(write);
    } finally {
      for (const command of commands) arriving.delete(command);
    }
  }

  /** The link to start it on, or undefined where it waits. Throws machine_offline or unavailable. */
  function placeOf({ machine_id, queue_until }: Command): Link | undefined {
    if (presence.online(machine_id) && count(machine_id, 'given') < maxOpen) return presence.get(machine_id);
    if (queue_until === null) {
      const link = presence.get(machine_id);
      throw full(link.machineId, `${maxOpen} commands are open`, maxOpen);
    }
    refuseLongQueue(machine_id);
    return undefined;
  }

  function refuseLongQueue(machineId: string): void {
    if (count(machineId, 'waiting') >= maxWaiting)
      throw full(machineId, `${maxWaiting} commands wait`, maxWaiting);
  }

  // ---- Those that wait

  let looking = false;
  /** Looks, once in this turn, whether any that waits may go. */
  function look(): void {
    if (looking || closed) return;
    looking = true;
    queueMicrotask(() => {
      looking = false;
      const room = new Map<string, number>();
      for (const run of runs.values()) if (waits(run)) consider(run, room);
    });
  }

  function consider(run: Run, room: Map<string, number>): void {
    const { machine_id, batch_id, queue_until } = run.command;
    const next = turns.next(batch_id);
    if (next === 'never') end(run, { status: 'expired', reason: 'max_failures' });
    if (next !== 'go') return;
    if (!presence.online(machine_id)) {
      if (queue_until === null && !returning.has(run)) missTurn(run);
      return;
    }
    const left = room.get(machine_id) ?? maxOpen - count(machine_id, 'given');
    room.set(machine_id, left - 1);
    if (left > 0) void give(run, presence.get(machine_id));
  }

  /** Its turn is over when that is counted: it may have been one failure too many. */
  function missTurn(run: Run): void {
    const { batch_id } = run.command;
    turns.began(batch_id);
    void ledger.ended(run, { status: 'expired', reason: 'machine_offline' }).then(() => {
      turns.gaveBack(batch_id);
      look();
    });
  }

  /** Writes first that an agent may have it from now on: at most once. */
  async function give(run: Run, link: Link): Promise<void> {
    if (!rooms.mayRun(run.command)) return end(run, { status: 'cancelled', reason: 'key_revoked' });
    const spec = run.spec ?? records.specOf(run.command.id);
    if (!spec) return end(run, { status: 'expired', reason: 'no_spec' });
    run.cancelTimer();
    // Nobody else is to ask the agent about it before it has it.
    run.following = true;
    run.command = { ...run.command, journal_id: link.journalId };
    turns.began(run.command.batch_id);
    try {
      await history.write(() => records.update(run.command));
    } catch (error) {
      log.error({ err: error, command_id: run.command.id }, 'a command that waited could not be started');
      takeBack(run);
      after(followAgainMs, look);
      return;
    }
    if (run.command.cancel) end(run, { status: 'cancelled' });
    else following.start(run, link, spec);
  }

  function takeBack(run: Run): void {
    run.following = false;
    run.command = { ...run.command, journal_id: '' };
    turns.gaveBack(run.command.batch_id);
    expireLater(run);
  }

  /** The machine never heard of a command that may wait: it waits again. */
  function again(run: Run): boolean {
    const { queue_until, cancel } = run.command;
    if (queue_until === null || queue_until <= now() || cancel || !records.specOf(run.command.id))
      return false;
    takeBack(run);
    history
      .write(() => records.update(run.command))
      .then(look, (error: unknown) => log.error({ err: error }, 'a command that waits again was not noted'));
    return true;
  }

  function expireLater(run: Run): void {
    const { queue_until } = run.command;
    if (queue_until === null) return;
    run.cancelTimer = after(Math.max(0, queue_until - now()), () => {
      if (waits(run)) end(run, { status: 'expired', reason: 'queue_expired' });
    });
  }

  // ---- Those that an agent has

  /** Everything of a machine that is back: follow it again, and pass on what was asked meanwhile. */
  function resume(machineId: string): void {
    const link = presence.get(machineId);
    for (const run of given(machineId)) {
      if (run.following || run.end) continue;
      following.resume(run, link);
      if (run.command.cancel) kill(run, link);
    }
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
    if (journal_id !== '') forget(id, machine_id);
    look();
  }

  /** What the agent cannot be told to forget now it is told when it is back. */
  function forget(id: string, machineId: string): void {
    if (!presence.online(machineId)) return;
    presence
      .get(machineId)
      .stub.forgetProcess({ id }, { request_id: newId('request') })
      .catch((error: unknown) => log.debug({ err: error, command_id: id }, 'not forgotten'));
  }

  function abandon(test: (command: Command) => boolean, reason: string): void {
    for (const run of [...runs.values()].filter(({ command }) => test(command))) {
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
      look();
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
    after(returnMs, () => {
      returning.clear();
      look();
    }),
  ];
  abandon((command) => !state.machines.has(command.machine_id), 'machine_removed');
  for (const run of runs.values()) if (waits(run)) expireLater(run);

  return {
    async add({ command, spec }, requestId, also) {
      const link = placeOf(command);
      const accepted = { ...command, journal_id: link?.journalId ?? '' };
      await arrive([accepted], (transaction) => {
        // Only what may wait is kept for later: it can hold secrets.
        records.insert(accepted, command.queue_until === null ? undefined : spec);
        also(transaction);
      });
      const run = runOf(accepted, outputs.fresh(command.id), requestId, link ? spec : undefined);
      runs.set(command.id, run);
      if (link) return following.start(run, link, spec);
      expireLater(run);
      look();
    },
    async addAll(drafts, requestId, also) {
      for (const { command } of drafts) refuseLongQueue(command.machine_id);
      const commands = drafts.map(({ command }) => command);
      await arrive(commands, (transaction) => {
        for (const { command, spec } of drafts) records.insert(command, spec);
        also(transaction);
      });
      for (const { command } of drafts) {
        const run = runOf(command, outputs.fresh(command.id), requestId);
        runs.set(command.id, run);
        expireLater(run);
      }
      look();
    },
    get: (id) => runs.get(id),
    waitingFor,
    ended: (id, ms, signal) => endOf(runs.get(id), ms, signal),
    async cancel(run) {
      if (waits(run)) return ledger.ended(run, { status: 'cancelled' });
      run.command = { ...run.command, cancel: true };
      await history.write(() => {
        if (!run.end) records.update(run.command);
      });
      const { machine_id } = run.command;
      if (!run.end && presence.online(machine_id)) kill(run, presence.get(machine_id));
    },
    close() {
      closed = true;
      for (const stop of stops) stop();
      for (const run of runs.values()) {
        run.cancelTimer();
        for (const wake of run.waiters) wake();
        run.output.changed.wake();
        for (const stream of streams) run.output[stream].release();
      }
    },
  };
}

function endOf(run: Run | undefined, ms: number, signal: AbortSignal | undefined): Promise<void> {
  if (!run || ms === 0 || signal?.aborted) return Promise.resolve();
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
