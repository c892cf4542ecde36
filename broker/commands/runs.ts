// Commands that have not ended: followed on their machine until they do, over lost links and broker restarts.
import type { ProcessEvent__Output } from '../../proto/types/farhand/agent/v1/ProcessEvent.ts';
import type { ProcessSpec } from '../../proto/types/farhand/agent/v1/ProcessSpec.ts';
import type { EventType } from '../../shared/api/events.ts';
import type { Journal } from '../../shared/api/index.ts';
import { after, every, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Events } from '../events.ts';
import type { History } from '../history.ts';
import type { Link, Presence } from '../link/presence.ts';
import type { State } from '../state/index.ts';
import type { Command, Records, Status } from './records.ts';
import { type End, isSound, verdict } from './reports.ts';
import { Tail } from './tail.ts';

export interface Runs {
  /** Persists a new command with `also` and starts it; resolves once it is on disk. */
  start(
    command: Command,
    spec: ProcessSpec,
    link: Link,
    requestId: string,
    also: (journal: Journal) => void,
  ): Promise<void>;
  /** How many have not ended on a machine. */
  openOn(machineId: string): number;
  /** The command as it is now, if it has not ended. */
  current(id: string): Command | undefined;
  /** Resolves when the command has ended durably, or after `ms`. */
  ended(id: string, ms: number): Promise<void>;
  /** Asks for its end, now or when its machine is back. */
  cancel(id: string): Promise<void>;
  close(): void;
}

/** A command that ends within this time has its start and its end in one transaction. */
const startedLaterMs = 10;
const killGraceMs = 10_000;
/** A command that was lost sight of while its machine is linked is looked for again after this. */
const followAgainMs = 1_000;
/** An end that could not be written (disk full) is tried again after this. */
const rewriteMs = 5_000;
/** After this long without its machine, a command's outcome is called unknown. */
const noReportMs = 24 * 3_600_000;

/** An open command, its output so far, and who waits for it. */
interface Run {
  command: Command;
  stdout: Tail;
  stderr: Tail;
  following: boolean;
  /** How it ended, until that is on disk. */
  end: Command | undefined;
  announced: boolean;
  cancelTimer: () => void;
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
      refused(run, error);
    } finally {
      run.following = false;
    }
    // A newer link may have come while this one was still ending, or the machine was only slow.
    if (!run.end) after(followAgainMs, () => resumeIfOnline(run.command.machine_id));
  }

  async function take(run: Run, link: Link, event: ProcessEvent__Output): Promise<void> {
    if (!isSound(event)) return finish(run, { status: 'lost', reason: 'bad_report' });
    if (event.started) begun(run, event.started.started_at_ms);
    if (event.output) {
      const { stream, offset, data } = event.output;
      (stream === 'OUTPUT_STREAM_STDERR' ? run.stderr : run.stdout).take(offset, data);
    }
    if (event.exit) await finish(run, verdict(event.exit, run.command, link));
  }

  function begun(run: Run, startedAt: number): void {
    if (run.command.status !== 'queued') return;
    run.command = { ...run.command, status: 'running', started_at: startedAt };
    run.cancelTimer = after(startedLaterMs, () => {
      history
        .write((transaction) => announceStart(run, transaction))
        .catch((error: unknown) => {
          run.announced = false;
          log.error({ err: error, command_id: run.command.id }, 'start not recorded');
        });
    });
  }

  function announceStart(run: Run, journal: Journal): void {
    if (run.announced || run.command.started_at === null) return;
    run.announced = true;
    if (!run.end) records.save(run.command);
    const then = { status: 'running', exit_code: null, finished_at: null } as const;
    emit(journal, 'command.started', { ...run.command, ...then });
  }

  /** An error of the machine before it started anything; whatever may have run stays open. */
  function refused(run: Run, error: unknown): void {
    const passing =
      !(error instanceof AppError) || ['machine_offline', 'machine_timeout'].includes(error.code);
    if (passing || run.command.started_at !== null) {
      log.info({ err: error, command_id: run.command.id }, 'lost sight of a command');
      return;
    }
    void finish(run, { status: 'failed', reason: `${error.code}: ${error.message}` });
  }

  /** The first end counts. Never rejects: an end that cannot be written now (disk full) is tried again. */
  async function finish(run: Run, end: End): Promise<void> {
    if (run.end) return;
    run.cancelTimer();
    const { stdout, stderr } = run;
    const output = {
      stdout: stdout.bytes(),
      stderr: stderr.bytes(),
      stdout_bytes: stdout.end,
      stderr_bytes: stderr.end,
    };
    run.end = { ...run.command, finished_at: now(), ...output, ...end };
    await record(run, run.end);
  }

  async function record(run: Run, command: Command): Promise<void> {
    const announced = run.announced;
    try {
      await history.write((transaction) => {
        run.command = { ...run.command, started_at: command.started_at };
        announceStart(run, transaction);
        records.save(command);
        emit(transaction, eventOf(command.status), command);
      });
    } catch (error) {
      log.error(
        { err: error, command_id: command.id },
        'the end of a command could not be written; trying again',
      );
      run.announced = announced;
      run.cancelTimer = after(rewriteMs, () => void record(run, command));
      return;
    }
    run.command = command;
    runs.delete(command.id);
    for (const wake of run.waiters) wake();
    forget(command);
  }

  /** What the agent cannot be told to forget it keeps for a day, then drops by itself. */
  function forget({ id, machine_id }: Command): void {
    if (!presence.online(machine_id)) return;
    presence
      .get(machine_id)
      .stub.forgetProcess({ id }, { request_id: newId('request') })
      .catch((error: unknown) => log.debug({ err: error, command_id: id }, 'not forgotten'));
  }

  /** Everything open on a machine that is back: follow it again, and pass on what was asked meanwhile. */
  function resume(machineId: string): void {
    const link = presence.get(machineId);
    for (const run of runs.values()) {
      if (run.command.machine_id !== machineId || run.following || run.end) continue;
      const { id } = run.command;
      const request = { id, stdout_offset: run.stdout.end, stderr_offset: run.stderr.end };
      void follow(
        run,
        link,
        link.stub.followProcess(request, { request_id: newId('request'), idle_ms: 0, lane: 'process' }),
      );
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
      void finish(run, { status: 'lost', reason });
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
        link.stub.startProcess(
          { id: command.id, spec },
          { request_id: requestId, idle_ms: 0, lane: 'process' },
        ),
      );
    },
    openOn: (machineId) =>
      [...runs.values()].filter(({ command }) => command.machine_id === machineId).length,
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
        if (!run.end) records.save(run.command);
      });
      if (!run.end && presence.online(run.command.machine_id))
        kill(run, presence.get(run.command.machine_id));
    },
    close() {
      closed = true;
      stopWatching();
      stopListening();
      stopSweeping();
      for (const run of runs.values()) {
        run.cancelTimer();
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
    end: undefined,
    announced: command.started_at !== null,
    cancelTimer: () => {},
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

function eventOf(status: Status): EventType {
  if (status === 'completed') return 'command.completed';
  return status === 'timeout' ? 'command.timeout' : 'command.failed';
}
