// Commands that have not ended: they wait for their machine or their turn, run once, and are followed to their end over
// lost links and broker restarts.
import type { Journal } from '../../shared/api/index.ts';
import type { BatchId } from '../../shared/api/route.ts';
import { after, every, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { openCommands } from '../../shared/limits.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Asking } from '../../shared/rpc.ts';
import type { Events } from '../events.ts';
import type { History, HistoryTransaction } from '../history.ts';
import type { Link, Presence } from '../presence/index.ts';
import type { MachineFacts } from '../presence/machine-facts.ts';
import type { State } from '../state/index.ts';
import { openLedger } from './ledger.ts';
import { streams } from './output.ts';
import type { Outputs } from './outputs.ts';
import { Places } from './places.ts';
import { openQueue } from './queue.ts';
import type { Command, Records, Spec } from './records.ts';
import { type Run, runOf, waits, wakeAll } from './run.ts';
import { openSupervision } from './supervision.ts';
import type { Turns } from './turns.ts';

export interface Rooms {
  state: State;
  history: History;
  events: Events;
  presence: Presence;
  machineFacts: MachineFacts;
  /** Whether a key may still have its command run there. */
  mayRun(command: Command): boolean;
  /** A command ends, in the transaction that writes it. */
  ended(command: Command, transaction: HistoryTransaction): void;
}

interface RunRooms extends Rooms {
  records: Records;
  outputs: Outputs;
  turns: Turns;
  /** No command of a batch is open any more. */
  batchOver(batch: BatchId): void;
}

export interface Runs {
  /** Persists a command with `also` and starts it, or lets it wait where it may; resolves once it is on disk. */
  add(command: Command, spec: Spec, requestId: string, also: (journal: Journal) => void): Promise<Run>;
  /** Persists commands of a batch, which wait for their turn; what to start is the batch's. */
  addAll(commands: Command[], requestId: string, also: (journal: Journal) => void): Promise<Run[]>;
  get(id: string): Run | undefined;
  waitingFor(machineId: string): Run[];
  /** Resolves when the command has started or ended, after `ms`, or when the signal fires. */
  begun(run: Run, ms: number, signal?: AbortSignal): Promise<void>;
  /** Resolves when the command has ended durably, after `ms`, or when the signal fires. */
  ended(run: Run, ms: number, signal?: AbortSignal): Promise<void>;
  /** Asks for its end, now or when its machine is back; what waits never runs. */
  cancel(run: Run, by?: Asking): Promise<void>;
  /** Wakes everybody who waits; nothing is started any more. */
  stop(): void;
  /** Gives the files back, once no link is left. */
  close(): Promise<void>;
}

/** Commands that wait for one machine. */
const maxWaiting = 1000;
/** After this long without its machine, a command's outcome is called unknown. */
const noReportMs = 24 * 3_600_000;

export function openRuns(
  { records, outputs, turns, ...rooms }: RunRooms,
  opened: readonly Run[],
  log: Logger,
): Runs {
  const { state, history, events, presence } = rooms;
  const places = new Places();
  for (const run of opened) places.add(run);
  const ledger = openLedger({ ...rooms, records }, over, log);
  const supervision = openSupervision(
    { presence, places, ledger, again: (run) => queue.again(run), asking: askingOf },
    log,
  );
  const roomOn = (machineId: string): number => openCommands - places.given(machineId).length;
  const { start } = supervision;
  const queue = openQueue({ ...rooms, records, turns, places, roomOn, start, end: ledger.ended }, log);

  /** The key that asked for it, by its name of today. */
  function askingOf({ command: { requested_by } }: Run): Asking {
    return { key_id: requested_by, key_name: state.keys.get(requested_by)?.name ?? '' };
  }

  /** The link to start it on, or undefined where it waits. Throws machine_offline or unavailable. */
  function placeOf({ machine_id, queue_until }: Command): Link | undefined {
    if (presence.online(machine_id) && roomOn(machine_id) > 0) return presence.get(machine_id);
    if (queue_until === null) {
      const link = presence.get(machine_id);
      throw full(link.machineId, `${openCommands} commands are open`, openCommands);
    }
    refuseLongQueue(machine_id);
    return undefined;
  }

  function refuseLongQueue(machineId: string): void {
    if (places.waiting(machineId).length >= maxWaiting)
      throw full(machineId, `${maxWaiting} commands wait`, maxWaiting);
  }

  /** Writes new commands; they take their places before they are on disk. */
  async function store(
    drafts: { command: Command; spec: Spec | undefined }[],
    requestId: string,
    also: (journal: Journal) => void,
  ): Promise<Run[]> {
    const added = drafts.map(({ command }) => runOf(command, outputs.fresh(command.id), requestId));
    for (const run of added) places.add(run);
    try {
      await history.write((transaction) => {
        for (const { command, spec } of drafts) records.insert(command, spec);
        also(transaction);
      });
    } catch (error) {
      for (const run of added) places.delete(run);
      queue.look();
      throw error;
    }
    for (const run of added) run.stored = true;
    abandon(({ machine_id }) => !state.machines.has(machine_id), 'machine_removed', added);
    return added;
  }

  function over(run: Run): void {
    const { batch_id, status, journal_id, kept_bytes } = run.command;
    places.delete(run);
    const last = turns.ended(batch_id, { ran: journal_id !== '', completed: status === 'completed' });
    if (last && batch_id) rooms.batchOver(batch_id);
    outputs.ended(kept_bytes);
    wakeAll(run);
    run.output.changed.wake();
    supervision.over(run.command);
    queue.look();
  }

  function abandon(
    test: (command: Command) => boolean,
    reason: string,
    among: Iterable<Run> = places.all(),
  ): void {
    for (const run of [...among].filter(({ command, stored }) => stored && test(command))) {
      void ledger.ended(run, { status: waits(run) ? 'expired' : 'lost', reason });
    }
  }

  const stops = [
    presence.watch(() => queue.look()),
    events.listen(({ type, data }) => {
      if (type === 'machine.removed')
        abandon((command) => command.machine_id === data.machine_id, 'machine_removed');
    }),
    every(3_600_000, () => abandon((command) => isSilent(command, rooms), 'no_report')),
  ];
  abandon(({ machine_id }) => !state.machines.has(machine_id), 'machine_removed');
  for (const run of places.all()) if (waits(run)) queue.add(run);

  return {
    async add(command, spec, requestId, also) {
      const link = placeOf(command);
      const accepted = { ...command, journal_id: link?.journalId ?? '' };
      // Only what may wait is kept for later: it can hold secrets.
      const kept = command.queue_until === null ? undefined : spec;
      const [run] = await store([{ command: accepted, spec: kept }], requestId, also);
      if (!run) throw new Error('nothing was stored');
      if (link && !run.end) start(run, link, spec);
      if (!link) queue.add(run);
      return run;
    },
    async addAll(commands, requestId, also) {
      for (const { machine_id } of commands) refuseLongQueue(machine_id);
      const drafts = commands.map((command) => ({ command, spec: undefined }));
      const added = await store(drafts, requestId, also);
      for (const run of added) queue.add(run);
      return added;
    },
    get: (id) => places.get(id),
    waitingFor: (machineId) => places.waiting(machineId).filter(({ stored }) => stored),
    begun: (run, ms, signal) =>
      run.command.started_at === null && !run.over ? within(run.starters, ms, signal) : Promise.resolve(),
    ended: (run, ms, signal) => (run.over ? Promise.resolve() : within(run.waiters, ms, signal)),
    async cancel(run, by) {
      run.cancelledBy = by && { key_id: by.key_id, key_name: by.key_name };
      if (waits(run)) return ledger.ended(run, { status: 'cancelled' });
      run.command = { ...run.command, cancel: true };
      const written = history.write(() => {
        if (!run.end) records.update(run.command);
      });
      // A full disk is no reason to let it run on.
      await written.catch((error: unknown) => {
        if (!presence.online(run.command.machine_id)) throw error;
        log.error({ err: error, command_id: run.command.id }, 'a cancel could not be written');
      });
      supervision.kill(run);
    },
    stop() {
      ledger.stop();
      supervision.stop();
      queue.stop();
      for (const stop of stops) stop();
      for (const run of places.all()) {
        run.cancelTimer();
        wakeAll(run);
        run.output.changed.wake();
        for (const stream of streams) run.output[stream].release();
      }
    },
    async close() {
      const open = [...places.all()].flatMap(({ output }) => streams.map((stream) => output[stream]));
      await Promise.all(open.map((log) => log.close()));
    },
  };
}

function isSilent(
  { machine_id, created_at, journal_id }: Command,
  { presence, machineFacts }: Rooms,
): boolean {
  if (journal_id === '' || presence.online(machine_id)) return false;
  return now() - Math.max(created_at, machineFacts.of(machine_id)?.last_seen ?? 0) > noReportMs;
}

/** Resolves when one of these is called, after `ms`, or when the signal fires. */
function within(waiters: Set<() => void>, ms: number, signal?: AbortSignal): Promise<void> {
  if (ms === 0 || signal?.aborted) return Promise.resolve();
  return new Promise((resolve) => {
    const done = (): void => {
      cancel();
      waiters.delete(done);
      signal?.removeEventListener('abort', done);
      resolve();
    };
    const cancel = after(ms, done);
    waiters.add(done);
    signal?.addEventListener('abort', done, { once: true });
  });
}

function full(machineId: string, what: string, limit: number): AppError {
  return new AppError(
    'unavailable',
    `${what} on this machine already: try again later, or let it wait with queue_for`,
    {
      machine_id: machineId,
      limit,
    },
  );
}
