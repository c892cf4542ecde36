// Decides when each delivery is attempted. Every receiver (a webhook or an alert channel) has its own queue. If one
// receiver does not answer, deliveries to the other receivers are not delayed.
import { after, monotonic, sleep } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Claims } from '../cluster/tasks-of-one-broker.ts';
import type { History, HistoryTransaction } from '../history/history-database.ts';
import type { State } from '../state/index.ts';
import type { Outcome } from './attempt-delivery.ts';
import type { Attempted, Delivery, DeliveryStore, EventKind } from './delivery-store.ts';
import { ReceiverQueue } from './receiver-queue-state.ts';
import type { Message } from './signed-headers.ts';

/** A webhook or an alert channel. */
export interface Receiver {
  id: string;
  /** Number of times that the receiver was enabled. */
  armed: number;
}

/**
 * The receivers of one kind: webhooks or alert channels. The queue calls isEnabled() and obstacle() before each
 * attempt.
 */
export interface Receivers<R extends Receiver> {
  readonly byId: ReadonlyMap<string, R>;
  isEnabled(receiver: R): boolean;
  /** Returns what prevents deliveries, such as a revoked key; null if nothing does. Ignores the setting `enabled`. */
  disabledReason(receiver: R): string | null;
  /** Returns why a receiver must not get an event; undefined if it may get the event. */
  obstacle(receiver: R, event: EventKind): string | undefined;
  /** Makes one attempt. Never rejects. */
  send(receiver: R, message: Message, signal: AbortSignal): Promise<Outcome>;
  /**
   * Called after the last attempt of a delivery has failed, in the transaction that stores the outcome. Webhooks are
   * then disabled. Alert channels lack this function and stay enabled, because their next alert may be more important.
   */
  gaveUp?(receiver: R, delivery: Delivery, transaction: HistoryTransaction): void;
}

export interface QueueParts<R extends Receiver> {
  state: State;
  history: History;
  store: DeliveryStore;
  receivers: Receivers<R>;
  /**
   * Decides which broker runs which queue if several brokers share a database. Each queue is one task in Claims, and
   * the name of the task is the id of the receiver.
   */
  claims?: Pick<Claims, 'has' | 'join'> | undefined;
}

export interface RetrySettings {
  /** Maximum number of attempts for one delivery. */
  attempts: number;
  /** Milliseconds before the second attempt, the third and so on. The last value is used for all further attempts. */
  waits: readonly number[];
}

const maxWidth = 16;
const readAhead = 64;
const maxUnsaved = 256;
/** After a start of the broker, its queues start at random times, on average this many milliseconds apart. */
const startGapMs = 10;
const sweepStep = 500;
const stopMs = 2_000;
/**
 * Milliseconds in which outcomes are collected, to be written in one transaction. Each transaction delays all
 * other writes.
 */
const saveMs = 50;
/** Milliseconds to wait after a failed read or write of the database. */
const retryMs = 5_000;

export class DeliveryQueue<R extends Receiver> {
  readonly #parts: QueueParts<R>;
  readonly #retry: RetrySettings;
  readonly #log: Logger;
  readonly #queues = new Map<string, ReceiverQueue>();
  readonly #stopWatching: () => void;
  #started = false;
  #ended: Attempted[] = [];
  #cancelSave: (() => void) | undefined;

  constructor(parts: QueueParts<R>, retry: RetrySettings, log: Logger) {
    this.#parts = parts;
    this.#retry = retry;
    this.#log = log;
    this.#stopWatching = parts.state.watch(() => this.#abortForbidden());
    parts.claims?.join({
      names: () => parts.receivers.byId.keys(),
      claimed: (id) => this.reread(id),
    });
  }

  /**
   * Reads the deliveries of these receivers again, because another broker may have added some. Ignores receivers
   * whose queue another broker runs.
   */
  lookAgain(receiverIds: Iterable<string>): void {
    const { claims, receivers } = this.#parts;
    for (const id of receiverIds) if (claims?.has(id) && receivers.byId.has(id)) this.reread(id);
  }

  /** Starts the queues that have waiting deliveries from before the broker's start. */
  async start(): Promise<void> {
    this.#started = true;
    const { receivers, store } = this.#parts;
    const all = [...receivers.byId.keys()];
    const waiting = await Promise.all(all.map((id) => store.waiting(id, 1)));
    const left = all.filter((_, n) => waiting[n]?.length);
    // If the clock was ahead when a due time was stored, that time can be far in the future. So due times are limited
    // to the longest possible delay. That is twice the longest usual delay, because Retry-After can double the usual
    // delay (#waitAfter()).
    const longest = 2 * Math.max(0, ...this.#retry.waits.slice(0, Math.max(1, this.#retry.attempts - 1)));
    await this.#limitDue(left, longest);
    for (const id of left)
      this.#queueOf(id).cancelTimer = after(Math.random() * startGapMs * left.length, () => this.reread(id));
  }

  /** Makes a queue check for due deliveries. */
  wake(id: string): void {
    if (this.#started) void this.#advance(this.#queueOf(id));
  }

  /** Reads the waiting deliveries again, and checks for due ones. Call this when the table may have changed. */
  reread(id: string): void {
    this.#queueOf(id).reset();
    this.wake(id);
  }

  /**
   * Call this after a change of a receiver. Waiting deliveries that must no longer be sent are marked as failed. If the
   * change has enabled the receiver (`wasEnabled`), its other waiting deliveries become due now.
   */
  async follow(id: string, wasEnabled: boolean): Promise<void> {
    await this.#save();
    await this.#sweep(this.#queueOf(id));
    if (!wasEnabled) return;
    await this.#limitDue([id], 0);
    this.reread(id);
  }

  /** Stops the queues. Running attempts have 2 s to finish; aborted ones are made again after the next start. */
  async close(): Promise<void> {
    this.#started = false;
    this.#stopWatching();
    const queues = [...this.#queues.values()];
    for (const queue of queues) queue.cancelTimer();
    const end = monotonic() + stopMs;
    while (queues.some(({ running }) => running.size > 0) && monotonic() < end) await sleep(20);
    for (const { abort } of queues.flatMap(({ running }) => [...running])) abort.abort();
    await this.#save();
  }

  #queueOf(id: string): ReceiverQueue {
    const queue = this.#queues.get(id) ?? new ReceiverQueue(id);
    this.#queues.set(id, queue);
    return queue;
  }

  /**
   * Starts attempts of due deliveries. A second call for the same queue only makes the running call check once more.
   */
  async #advance(queue: ReceiverQueue): Promise<void> {
    queue.again = true;
    if (queue.advancing) return;
    queue.advancing = true;
    try {
      while (queue.again) {
        queue.again = false;
        await this.#attemptDue(queue);
      }
    } catch (error) {
      this.#log.error(
        { err: error, receiver: queue.id },
        'the waiting deliveries of a webhook or alert channel could not be read from the database; trying again in 5 s',
      );
      queue.cancelTimer();
      queue.cancelTimer = after(retryMs, () => this.wake(queue.id));
    } finally {
      queue.advancing = false;
    }
  }

  async #attemptDue(queue: ReceiverQueue): Promise<void> {
    // Each pass checks all conditions again, because the receiver or its queue may change during a read from the
    // database.
    for (;;) {
      const receiver = this.#attemptable(queue);
      if (!receiver) return;
      const now = this.#parts.store.now();
      // A first attempt is always due: another broker, whose clock may be ahead, may have written its due time.
      const due = queue.ready.findIndex(({ tries, dueAt }) => tries === 0 || dueAt <= now);
      const next = queue.ready[Math.max(due, 0)];
      if (!next) {
        if (!(await this.#readAhead(queue))) return;
        continue;
      }
      if (due < 0) {
        queue.ready = [];
        queue.cancelTimer();
        queue.cancelTimer = after(next.dueAt - now, () => this.wake(queue.id));
        return;
      }
      // Deliveries before `next` are not due yet. They are read again after its attempt.
      queue.ready = queue.ready.slice(due + 1);
      queue.last = next;
      const { body } = next;
      if (!body || this.#parts.receivers.obstacle(receiver, next)) {
        void this.#sweep(queue);
        return;
      }
      this.#attempt(queue, receiver, { ...next, body });
    }
  }

  /** Returns the receiver if another attempt may begin now. Marks the deliveries of a disabled receiver as failed. */
  #attemptable(queue: ReceiverQueue): R | undefined {
    const { receivers, claims } = this.#parts;
    const receiver = receivers.byId.get(queue.id);
    if (!receiver) this.#queues.delete(queue.id);
    if (!receiver || !this.#started || queue.sweeping || claims?.has(queue.id) === false) return undefined;
    if (!receivers.isEnabled(receiver)) {
      void this.#sweep(queue);
      return undefined;
    }
    const hasCapacity = queue.running.size < queue.width && queue.unsaved.size < maxUnsaved;
    return hasCapacity ? receiver : undefined;
  }

  /** Reads the next waiting deliveries. Returns false if there are none. */
  async #readAhead(queue: ReceiverQueue): Promise<boolean> {
    const { resets } = queue;
    const limit = readAhead + queue.unsaved.size;
    const waiting = await this.#parts.store.waiting(queue.id, limit, queue.last);
    if (queue.resets !== resets) return true;
    queue.ready = waiting.filter(({ id }) => !queue.unsaved.has(id));
    return queue.ready.length > 0;
  }

  #attempt(queue: ReceiverQueue, receiver: R, delivery: Delivery & { body: Buffer }): void {
    const attempt = { delivery, abort: new AbortController() };
    queue.unsaved.add(delivery.id);
    queue.running.add(attempt);
    void this.#parts.receivers.send(receiver, delivery, attempt.abort.signal).then((outcome) => {
      queue.running.delete(attempt);
      this.#end(queue, receiver, delivery, outcome);
      void this.#advance(queue);
    });
  }

  #end(queue: ReceiverQueue, { id: webhookId, armed }: R, delivery: Delivery, outcome: Outcome): void {
    if (outcome.aborted) {
      queue.unsaved.delete(delivery.id);
      queue.reset();
      return;
    }
    queue.width = outcome.delivered ? Math.min(maxWidth, queue.width * 2) : 1;
    const last = outcome.delivered || delivery.tries + 1 >= this.#retry.attempts;
    const next = last ? null : this.#parts.store.now() + this.#waitAfter(delivery.tries, outcome);
    this.#ended.push({ webhookId, armed, delivery, outcome, next });
    this.#cancelSave ??= after(saveMs, () => void this.#save());
  }

  /**
   * Returns the milliseconds before the next attempt. A receiver can lengthen the usual time with Retry-After, at most
   * to twice that time.
   */
  #waitAfter(tries: number, { retryAfter }: Outcome): number {
    const { waits } = this.#retry;
    const wait = waits[Math.min(tries, waits.length - 1)] ?? 0;
    if (retryAfter !== null) return Math.min(Math.max(retryAfter, wait), 2 * wait);
    // The time varies by up to 10 %, so that retries do not happen all at once.
    return Math.round(wait * (0.9 + Math.random() * 0.2));
  }

  async #save(): Promise<void> {
    this.#cancelSave?.();
    this.#cancelSave = undefined;
    const ended = this.#ended;
    this.#ended = [];
    if (ended.length === 0) return;
    try {
      await this.#parts.history.write((transaction) => this.#write(ended, transaction));
    } catch (error) {
      this.#log.error(
        { err: error },
        'the outcomes of attempted deliveries could not be stored; trying again in 5 s',
      );
      this.#ended = [...ended, ...this.#ended];
      this.#cancelSave ??= after(retryMs, () => void this.#save());
      return;
    }
    for (const { webhookId, delivery } of ended) {
      this.#queues.get(webhookId)?.unsaved.delete(delivery.id);
      this.reread(webhookId);
    }
  }

  async #write(ended: readonly Attempted[], transaction: HistoryTransaction): Promise<void> {
    const { receivers, store } = this.#parts;
    const statuses = await Promise.all(ended.map((one) => store.saveAttempt(one, transaction)));
    for (const last of lastByReceiver(ended)) store.saveLast(last, transaction);
    const failed = ended.filter((_, n) => statuses[n] === 'failed');
    for (const { webhookId, armed, delivery } of lastByReceiver(failed)) {
      const receiver = receivers.byId.get(webhookId);
      // A failure is ignored if the receiver was enabled again during the attempt.
      if (receiver?.armed === armed) receivers.gaveUp?.(receiver, delivery, transaction);
    }
  }

  /**
   * Marks waiting deliveries as failed if they must not be sent: the receiver is disabled or must not get the event,
   * or the event was deleted.
   */
  async #sweep(queue: ReceiverQueue): Promise<void> {
    queue.sweeping = true;
    queue.reset();
    queue.cancelTimer();
    try {
      for (let last: Delivery | undefined, more = true; more; ) {
        const waiting = await this.#parts.history.write((transaction) =>
          this.#sweepSome(queue.id, last, transaction),
        );
        last = waiting.at(-1);
        more = waiting.length === sweepStep;
      }
    } catch (error) {
      this.#log.error(
        { err: error, receiver: queue.id },
        'a webhook or alert channel has deliveries that must not be sent, and some could not be marked as failed; trying again in 5 s',
      );
      queue.cancelTimer = after(retryMs, () => this.wake(queue.id));
      return;
    } finally {
      queue.sweeping = false;
    }
    const receiver = this.#parts.receivers.byId.get(queue.id);
    if (receiver && this.#parts.receivers.isEnabled(receiver)) this.wake(queue.id);
  }

  async #sweepSome(
    id: string,
    after: Delivery | undefined,
    transaction: HistoryTransaction,
  ): Promise<Delivery[]> {
    const { receivers, store } = this.#parts;
    const receiver = receivers.byId.get(id);
    if (!receiver) return [];
    const disabled = receivers.isEnabled(receiver)
      ? undefined
      : (receivers.disabledReason(receiver) ?? 'webhook_disabled');
    const waiting = await store.waiting(id, sweepStep, after, transaction);
    for (const one of waiting) {
      const reason = disabled ?? receivers.obstacle(receiver, one) ?? (one.body ? undefined : 'event_gone');
      if (reason) store.fail(one.id, reason, transaction);
    }
    return waiting;
  }

  /**
   * Limits the wait of these receivers' deliveries to `ms` milliseconds from now. Never rejects.
   */
  async #limitDue(ids: readonly string[], ms: number): Promise<void> {
    const { history, store } = this.#parts;
    try {
      await history.write((transaction) => {
        for (const id of ids) store.limitDue(id, store.now() + ms, transaction);
      });
    } catch (error) {
      this.#log.error(
        { err: error, receivers: ids },
        'the waiting deliveries of webhooks or alert channels could not be sent earlier; they are attempted at their planned times',
      );
    }
  }

  /** Aborts attempts that are no longer allowed after a change of receivers, keys or machines. */
  #abortForbidden(): void {
    const { receivers } = this.#parts;
    for (const { id, running } of this.#queues.values()) {
      const receiver = receivers.byId.get(id);
      for (const { delivery, abort } of running) {
        if (!receiver || receivers.obstacle(receiver, delivery)) abort.abort();
      }
    }
  }
}

function lastByReceiver(ended: readonly Attempted[]): Iterable<Attempted> {
  return new Map(ended.map((one) => [one.webhookId, one])).values();
}
