// The lease of this broker. While the lease lasts, no other broker claims this broker's machines. This broker measures
// the lease from the moment when it sends a renewal, so for this broker the lease ends earlier than in the database.
import { monotonic } from '../../shared/clock.ts';
import type { PostgresListener } from '../history/postgres-listener.ts';
import { leaseMs, releasing, renewal } from './broker-and-owner-tables.ts';

/** Milliseconds before the end of its lease at which a broker stops work. */
const marginMs = 1_000;

export class Lease {
  readonly brokerId: string;
  /** URL of the peer port of this broker. */
  url: string;
  /** Id of this broker's data directory. */
  readonly directoryId: string;
  readonly #connection: PostgresListener;
  /**
   * `#until` is the end of the lease. `#steadySince` is the time since which the lease has been valid without a break.
   * Both are times of the monotonic clock.
   */
  #until = 0;
  #steadySince = 0;
  /** The monotonic time since which the database has answered every renewal; undefined after one that failed. */
  #answeredSince: number | undefined;
  #isReleased = false;

  constructor(
    connection: PostgresListener,
    { brokerId, url, directoryId }: Pick<Lease, 'brokerId' | 'url' | 'directoryId'>,
  ) {
    this.#connection = connection;
    this.brokerId = brokerId;
    this.url = url;
    this.directoryId = directoryId;
  }

  get isGood(): boolean {
    return !this.#isReleased && monotonic() < this.#until;
  }

  /**
   * True if this lease has been valid without a break for `leaseMs` milliseconds. In this time every living broker
   * could renew its own lease. So a broker whose lease is over has stopped.
   */
  get isSteady(): boolean {
    return this.isGood && monotonic() - this.#steadySince >= leaseMs;
  }

  /**
   * Renews the lease now. Returns true if this renewal and all others of the last `leaseMs` milliseconds succeeded. A
   * broker that cannot reach the database asks the other brokers for this result, and if one answers true, sends its
   * own agents away. After an outage of the database the result stays false for `leaseMs` milliseconds. In this time
   * each broker can reach the database again, and keeps its agents.
   */
  async hasDatabase(): Promise<boolean> {
    await this.renew().catch(() => {});
    return monotonic() - (this.#answeredSince ?? Number.POSITIVE_INFINITY) >= leaseMs;
  }

  /** Renews the lease. Returns the monotonic time when the renewal was sent. The lease lasts from that time. */
  async renew(): Promise<number> {
    const sent = monotonic();
    try {
      await this.#connection.query(renewal, [this.brokerId, this.url, this.directoryId]);
    } catch (error) {
      this.#answeredSince = undefined;
      throw error;
    }
    this.#answeredSince ??= sent;
    if (sent > this.#until) this.#steadySince = sent;
    this.#until = sent + leaseMs - marginMs;
    return sent;
  }

  /** Ends the lease, so that other brokers claim this broker's machines at once. */
  async release(): Promise<void> {
    this.#isReleased = true;
    await this.#connection.query(releasing, [this.brokerId]);
  }
}
