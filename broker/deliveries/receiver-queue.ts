// The queue of one receiver: deliveries that were read ahead, attempts that are running, and their maximum number.
import type { Delivery } from './delivery-store.ts';

export class ReceiverQueue {
  readonly id: string;
  /**
   * `ready` has the deliveries that were read ahead. `last` is the delivery that was last removed from
   * `ready`: the next read continues after it.
   */
  ready: Delivery[] = [];
  last: Delivery | undefined;
  /** Ids of deliveries whose attempt is running or whose outcome is not on disk yet. */
  readonly unsaved = new Set<string>();
  readonly running = new Set<{ delivery: Delivery; abort: AbortController }>();
  /** Number of attempts at once: 1 while the receiver fails, doubled with each success. */
  width = 1;
  waking = false;
  /** True while #advance() starts attempts. If it is called meanwhile, it sets `again` and later checks once more. */
  advancing = false;
  again = false;
  sweeping = false;
  /** Number of calls of reset(). Rows that were being read from the history during a reset are ignored. */
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
