// The lease of this broker: while it lasts, no other broker claims its machines. It ends here before it ends in the
// database, because the time is measured from the moment when a renewal is sent.
import { monotonic } from '../../shared/clock.ts';
import type { PostgresListener } from '../history/postgres-listener.ts';
import { leaseMs, releasing, renewal } from './tables.ts';

/** A broker stops work this long before the end of its lease. */
const marginMs = 1_000;

export class Lease {
  readonly brokerId: string;
  /** Of this broker's peer port. */
  url: string;
  readonly #connection: PostgresListener;
  /** Monotonic times: until when the lease is good, and since when it always was. */
  #until = 0;
  #steadySince = 0;

  constructor(connection: PostgresListener, brokerId: string, url: string) {
    this.#connection = connection;
    this.brokerId = brokerId;
    this.url = url;
  }

  get isGood(): boolean {
    return monotonic() < this.#until;
  }

  /** True if it has been good for as long as a lease lasts, so that all others had the time to renew theirs. */
  get isSteady(): boolean {
    return this.isGood && monotonic() - this.#steadySince >= leaseMs;
  }

  async renew(): Promise<void> {
    const sent = monotonic();
    await this.#connection.query(renewal, [this.brokerId, this.url]);
    if (sent > this.#until) this.#steadySince = sent;
    this.#until = sent + leaseMs - marginMs;
  }

  /** Ends the lease, so that others claim the machines at once. */
  async release(): Promise<void> {
    this.#until = 0;
    await this.#connection.query(releasing, [this.brokerId]);
  }
}
