// The lease of this broker. While the lease lasts, no other broker claims this broker's machines.
import { randomBytes } from 'node:crypto';
import { monotonic } from '../../shared/clock.ts';
import type { LeaseConnection } from '../history/postgres-lease-and-notify-connection.ts';
import { leaseMs, releasing, renewal } from './cluster-tables.ts';

export const newBrokerId = (): string => `broker_${randomBytes(11).toString('hex')}`;

/** A broker stops work this many milliseconds before its lease ends. */
const marginMs = 1_000;

export class Lease {
  readonly brokerId: string;
  /** URL of the peer port of this broker. */
  url: string;
  /** Id of this broker's data directory. */
  readonly directoryId: string;
  readonly #connection: LeaseConnection;
  /**
   * `#until`: time until which this broker relies on its lease, which is `marginMs` before the lease ends.
   * `#steadySince`: time since which the lease has been valid without a break. Both are times of the monotonic clock.
   */
  #until = 0;
  #steadySince = 0;
  /** The monotonic time since which the database has answered every renewal; undefined if the last renewal failed. */
  #answeredSince: number | undefined;
  #isReleased = false;

  constructor(
    connection: LeaseConnection,
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
   * True if this lease has been valid without a break for `leaseMs` milliseconds. In that time, every running broker
   * could renew its own lease. Only then does this broker claim machines and tasks of brokers with an expired lease.
   */
  get isSteady(): boolean {
    return this.isGood && monotonic() - this.#steadySince >= leaseMs;
  }

  /** Renews the lease now. Returns true if this renewal and all others of the last `leaseMs` milliseconds succeeded. */
  async hasDatabase(): Promise<boolean> {
    await this.renew().catch(() => {});
    // After an outage of the database, the result stays false for `leaseMs` milliseconds, so that all brokers can
    // reconnect. Without this delay, one broker may answer true while another has not reconnected yet. The latter
    // would then send its agents away.
    return monotonic() - (this.#answeredSince ?? Number.POSITIVE_INFINITY) >= leaseMs;
  }

  /** Renews the lease. Returns the monotonic time when the renewal was sent. This broker counts the lease from then. */
  async renew(): Promise<number> {
    // The time is taken before the query. For this broker, the lease therefore ends earlier than for the database.
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

  /** Ends the lease early, so that other brokers claim this broker's machines immediately. */
  async release(): Promise<void> {
    this.#isReleased = true;
    await this.#connection.query(releasing, [this.brokerId]);
  }
}
