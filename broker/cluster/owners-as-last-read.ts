// Stores in memory which brokers are alive, and which of them owns each machine, as last read from the database.
import { monotonic } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Row } from '../history/database-interface.ts';
import type { RowReader } from '../history/history-database.ts';
import type { LeaseConnection } from '../history/postgres-lease-and-notify-connection.ts';
import { leaseMs, readingBrokers, readingHorizon, readingOwner, readingOwners } from './cluster-tables.ts';
import type { Peer } from './peers/owner-interfaces.ts';

interface Owner {
  brokerId: string;
  epoch: number;
  /** Id of the link between the machine and that broker; null without a link. */
  linkId: string | null;
}

export class OwnersAsLastRead {
  readonly #connection: LeaseConnection;
  /** Id of this broker. */
  readonly #brokerId: string;
  /** Id of this broker's data directory. */
  readonly #directoryId: string;
  readonly #log: Logger;
  readonly #startedAt = monotonic();
  /** Ids of brokers that run on a copy of this broker's data directory. They are stored so that each is logged once. */
  readonly #copies = new Set<string>();
  #owners = new Map<string, Owner>();
  /** All brokers, with the monotonic time at which each broker's lease ends. */
  #brokers = new Map<string, { url: string; directoryId: unknown; until: number }>();
  /** Monotonic time at which the table of brokers was last read. */
  #readAt = 0;
  /** The brokers that were alive at `#readAt`, as JSON. */
  #living = '';
  /** Id of a transaction. All transactions with smaller ids have ended, and the rows that they changed were read. */
  #horizon = '0';
  /**
   * `#connection.connects` at the start of the last read. If the connection was opened again since then, read() reads
   * everything again.
   */
  #connects = 0;

  constructor(
    connection: LeaseConnection,
    { brokerId, directoryId, log }: { brokerId: string; directoryId: string; log: Logger },
  ) {
    this.#connection = connection;
    this.#brokerId = brokerId;
    this.#directoryId = directoryId;
    this.#log = log;
  }

  of(machineId: string): Owner | undefined {
    return this.#owners.get(machineId);
  }

  /** Returns the owner of a machine if the owner is a living broker. */
  living(machineId: string): Peer | undefined {
    return this.#peerOf(this.#owners.get(machineId)?.brokerId ?? '');
  }

  /** Returns the owner of a machine if the owner is a living broker other than this one. */
  elsewhere(machineId: string): Peer | undefined {
    return this.#ifOther(this.living(machineId));
  }

  /**
   * Reads the owner of a machine again if the machine had no link at the last read. Returns the owner if it is a
   * living broker other than this one.
   */
  async newOwner(machineId: string, reader: RowReader): Promise<Peer | undefined> {
    if ((this.#owners.get(machineId)?.linkId ?? null) !== null) return undefined;
    const row = await reader.get(readingOwner, machineId);
    return row && this.#ifOther(this.#peerOf(String(row.broker_id)));
  }

  /**
   * True if a machine has no owner, or its owner has given up its lease. With `orOver`, also if the owner's lease has
   * expired.
   */
  isFree(machineId: string, orOver: boolean): boolean {
    const owner = this.#owners.get(machineId);
    if (!owner) return true;
    if (owner.brokerId === this.#brokerId) return false;
    const broker = this.#brokers.get(owner.brokerId);
    return !broker || (orOver && broker.until <= monotonic());
  }

  #peerOf(brokerId: string): Peer | undefined {
    const broker = this.#brokers.get(brokerId);
    return broker && broker.until > monotonic() ? { brokerId, url: broker.url } : undefined;
  }

  #ifOther(peer: Peer | undefined): Peer | undefined {
    return peer?.brokerId === this.#brokerId ? undefined : peer;
  }

  hasEnded(brokerId: string): boolean {
    return (this.#brokers.get(brokerId)?.until ?? 0) <= this.#readAt;
  }

  /** Returns the other brokers that were alive when the database was last read. */
  lastKnownPeers(): readonly Peer[] {
    return this.#othersAliveAt(this.#readAt);
  }

  #othersAliveAt(time: number): Peer[] {
    const others = [...this.#brokers].filter(([id, { until }]) => id !== this.#brokerId && until > time);
    return others.map(([brokerId, { url }]) => ({ brokerId, url }));
  }

  withDirectory(directoryId: string): Peer | undefined {
    return this.#othersAliveAt(monotonic()).find(
      ({ brokerId }) => this.#brokers.get(brokerId)?.directoryId === directoryId,
    );
  }

  /**
   * Reads the changes since the last read. If the connection was opened again, reads everything, because the database
   * may then be a copy that lacks the last commits. `machineIds`: machines with a new owner or link; after a read of
   * everything, all machines that have an owner or had one before. `brokersChanged`: true if brokers have started or
   * ended.
   */
  async read(): Promise<{ machineIds: readonly string[]; brokersChanged: boolean }> {
    const at = monotonic();
    const { connects } = this.#connection;
    const isNew = connects !== this.#connects;
    const brokers = await this.#connection.query(readingBrokers);
    this.#brokers = new Map(
      brokers.map(({ id, url, directory_id: directoryId, ms }) => [
        String(id),
        { url: String(url), directoryId, until: at + Number(ms) },
      ]),
    );
    this.#readAt = at;
    this.#findCopies();
    const before = this.#living;
    this.#living = JSON.stringify(brokers.filter(({ ms }) => Number(ms) > 0).map(({ id, url }) => [id, url]));
    // The id of the oldest transaction in progress is read before the owners. A transaction that commits after the read
    // of the owners has this id or a larger one. The next call starts from this id, so it finds the changed rows.
    const [horizon] = await this.#connection.query(readingHorizon);
    const rows = await this.#connection.query(readingOwners, [isNew ? '0' : this.#horizon]);
    this.#horizon = String(horizon?.xid);
    this.#connects = connects;
    const earlier = isNew ? [...this.#owners.keys()] : [];
    if (isNew) this.#owners = new Map();
    const changed = rows.filter((row) => this.set(row)).map((row) => String(row.machine_id));
    const unowned = earlier.filter((id) => !this.#owners.has(id));
    return { machineIds: [...changed, ...unowned], brokersChanged: before !== this.#living };
  }

  /** Logs each broker that runs on a copy of this broker's data directory. */
  #findCopies(): void {
    for (const [id, { url, directoryId, until }] of this.#brokers) {
      if (id === this.#brokerId || directoryId !== this.#directoryId || this.#copies.has(id)) continue;
      // An earlier process of this broker may still have a lease, but has not renewed it since this process started.
      if (until <= this.#startedAt + leaseMs) continue;
      this.#copies.add(id);
      this.#log.error(
        { broker: id, url },
        'another broker runs on a copy of this data directory, so outputs of finished commands are read from the wrong broker: stop one of the two, delete the file directory-id in its data directory, and start it again',
      );
    }
  }

  /** Stores the owner of a machine in memory. Returns false if this owner or a newer one was known already. */
  set(row: Row): boolean {
    const id = String(row.machine_id);
    const linkId = row.link_id === null ? null : String(row.link_id);
    const owner = { brokerId: String(row.broker_id), epoch: Number(row.epoch), linkId };
    const known = this.#owners.get(id);
    if (known && known.epoch > owner.epoch) return false;
    if (known?.epoch === owner.epoch && known.linkId === owner.linkId) return false;
    this.#owners.set(id, owner);
    return true;
  }
}
