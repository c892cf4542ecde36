// The life of a command, over lost links and broker restarts:
//
//   queued --> dispatched --> running --> ending --> ended
//     ^------------'             |
//
// queued: no agent has it. dispatched: its agent has it or is about to; one that surely never started is queued again
// if it may wait. running: its agent has reported the start. From each of these states it can end; ending: how is
// known and is being written; ended: that is on disk, as completed, failed, timeout, cancelled, expired or lost.
// It is handed to an agent once (StartProcess); after a lost link or a restart it is only followed (FollowProcess).
import { after, now, sleep } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { HistoryTransaction } from '../history.ts';
import { acknowledge } from '../link/acknowledge.ts';
import type { Presence } from '../presence/index.ts';
import type { Command, End, OpenCommand } from './command.ts';
import type { Scheduler } from './scheduler.ts';
import type { CommandStore } from './store.ts';

/** An end that could not be written is tried again after this. */
const rewriteMs = 5_000;
/** A command that ends within this time has its start and its end in one transaction. */
const announceMs = 10;
/** Results of a machine that end within this time are acknowledged together: each message costs both sides CPU. */
const acknowledgeMs = 50;

interface LifecycleRooms {
  store: CommandStore;
  scheduler: Scheduler;
  presence: Presence;
}

/** Writes what becomes of commands, each change with its event, and wakes those who wait for it. */
export class Lifecycle {
  readonly #rooms: LifecycleRooms;
  readonly #log: Logger;
  readonly #stopped = new AbortController();
  /** Results on disk, by machine, that are to be acknowledged. */
  readonly #settled = new Map<string, string[]>();

  constructor(rooms: LifecycleRooms, log: Logger) {
    this.#rooms = rooms;
    this.#log = log;
  }

  /** No end is written any more: the next broker hears of it again. */
  stop(): void {
    this.#stopped.abort();
  }

  /** Resolves when the command has started or ended, after `ms`, or when the signal fires. */
  started(open: OpenCommand, ms: number, signal?: AbortSignal): Promise<void> {
    return this.#until(open, () => open.record.started_at !== null || open.ended !== undefined, ms, signal);
  }

  /** Resolves when the command has ended durably, after `ms`, or when the signal fires. */
  ended(open: OpenCommand, ms: number, signal?: AbortSignal): Promise<void> {
    return this.#until(open, () => open.ended !== undefined, ms, signal);
  }

  async #until(open: OpenCommand, reached: () => boolean, ms: number, signal?: AbortSignal): Promise<void> {
    if (ms <= 0 || signal?.aborted || reached()) return;
    const enough = new AbortController();
    const stop = (): void => enough.abort();
    const cancel = after(ms, stop);
    signal?.addEventListener('abort', stop, { once: true });
    while (!reached() && !enough.signal.aborted && !open.output.stopped)
      await open.output.changed.wait(enough.signal);
    signal?.removeEventListener('abort', stop);
    cancel();
  }

  /** Its agent has reported the start. */
  begin(open: OpenCommand, started_at: number): void {
    if (open.record.status !== 'queued') return;
    open.record = { ...open.record, status: 'running', started_at };
    open.output.changed.wake();
    open.cancelTimer = after(announceMs, () => {
      this.#rooms.store.history
        .write((transaction) => this.#announce(open, transaction))
        .catch((error: unknown) => {
          open.announced = false;
          this.#log.error({ err: error, command_id: open.record.id }, 'a start could not be written');
        });
    });
  }

  #announce(open: OpenCommand, transaction: HistoryTransaction): void {
    if (open.announced || open.record.started_at === null) return;
    open.announced = true;
    if (!open.end) this.#rooms.store.update({ ...open.record, ...open.output.extent() });
    this.#rooms.store.announce(open.record, transaction);
  }

  /** It has ended; of several ends the first counts. Resolves when that is on disk or the broker stops. Never rejects. */
  async end(open: OpenCommand, how: End): Promise<void> {
    if (open.end) return;
    open.cancelTimer();
    open.end = { ...open.record, finished_at: now(), ...how };
    const end = { ...open.end, ...(await open.output.final()) };
    const { announced } = open;
    // What cannot be written now (disk full) is tried again until it can.
    while (!this.#stopped.signal.aborted) {
      try {
        await this.#rooms.store.history.write((transaction) => {
          open.record = { ...open.record, started_at: end.started_at };
          this.#announce(open, transaction);
          this.#rooms.store.end(end, transaction);
        });
        return this.#close(open, end);
      } catch (error) {
        this.#log.error({ err: error, command_id: end.id }, 'the end of a command could not be written');
        open.announced = announced;
        await sleep(rewriteMs, this.#stopped.signal);
      }
    }
  }

  #close(open: OpenCommand, end: Command): void {
    const { store, scheduler } = this.#rooms;
    const { id, machine_id, batch_id, journal_id, kept_bytes } = end;
    open.record = end;
    open.ended = end;
    if (scheduler.close(open) && batch_id) {
      // It can hold secrets, and nothing will be started any more.
      store.history
        .write(() => store.setBatch(batch_id, 'spec = NULL'))
        .catch((error: unknown) =>
          this.#log.warn({ err: error, batch_id }, 'the spec of a batch was not dropped'),
        );
    }
    store.limitOutput(kept_bytes);
    open.output.changed.wake();
    if (journal_id !== '') this.#acknowledgeSoon(machine_id, id);
    scheduler.changed.wake();
  }

  #acknowledgeSoon(machineId: string, id: string): void {
    const settled = this.#settled.get(machineId);
    if (settled) {
      settled.push(id);
      return;
    }
    const ids = [id];
    this.#settled.set(machineId, ids);
    after(acknowledgeMs, () => {
      this.#settled.delete(machineId);
      if (!this.#stopped.signal.aborted) acknowledge(this.#rooms.presence, machineId, ids, this.#log);
    });
  }
}
