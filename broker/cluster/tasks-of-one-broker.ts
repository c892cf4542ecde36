// Tasks that one of several brokers does for all. A claim to a task is valid as long as the broker's lease. The tasks:
// - Sending deliveries: a task for each receiver.
// - Evaluating the alert rules about keys and certificates: one task.
import { monotonic } from '../../shared/clock.ts';
import type { LeaseConnection } from '../history/postgres-lease-and-notify-connection.ts';
import { claimingTasks, leaseMs, readingTasks } from './cluster-tables.ts';

/** A broker stops its claimed tasks this many milliseconds before its lease ends. */
const marginMs = 1_000;

interface Claimant {
  /** The names of the tasks that exist now. */
  names(): Iterable<string>;
  /** Is called with each task that this broker has newly claimed. */
  claimed(name: string): void;
}

export class Claims {
  readonly #connection: LeaseConnection;
  readonly #brokerId: string;
  readonly #claimants: Claimant[] = [];
  #own: ReadonlySet<string> = new Set();
  readonly #regular: ((names: ReadonlySet<string>) => Promise<void>)[] = [];
  #until = 0;

  constructor(connection: LeaseConnection, brokerId: string) {
    this.#connection = connection;
    this.#brokerId = brokerId;
  }

  has(name: string): boolean {
    return this.#own.has(name) && monotonic() < this.#until;
  }

  join(claimant: Claimant): void {
    this.#claimants.push(claimant);
  }

  /** Calls `look` after each renewal of the lease, with the names of the tasks that this broker has claimed. */
  regularly(look: (names: ReadonlySet<string>) => Promise<void>): void {
    this.#regular.push(look);
  }

  /** Ends the tasks of this broker. Call it when this broker gives up its lease. */
  drop(): void {
    this.#until = 0;
  }

  /**
   * Claims each task that has no broker, or whose broker has given up its lease. If `isSteady` is true (see
   * Lease.isSteady), also claims the tasks whose broker has an expired lease. Call this after each renewal of this
   * broker's lease.
   */
  async renew(renewedAt: number, isSteady: boolean): Promise<void> {
    const names = [...new Set(this.#claimants.flatMap((one) => [...one.names()]))];
    await this.#connection.query(claimingTasks, [this.#brokerId, names, isSteady]);
    const rows = await this.#connection.query(readingTasks, [this.#brokerId]);
    const before = monotonic() < this.#until ? this.#own : new Set<string>();
    this.#own = new Set(rows.map(({ name }) => String(name)));
    this.#until = renewedAt + leaseMs - marginMs;
    for (const claimant of this.#claimants)
      for (const name of claimant.names())
        if (this.#own.has(name) && !before.has(name)) claimant.claimed(name);
    for (const look of this.#regular) await look(this.#own);
  }
}
