// Follows what other brokers do with batches. Loads new commands for machines of this broker, and cancels commands of
// cancelled batches. For each limited batch that has queued commands at this broker, reads how many of the batch's
// commands run at other brokers, and how many have failed.
import { monotonic, now } from '../../shared/clock.ts';
import type { Scheduler } from './command-dispatcher.ts';
import type { CommandStore } from './command-store.ts';

/** Milliseconds after which an incomplete batch counts as abandoned: the broker that was storing it has ended. */
const brokenMs = 600_000;

export class BatchFollower {
  readonly #store: CommandStore;
  readonly #scheduler: Scheduler;
  /** Highest row number of the batches that were read. */
  #last = 0;
  /**
   * Batches that other brokers are storing, with the monotonic time when this broker found them. The times of the other
   * brokers' clocks may be wrong.
   */
  #incomplete = new Map<string, number>();

  private constructor(store: CommandStore, scheduler: Scheduler) {
    this.#store = store;
    this.#scheduler = scheduler;
  }

  /**
   * Removes abandoned batches, and finds the batches that are still incomplete. Call this before this broker takes over
   * machines, because a takeover does not load the commands of incomplete batches. read() loads these commands later.
   * It does so only for the batches that this call has found incomplete, and for newer batches.
   */
  static async open(store: CommandStore, scheduler: Scheduler): Promise<BatchFollower> {
    await store.batches.removeIncomplete(now() - brokenMs);
    const follower = new BatchFollower(store, scheduler);
    const { ids, last } = await store.batches.unfinished();
    for (const id of ids) follower.#incomplete.set(id, monotonic());
    follower.#last = last;
    return follower;
  }

  /** Reads the batches that other brokers have stored or changed. */
  async read(): Promise<void> {
    await this.#readNew();
    await this.#readProgress();
  }

  async #readNew(): Promise<void> {
    const batches = await this.#store.batches.since(this.#last, [...this.#incomplete.keys()]);
    const complete = batches.filter(({ isComplete }) => isComplete).map(({ id }) => id);
    if (complete.length > 0) await this.#scheduler.adoptBatches(complete);
    const before = this.#incomplete;
    this.#incomplete = new Map();
    for (const { id, number, isComplete, isOpen } of batches) {
      this.#last = Math.max(this.#last, number);
      if (!isComplete && isOpen) this.#incomplete.set(id, before.get(id) ?? monotonic());
    }
    for (const [id, foundAt] of this.#incomplete)
      if (monotonic() - foundAt >= brokenMs) await this.#store.batches.remove(id);
  }

  async #readProgress(): Promise<void> {
    const open = this.#scheduler.membersByBatch();
    if (open.size === 0) return;
    const { batches } = this.#store;
    const cancelled = await batches.cancelled(
      [...open.keys()].flatMap(({ cancel, id }) => (cancel ? [] : id)),
    );
    for (const [batch, members] of open) {
      if (cancelled.includes(batch.id))
        await this.#scheduler.cancelAll(members.filter(({ stored }) => stored));
      else if (members.some(({ state }) => state === 'queued')) await batches.isFull(batch);
    }
    this.#scheduler.decideSoon();
  }
}
