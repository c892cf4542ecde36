// The scheduler: all open commands in the order they came, and which of those that wait is next.
import { after, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { openCommands } from '../../shared/limits.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Link, Presence } from '../presence/index.ts';
import type { Command, End } from './command.ts';
import type { BatchProgress, OpenCommand } from './open-command.ts';

interface SchedulerServices {
  presence: Presence;
  mayRun(command: Command): boolean;
  stopping: AbortSignal;
  log: Logger;
}

/** Commands that wait for one machine. */
const maxWaiting = 1000;
/** Decisions at once: each is a write, and the event loop is for others, too. */
const mostDecisions = 250;
/** So long after the broker's start, machines may still be on their way back. */
const returnMs = 60_000;
/** A round of decisions that failed is tried again after this. */
const retryMs = 1_000;

export class Scheduler {
  readonly #services: SchedulerServices;
  readonly #open = new Map<string, OpenCommand>();
  readonly #byMachine = new Map<string, Set<OpenCommand>>();
  /** Machines of commands that an earlier broker left may still be on their way back. */
  #returning = true;
  /** Keys or machines have changed: the rights of all that wait are checked. */
  #checking = false;
  #looking = false;
  #cancelExpiry = (): void => {};

  constructor(services: SchedulerServices) {
    this.#services = services;
    after(returnMs, () => {
      this.#returning = false;
      this.look();
    });
  }

  add(open: OpenCommand): void {
    const { id, machine_id } = open.record;
    this.#open.set(id, open);
    const there = this.#byMachine.get(machine_id) ?? new Set();
    this.#byMachine.set(machine_id, there.add(open));
  }

  remove(open: OpenCommand): void {
    const { id, machine_id } = open.record;
    this.#open.delete(id);
    const there = this.#byMachine.get(machine_id);
    there?.delete(open);
    if (there?.size === 0) this.#byMachine.delete(machine_id);
  }

  get(id: string): OpenCommand | undefined {
    return this.#open.get(id);
  }

  all(): OpenCommand[] {
    return [...this.#open.values()];
  }

  on(machineId: string): OpenCommand[] {
    return [...(this.#byMachine.get(machineId) ?? [])];
  }

  /** Those that no agent has yet. */
  waiting(machineId: string): OpenCommand[] {
    return this.on(machineId).filter(({ state }) => state === 'queued');
  }

  /** The link to start a command on, or undefined where it waits. Throws machine_offline or unavailable. */
  linkFor({ machine_id, queue_until }: Command): Link | undefined {
    const { presence } = this.#services;
    if (presence.online(machine_id) && this.#placesOn(machine_id) > 0) return presence.get(machine_id);
    if (queue_until !== null) return this.refuseLongQueue(machine_id);
    throw full(presence.get(machine_id).machineId, `${openCommands} commands are open`, openCommands);
  }

  /** Throws unavailable where too many commands wait for a machine already. */
  refuseLongQueue(machineId: string): undefined {
    if (this.waiting(machineId).length >= maxWaiting)
      throw full(machineId, `${maxWaiting} commands wait`, maxWaiting);
  }

  /** Rights may have changed: those that wait are checked. */
  checkRights(): void {
    this.#checking = true;
    this.look();
  }

  /** Soon lets those that wait have their turn; after the broker has stopped nothing. */
  look(): void {
    const { stopping, log } = this.#services;
    if (this.#looking || stopping.aborted) return;
    this.#looking = true;
    setImmediate(() => {
      this.#looking = false;
      try {
        if (!stopping.aborted) this.#decide();
      } catch (error) {
        log.error({ err: error }, 'queued commands could not have their turn; trying again');
        after(retryMs, () => this.look());
      }
    });
  }

  #decide(): void {
    const places = new Map<string, number>();
    let left = mostDecisions;
    let nextExpiry = Number.POSITIVE_INFINITY;
    for (const open of this.#open.values()) {
      if (!open.stored || open.state !== 'queued') continue;
      if (left === 0) {
        this.look();
        return;
      }
      const end = this.#endOf(open);
      const link = end ? undefined : this.#freeLink(open, places);
      if (end) void open.finish(end);
      else if (link) void open.dispatch(link);
      else {
        nextExpiry = Math.min(nextExpiry, open.record.queue_until ?? nextExpiry);
        continue;
      }
      left -= 1;
    }
    this.#checking = false;
    this.#cancelExpiry();
    if (nextExpiry < Number.POSITIVE_INFINITY)
      this.#cancelExpiry = after(Math.max(0, nextExpiry - now()), () => this.look());
  }

  /** How one ends that waits in vain. */
  #endOf(open: OpenCommand): End | undefined {
    const { presence, mayRun } = this.#services;
    const { record, batch } = open;
    const { cancel, queue_until, machine_id } = record;
    if (cancel) return { status: 'cancelled' };
    if (queue_until !== null && queue_until <= now()) return { status: 'expired', reason: 'queue_expired' };
    if (this.#checking && !mayRun(record)) return { status: 'cancelled', reason: 'key_revoked' };
    if (batch && batch.max_failures !== null && batch.failures > batch.max_failures)
      return { status: 'expired', reason: 'max_failures' };
    const mayReturn = queue_until !== null || (this.#returning && open.recovered);
    if (mayReturn || presence.online(machine_id) || !hasSlot(batch)) return undefined;
    // Its slot is free again when its end is counted: it may have been one failure too many.
    open.takeSlot();
    return { status: 'expired', reason: 'machine_offline' };
  }

  /** Its link, where its machine has a place for it and its batch a slot. */
  #freeLink({ record: { machine_id }, batch }: OpenCommand, places: Map<string, number>): Link | undefined {
    const { presence } = this.#services;
    if (!presence.online(machine_id) || !hasSlot(batch)) return undefined;
    const left = places.get(machine_id) ?? this.#placesOn(machine_id);
    places.set(machine_id, left - 1);
    return left > 0 ? presence.get(machine_id) : undefined;
  }

  /** How many more commands the agent of a machine may have. */
  #placesOn(machineId: string): number {
    return openCommands - this.on(machineId).filter(({ record }) => record.journal_id !== '').length;
  }
}

function hasSlot(batch: BatchProgress | undefined): boolean {
  return !batch || batch.concurrency === null || batch.running < batch.concurrency;
}

function full(machineId: string, what: string, limit: number): AppError {
  const message = `${what} on this machine already: try again later, or let it wait with queue_for`;
  return new AppError('unavailable', message, { machine_id: machineId, limit });
}
