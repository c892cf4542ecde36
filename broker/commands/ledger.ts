// What of a command is written when: its start and its one end, each with its event.
import type { EventType } from '../../shared/api/events.ts';
import type { Journal } from '../../shared/api/index.ts';
import { after, now } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Events } from '../events.ts';
import type { History, HistoryTransaction } from '../history.ts';
import type { State } from '../state/index.ts';
import type { Command, Records, Status } from './records.ts';
import type { End } from './reports.ts';
import type { Run } from './run.ts';
import { durationOf } from './shown.ts';

export interface Ledger {
  /** It runs since then. */
  started(run: Run, at: number): void;
  /**
   * It is over; of several ends the first counts. Resolves when that is on disk, or the ledger has stopped. Never
   * rejects.
   */
  ended(run: Run, end: End): Promise<void>;
  stop(): void;
}

/** A command that ends within this time has its start and its end in one transaction. */
const startedLaterMs = 10;
/** An end that could not be written is tried again after this. */
const rewriteMs = 5_000;
/** Characters of its command that an event of a batch holds. */
const mostOfBatch = 4096;

/** `over` is called for each end that is on disk. */
export function openLedger(
  rooms: {
    state: State;
    history: History;
    events: Events;
    records: Records;
    ended(command: Command, transaction: HistoryTransaction): void;
  },
  over: (run: Run) => void,
  log: Logger,
): Ledger {
  const { state, history, events, records } = rooms;

  const stopped = new AbortController();

  function emit(journal: Journal, type: EventType, command: Command): void {
    const machine = state.machines.get(command.machine_id) ?? { id: command.machine_id, name: '' };
    const { batch_id, command: text } = command;
    events.emit(journal, type, machine, {
      command_id: command.id,
      // One request makes two events for each machine of a batch: they hold the beginning of it.
      command: batch_id === null ? text : text.slice(0, mostOfBatch).toWellFormed(),
      status: command.status,
      exit_code: command.exit_code,
      duration: durationOf(command),
      schedule_id: command.schedule_id,
    });
  }

  function announce(run: Run, journal: Journal): void {
    if (run.announced || run.command.started_at === null) return;
    run.announced = true;
    if (!run.end) records.update({ ...run.command, ...run.output.extent() });
    const then = { status: 'running', exit_code: null, finished_at: null } as const;
    emit(journal, 'command.started', { ...run.command, ...then });
  }

  /** What cannot be written now (disk full) is tried again until it can. */
  async function write(run: Run, command: Command): Promise<void> {
    const { announced } = run;
    while (!stopped.signal.aborted) {
      try {
        await history.write((transaction) => {
          run.command = { ...run.command, started_at: command.started_at };
          announce(run, transaction);
          records.update(command);
          emit(transaction, eventOf(command.status), command);
          rooms.ended(command, transaction);
        });
        run.command = command;
        run.over = true;
        return over(run);
      } catch (error) {
        log.error({ err: error, command_id: command.id }, 'the end of a command could not be written');
        run.announced = announced;
        await later(rewriteMs, stopped.signal);
      }
    }
  }

  return {
    started(run, at) {
      if (run.command.status !== 'queued') return;
      run.command = { ...run.command, status: 'running', started_at: at };
      for (const wake of [...run.starters]) wake();
      run.cancelTimer();
      run.cancelTimer = after(startedLaterMs, () => {
        history
          .write((transaction) => announce(run, transaction))
          .catch((error: unknown) => {
            run.announced = false;
            log.error({ err: error, command_id: run.command.id }, 'start not recorded');
          });
      });
    },
    async ended(run, end) {
      if (run.end) return;
      run.cancelTimer();
      run.end = { ...run.command, finished_at: now(), ...end };
      const output = run.output.silent ? run.output.extent() : await kept(run);
      run.end = { ...run.end, ...output };
      await write(run, run.end);
    },
    stop: () => stopped.abort(),
  };
}

/**
 * What a record says of the output. Files are synced first: once the record is on disk, the agent removes its copy, also
 * after a power cut of the broker.
 */
async function kept({ output }: Run) {
  const [stdout, stderr] = [await output.tail('stdout'), await output.tail('stderr')];
  await output.sync();
  const extent = output.extent();
  // Of what has no file the record keeps the tail alone.
  if (output.stdout.size === 0) extent.stdout_start = extent.stdout_bytes - stdout.length;
  if (output.stderr.size === 0) extent.stderr_start = extent.stderr_bytes - stderr.length;
  return { stdout, stderr, ...extent };
}

function later(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const cancel = after(ms, resolve);
    signal.addEventListener('abort', () => {
      cancel();
      resolve();
    });
  });
}

function eventOf(status: Status): EventType {
  if (status === 'completed') return 'command.completed';
  return status === 'timeout' ? 'command.timeout' : 'command.failed';
}
