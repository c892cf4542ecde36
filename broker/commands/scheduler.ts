// The scheduler: all open commands, in the order they came, the slots of their batches, and which of them is next.
import type { BatchId } from '../../shared/api/route.ts';
import { now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { openCommands } from '../../shared/limits.ts';
import { Wake } from '../../shared/output.ts';
import type { Link, Presence } from '../presence/index.ts';
import type { Command, End, OpenCommand } from './command.ts';

/** What a batch allows, and how far it has come. */
export interface BatchProgress {
  concurrency: number | null;
  max_failures: number | null;
  /** Members that have not ended. */
  open: number;
  /** Members that hold a slot: an agent has them, or they are about to end without one. */
  running: number;
  /** Members that ended otherwise than completed. */
  failures: number;
}

/** What becomes of a command that has waited: it starts over a link, or ends. */
export type Decision = { open: OpenCommand; link: Link } | { open: OpenCommand; end: End };

/** Commands that wait for one machine. */
const maxWaiting = 1000;
/** Decisions at once: each is a write, and the event loop is for others, too. */
const mostDecisions = 250;

export class Scheduler {
  /** Woken when one that waits may have its turn. */
  readonly changed = new Wake();
  /** Machines of commands that an earlier broker left may still be on their way back. */
  returning = true;
  /** When the next command has waited too long. */
  nextExpiry = Number.POSITIVE_INFINITY;
  readonly #presence: Presence;
  readonly #open = new Map<string, OpenCommand>();
  readonly #byMachine = new Map<string, Set<OpenCommand>>();
  readonly #batches = new Map<BatchId, BatchProgress>();

  constructor(presence: Presence) {
    this.#presence = presence;
  }

  addBatch(id: BatchId, progress: BatchProgress): void {
    if (progress.open > 0) this.#batches.set(id, progress);
  }

  removeBatch(id: BatchId): void {
    this.#batches.delete(id);
  }

  add(open: OpenCommand): void {
    const { id, machine_id } = open.record;
    this.#open.set(id, open);
    const there = this.#byMachine.get(machine_id) ?? new Set();
    this.#byMachine.set(machine_id, there.add(open));
  }

  /** It could not be stored. */
  remove(open: OpenCommand): void {
    const { id, machine_id } = open.record;
    this.#open.delete(id);
    const there = this.#byMachine.get(machine_id);
    there?.delete(open);
    if (there?.size === 0) this.#byMachine.delete(machine_id);
  }

  /** It has ended. Says whether it was the last one of its batch. */
  close(open: OpenCommand): boolean {
    this.remove(open);
    this.leaveSlot(open);
    const batch = this.#batchOf(open.record);
    if (!batch || !open.record.batch_id) return false;
    batch.open -= 1;
    if (open.record.status !== 'completed') batch.failures += 1;
    if (batch.open > 0) return false;
    this.#batches.delete(open.record.batch_id);
    return true;
  }

  get(id: string): OpenCommand | undefined {
    return this.#open.get(id);
  }

  all(): OpenCommand[] {
    return [...this.#open.values()];
  }

  /** Those that the agent of a machine has or is about to have. */
  dispatched(machineId: string): OpenCommand[] {
    return this.#on(machineId).filter(({ record }) => record.journal_id !== '');
  }

  /** Those that no agent has yet. */
  waiting(machineId: string): OpenCommand[] {
    return this.#on(machineId).filter(({ state }) => state === 'queued');
  }

  /** How many more the agent of a machine may have. */
  placesOn(machineId: string): number {
    return openCommands - this.dispatched(machineId).length;
  }

  /** The link to start it on, or undefined where it waits. Throws machine_offline or unavailable. */
  placeFor({ machine_id, queue_until }: Command): Link | undefined {
    if (this.#presence.online(machine_id) && this.placesOn(machine_id) > 0)
      return this.#presence.get(machine_id);
    if (queue_until !== null) return this.refuseLongQueue(machine_id);
    throw full(this.#presence.get(machine_id).machineId, `${openCommands} commands are open`, openCommands);
  }

  /** Throws unavailable where too many commands wait for a machine already. */
  refuseLongQueue(machineId: string): undefined {
    if (this.waiting(machineId).length >= maxWaiting)
      throw full(machineId, `${maxWaiting} commands wait`, maxWaiting);
  }

  takeSlot(open: OpenCommand): void {
    const batch = this.#batchOf(open.record);
    if (batch) batch.running += 1;
    open.inSlot = batch !== undefined;
  }

  leaveSlot(open: OpenCommand): void {
    const batch = open.inSlot && this.#batchOf(open.record);
    if (batch) batch.running -= 1;
    open.inSlot = false;
  }

  /**
   * What is to be done with those that wait, each decision when the one before has been carried out; `mayRun` judges
   * every one of them. Returns whether there is more to decide.
   */
  *decide(mayRun?: (command: Command) => boolean): Generator<Decision, boolean> {
    const places = new Map<string, number>();
    let left = mostDecisions;
    this.nextExpiry = Number.POSITIVE_INFINITY;
    for (const open of this.#open.values()) {
      if (!open.stored || open.state !== 'queued') continue;
      if (left === 0) return true;
      const end = this.#endOf(open, mayRun);
      const link = end ? undefined : this.#linkFor(open, places);
      if (!end && !link) continue;
      left -= 1;
      if (end) yield { open, end };
      else if (link) yield { open, link };
    }
    return false;
  }

  /** How one ends that waits in vain. */
  #endOf(open: OpenCommand, mayRun?: (command: Command) => boolean): End | undefined {
    const { cancel, queue_until, machine_id } = open.record;
    const batch = this.#batchOf(open.record);
    if (cancel) return { status: 'cancelled' };
    if (queue_until !== null && queue_until <= now()) return { status: 'expired', reason: 'queue_expired' };
    if (mayRun && !mayRun(open.record)) return { status: 'cancelled', reason: 'key_revoked' };
    if (batch && batch.max_failures !== null && batch.failures > batch.max_failures)
      return { status: 'expired', reason: 'max_failures' };
    if (queue_until !== null) this.nextExpiry = Math.min(this.nextExpiry, queue_until);
    else if (
      !this.#presence.online(machine_id) &&
      !(this.returning && open.recovered) &&
      this.#hasSlot(batch)
    ) {
      // Its slot is free again when its end is counted: it may have been one failure too many.
      this.takeSlot(open);
      return { status: 'expired', reason: 'machine_offline' };
    }
    return undefined;
  }

  /** Its link, where its machine has a place for it and its batch a slot. */
  #linkFor({ record }: OpenCommand, places: Map<string, number>): Link | undefined {
    const { machine_id } = record;
    if (!this.#presence.online(machine_id) || !this.#hasSlot(this.#batchOf(record))) return undefined;
    const left = places.get(machine_id) ?? this.placesOn(machine_id);
    places.set(machine_id, left - 1);
    return left > 0 ? this.#presence.get(machine_id) : undefined;
  }

  #hasSlot(batch: BatchProgress | undefined): boolean {
    return !batch || batch.concurrency === null || batch.running < batch.concurrency;
  }

  #batchOf({ batch_id }: Command): BatchProgress | undefined {
    return batch_id === null ? undefined : this.#batches.get(batch_id);
  }

  #on(machineId: string): OpenCommand[] {
    return [...(this.#byMachine.get(machineId) ?? [])];
  }
}

function full(machineId: string, what: string, limit: number): AppError {
  const message = `${what} on this machine already: try again later, or let it wait with queue_for`;
  return new AppError('unavailable', message, { machine_id: machineId, limit });
}
