// State of the delivery queue of one webhook or alert channel: the deliveries that were read from the database, the
// running attempts, and the limit on running attempts.
import type { Delivery } from './delivery-store.ts';

export class ReceiverQueue {
  readonly id: string;
  /**
   * `ready`: deliveries that were read from the database and wait for an attempt. `last`: the delivery that was last
   * taken from `ready`; the next read continues after it.
   */
  ready: Delivery[] = [];
  last: Delivery | undefined;
  /** Ids of deliveries whose attempt is running or whose outcome is not on disk yet. */
  readonly unsaved = new Set<string>();
  readonly running = new Set<{ delivery: Delivery; abort: AbortController }>();
  /** Maximum number of attempts that run at the same time: 1 after a failure, doubled with each success. */
  width = 1;
  /**
   * True while DeliveryQueue.#advance() runs for this queue. A further call of #advance() only sets `again`. The
   * running call then looks for due deliveries once more.
   */
  advancing = false;
  again = false;
  sweeping = false;
  /** Number of calls of reset(). A read from the database is ignored if reset() was called meanwhile. */
  resets = 0;
  cancelTimer = (): void => {};

  constructor(id: string) {
    this.id = id;
  }

  /** Makes the next read start from the beginning, because deliveries in the table may have changed. */
  reset(): void {
    this.resets += 1;
    this.ready = [];
    this.last = undefined;
  }
}
