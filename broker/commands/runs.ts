// Commands that have not ended: followed on their machine until they do, over lost links and broker restarts.
import type { ProcessEvent__Output } from '../../proto/types/farhand/agent/v1/ProcessEvent.ts';
import type { ProcessExit__Output } from '../../proto/types/farhand/agent/v1/ProcessExit.ts';
import type { ProcessSpec } from '../../proto/types/farhand/agent/v1/ProcessSpec.ts';
import type { EventType } from '../../shared/api/events.ts';
import type { Journal } from '../../shared/api/index.ts';
import { after, every, latestInstant, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Events } from '../events.ts';
import type { History } from '../history.ts';
import type { Link, Presence } from '../link/presence.ts';
import type { State } from '../state/index.ts';
import { type Command, isOpen, type Records, type Status } from './records.ts';

export interface Runs {
  /** Persists a new command with `also` and starts it; resolves once it is on disk. */
  start(
    command: Command,
    spec: ProcessSpec,
    link: Link,
    requestId: string,
    also: (journal: Journal) => void,
  ): Promise<void>;
  /** The command as it is now, if it has not ended. */
  current(id: string): Command | undefined;
  /** Resolves when the command has ended durably, or after `ms`. */
  ended(id: string, ms: number): Promise<void>;
  /** Asks for its end, now or when its machine is back. */
  cancel(id: string): Promise<void>;
  close(): void;
}

/** What the record keeps of each stream. */
const tailBytes = 1024 * 1024;
/** A command that ends within this time has its start and its end in one transaction. */
const startedLaterMs = 10;
const killGraceMs = 10_000;
/** A command that was lost sight of while its machine is linked is looked for again after this. */
const followAgainMs = 1_000;
/** An end that could not be written (disk full) is tried again after this. */
const rewriteMs = 5_000;
/** After this long without its machine, a command's outcome is called unknown. */
const noReportMs = 24 * 3_600_000;

const outcomes: Readonly<Record<ProcessExit__Output['outcome'], Status>> = {
  PROCESS_OUTCOME_UNSPECIFIED: 'lost',
  PROCESS_OUTCOME_EXITED: 'completed',
  PROCESS_OUTCOME_NOT_STARTED: 'failed',
  PROCESS_OUTCOME_TIMEOUT: 'timeout',
  PROCESS_OUTCOME_CANCELLED: 'cancelled',
  PROCESS_OUTCOME_EXPIRED: 'expired',
  PROCESS_OUTCOME_LOST: 'lost',
};

/** An open command, its output so far, and who waits for it. */
interface Run {
  command: Command;
  stdout: Tail;
  stderr: Tail;
  following: boolean;
  announced: boolean;
  cancelStarted: () => void;
  waiters: Set<() => void>;
}

export function openRuns(
  rooms: { state: State; history: History; events: Events; presence: Presence; records: Records },
  log: Logger,
): Runs {
  const { state, history, events, presence, records } = rooms;
  let closed = false;
  const runs = new Map<string, Run>(records.open().map((command) => [command.id, runOf(command)]));

  function emit(journal: Journal, type: EventType, command: Command): void {
    const { id, started_at, finished_at } = command;
    const machine = state.machines.get(command.machine_id) ?? { id: command.machine_id, name: '' };
    events.emit(journal, type, machine, {
      command_id: id,
      command: command.command,
      status: command.status,
      exit_code: command.exit_code,
      duration: started_at === null || finished_at === null ? null : finished_at - started_at,
      schedule_id: null,
    });
  }

  /** Follows one stream of process events to its end; a lost link leaves the run open for the next one. */
  async function follow(
    run: Run,
    link: Link,
    parts: AsyncIterable<{ event?: ProcessEvent__Output | null }>,
  ): Promise<void> {
    run.following = true;
    try {
      for await (const { event } of parts) if (event) await take(run, link, event);
    } catch (error) {
      if (isOpen(run.command)) await refused(run, error);
    } finally {
      run.following = false;
    }
    // A newer link may have come while this one was still ending, or the machine was only slow.
    if (isOpen(run.command)) after(followAgainMs, () => resumeIfOnline(run.command.machine_id));
  }

  async function take(run: Run, link: Link, event: ProcessEvent__Output): Promise<void> {
    if (!isSound(event)) return finish(run, { status: 'lost', reason: 'bad_report' });
    if (event.started) begun(run, event.started.started_at_ms);
    if (event.output) {
      const { stream, offset, data } = event.output;
      (stream === 'OUTPUT_STREAM_STDERR' ? run.stderr : run.stdout).take(offset, data);
    }
    if (!event.exit) return;
    await finish(run, verdict(event.exit, run.command, link));
    link.stub
      .forgetProcess({ id: run.command.id }, { request_id: newId('request') })
      // The agent keeps what it could not be told to forget for a day, then drops it by itself.
      .catch((error: unknown) => log.debug({ err: error, command_id: run.command.id }, 'not forgotten'));
  }

  function begun(run: Run, startedAt: number): void {
    if (run.command.status !== 'queued') return;
    run.command = { ...run.command, status: 'running', started_at: startedAt };
    run.cancelStarted = after(startedLaterMs, () => {
      history
        .write((transaction) => announceStart(run, transaction))
        .catch((error: unknown) =>
          log.error({ err: error, command_id: run.command.id }, 'start not recorded'),
        );
    });
  }

  function announceStart(run: Run, journal: Journal): void {
    if (run.announced || run.command.started_at === null) return;
    run.announced = true;
    if (isOpen(run.command)) records.save(run.command);
    emit(journal, 'command.started', {
      ...run.command,
      status: 'running',
      exit_code: null,
      finished_at: null,
    });
  }

  /** An error of the machine before it started anything; whatever may have run stays open. */
  async function refused(run: Run, error: unknown): Promise<void> {
    const passing =
      !(error instanceof AppError) || ['machine_offline', 'machine_timeout'].includes(error.code);
    if (passing || run.command.started_at !== null) {
      log.info({ err: error, command_id: run.command.id }, 'lost sight of a command');
      return;
    }
    await finish(run, { status: 'failed', reason: `${error.code}: ${error.message}` });
  }

  async function finish(run: Run, end: Partial<Command> & { status: Status }): Promise<void> {
    if (!isOpen(run.command)) return;
    run.cancelStarted();
    const { stdout, stderr } = run;
    const command: Command = {
      ...run.command,
      finished_at: now(),
      stdout: stdout.bytes(),
      stderr: stderr.bytes(),
      stdout_bytes: stdout.end,
      stderr_bytes: stderr.end,
      ...end,
    };
    const before = run.command;
    // Taken before the write, so that a second end finds it closed.
    run.command = command;
    try {
      await history.write((transaction) => {
        announceStart(run, transaction);
        records.save(command);
        emit(transaction, eventOf(command.status), command);
      });
    } catch (error) {
      run.command = before;
      after(
        rewriteMs,
        () => void finish(run, end).catch((again: unknown) => log.error({ err: again }, 'not recorded')),
      );
      throw error;
    }
    runs.delete(command.id);
    for (const wake of run.waiters) wake();
  }

  /** Everything open on a machine that is back: follow it again, and pass on what was asked meanwhile. */
  function resume(machineId: string): void {
    const link = presence.get(machineId);
    for (const run of runs.values()) {
      if (run.command.machine_id !== machineId || run.following) continue;
      const { id } = run.command;
      const request = { id, stdout_offset: run.stdout.end, stderr_offset: run.stderr.end };
      void follow(run, link, link.stub.followProcess(request, { request_id: newId('request'), idle_ms: 0 }));
      if (run.command.cancel) kill(run, link);
    }
  }

  function resumeIfOnline(machineId: string): void {
    if (!closed && presence.online(machineId)) resume(machineId);
  }

  function kill(run: Run, link: Link): void {
    link.stub
      .killProcess({ id: run.command.id, grace_ms: killGraceMs }, { request_id: newId('request') })
      .catch((error: unknown) => log.warn({ err: error, command_id: run.command.id }, 'could not cancel'));
  }

  function abandon(test: (command: Command) => boolean, reason: string): void {
    for (const run of [...runs.values()].filter(({ command }) => test(command))) {
      finish(run, { status: 'lost', reason }).catch((error: unknown) =>
        log.error({ err: error }, 'not recorded'),
      );
    }
  }

  const stopWatching = presence.watch((machineId, online) => {
    if (online) resume(machineId);
  });
  const stopListening = events.listen(({ type, data }) => {
    if (type === 'machine.removed')
      abandon((command) => command.machine_id === data.machine_id, 'machine_removed');
  });
  const stopSweeping = every(3_600_000, () =>
    abandon((c) => !presence.online(c.machine_id) && now() - c.created_at > noReportMs, 'no_report'),
  );
  abandon((command) => !state.machines.has(command.machine_id), 'machine_removed');

  return {
    async start(command, spec, link, requestId, also) {
      await history.write((transaction) => {
        records.save(command);
        also(transaction);
      });
      const run = runOf(command);
      runs.set(command.id, run);
      void follow(
        run,
        link,
        link.stub.startProcess({ id: command.id, spec }, { request_id: requestId, idle_ms: 0 }),
      );
    },
    current(id) {
      const run = runs.get(id);
      return run && { ...run.command, ...outputOf(run) };
    },
    ended(id, ms) {
      const run = runs.get(id);
      if (!run || ms === 0) return Promise.resolve();
      return new Promise((resolve) => {
        const done = (): void => {
          cancel();
          run.waiters.delete(done);
          resolve();
        };
        const cancel = after(ms, done);
        run.waiters.add(done);
      });
    },
    async cancel(id) {
      const run = runs.get(id);
      if (!run) return;
      run.command = { ...run.command, cancel: true };
      await history.write(() => {
        if (isOpen(run.command)) records.save(run.command);
      });
      if (isOpen(run.command) && presence.online(run.command.machine_id))
        kill(run, presence.get(run.command.machine_id));
    },
    close() {
      closed = true;
      stopWatching();
      stopListening();
      stopSweeping();
      for (const run of runs.values()) {
        run.cancelStarted();
        for (const wake of run.waiters) wake();
      }
    },
  };
}

function runOf(command: Command): Run {
  return {
    command,
    stdout: new Tail(),
    stderr: new Tail(),
    following: false,
    announced: command.started_at !== null,
    cancelStarted: () => {},
    waiters: new Set(),
  };
}

function outputOf({ stdout, stderr }: Run) {
  return {
    stdout: stdout.bytes(),
    stderr: stderr.bytes(),
    stdout_bytes: stdout.end,
    stderr_bytes: stderr.end,
  };
}

/** What an exit means for the record. */
function verdict(
  exit: ProcessExit__Output,
  command: Command,
  link: Link,
): Partial<Command> & { status: Status } {
  const unknown = exit.outcome === 'PROCESS_OUTCOME_EXPIRED' && link.journalId !== command.journal_id;
  const ran = exit.outcome === 'PROCESS_OUTCOME_EXITED';
  const status = unknown ? 'lost' : ran && exit.exit_code !== 0 ? 'failed' : outcomes[exit.outcome];
  const timed = exit.started_at_ms > 0;
  return {
    status,
    exit_code: timed && status !== 'lost' ? exit.exit_code : null,
    signal: exit.signal || null,
    reason: unknown ? 'no_report' : exit.reason || null,
    ...(timed && { started_at: exit.started_at_ms }),
    ...(exit.finished_at_ms > 0 && { finished_at: exit.finished_at_ms }),
    stdout_bytes: exit.stdout_bytes,
    stderr_bytes: exit.stderr_bytes,
  };
}

/** Whether every time and count of a report can be one; an agent that says otherwise spoils only its own command. */
function isSound({ started, output, exit }: ProcessEvent__Output): boolean {
  const times = [started?.started_at_ms ?? 0, exit?.started_at_ms ?? 0, exit?.finished_at_ms ?? 0];
  const reach = (output?.offset ?? 0) + (output?.data.length ?? 0);
  const counts = [exit?.stdout_bytes ?? 0, exit?.stderr_bytes ?? 0, reach];
  const within = (values: number[], most: number): boolean =>
    values.every((value) => value >= 0 && value <= most);
  const words = /^[\x20-\x7e]{0,32}$/.test(exit?.signal ?? '') && (exit?.reason.length ?? 0) <= 4096;
  return within(times, latestInstant) && within(counts, Number.MAX_SAFE_INTEGER) && words;
}

function eventOf(status: Status): EventType {
  if (status === 'completed') return 'command.completed';
  return status === 'timeout' ? 'command.timeout' : 'command.failed';
}

/** The last bytes of a stream, and how many there were in all. */
class Tail {
  #chunks: Buffer[] = [];
  #kept = 0;
  end = 0;

  take(offset: number, data: Buffer): void {
    const fresh = data.subarray(Math.max(0, this.end - offset));
    this.end = Math.max(this.end, offset + data.length);
    // Decoded bytes are a view of a larger frame: keep a copy.
    this.#chunks.push(Buffer.from(fresh));
    this.#kept += fresh.length;
    if (this.#kept > 2 * tailBytes) this.#chunks = [this.bytes()];
    this.#kept = Math.min(this.#kept, this.#chunks.length === 1 ? tailBytes : this.#kept);
  }

  bytes(): Buffer {
    return Buffer.concat(this.#chunks).subarray(-tailBytes);
  }
}
