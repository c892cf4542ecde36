// Finds out which brokers on this database are alive, and which of them owns each machine.
// - The owner runs the machine's commands, terminals and schedules.
// - A broker becomes the owner of each machine that links to it.
// - The machines of a broker that has stopped are claimed by another broker.
import { endsWithin, every, sleep } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import { databaseUnavailable, type Fence } from '../history/group-commit.ts';
import type { History } from '../history/history-database.ts';
import { LeaseConnection } from '../history/postgres-lease-and-notify-connection.ts';
import type { PostgresAddress } from '../history/postgres-settings.ts';
import { newsChannel } from '../history/postgres-write-connection.ts';
import type { State } from '../state/index.ts';
import * as sql from './cluster-tables.ts';
import { deleteOutdatedRows } from './delete-outdated-rows.ts';
import { EndsOfLinks } from './ends-of-links.ts';
import { Lease } from './own-broker-lease.ts';
import { OwnersAsLastRead } from './owners-as-last-read.ts';
import type { Owners, Peer } from './peers/owner-interfaces.ts';
import { createNewsReader, type NewsReader } from './read-on-news.ts';
import { Claims } from './tasks-of-one-broker.ts';

/** A module that holds open work of machines in memory, such as commands or sessions. */
export interface Adopter {
  /** Loads the open work of these machines, which this broker owns from now on. */
  adopt(machineIds: readonly string[]): Promise<void>;
  /** Drops the open work and link of a machine. Its agent reconnects at a random time within `spreadMs` ms. */
  drop(machineId: string, spreadMs: number): void;
}

const renewMs = 2_000;
const pollMs = 1_000;
/** Longest time in milliseconds until an agent connects again after its machine got another owner. */
const returnMs = 1_000;
/** Maximum number of milliseconds that a stopping broker waits for its reads, because the database may not answer. */
const idleMs = 1_000;

/** A machine that this broker owns. */
interface Own {
  epoch: number;
  /** Resolves once the open work of the machine is loaded. Rejects if it cannot be loaded. */
  loaded: Promise<void>;
}

interface Options extends Pick<Lease, 'brokerId' | 'url' | 'directoryId'> {
  address: PostgresAddress;
  log: Logger;
}

export class Cluster implements Owners {
  readonly brokerId: string;
  readonly directoryId: string;
  readonly #log: Logger;
  readonly #state: State;
  readonly #history: History;
  readonly #connection: LeaseConnection;
  readonly #lease: Lease;
  /** This broker's claims to tasks that one broker does for all brokers. */
  readonly claims: Claims;
  /** Machines of this broker whose open work is not loaded. The next read of owners loads it. */
  readonly #unloaded = new Set<string>();
  readonly #adopters: Adopter[] = [];
  /** Readers of the data that other brokers write, such as the owners of machines. follow() adds them. */
  readonly #readers: NewsReader[] = [];
  readonly #watchers = new Set<(machineIds: readonly string[]) => void>();
  readonly #owners: OwnersAsLastRead;
  readonly #own = new Map<string, Own>();
  readonly #takes = new Map<string, { linkId: string; taken: PromiseWithResolvers<void> }>();
  #isTaking = false;
  readonly #endsOfLinks: EndsOfLinks;
  #stops: (() => void)[] = [];
  /** Text of the last failure that was logged as an error; empty after a success. Repetitions are logged as debug. */
  #loggedFailure = '';
  #isClosed = false;

  private constructor(options: Options, connection: LeaseConnection, state: State, history: History) {
    const { brokerId, directoryId, log } = options;
    this.brokerId = brokerId;
    this.directoryId = directoryId;
    this.#lease = new Lease(connection, options);
    this.#owners = new OwnersAsLastRead(connection, options);
    this.claims = new Claims(connection, brokerId);
    this.#endsOfLinks = new EndsOfLinks(history, brokerId, log);
    this.#log = log;
    this.#connection = connection;
    this.#state = state;
    this.#history = history;
    this.follow(() => this.#readOwners());
    this.follow(() => state.refresh());
  }

  /** Creates the tables and this broker's lease. From then on, changes fail for machines that it does not own. */
  static async open(options: Options, state: State, history: History): Promise<Cluster> {
    await history.migrate('cluster', sql.tables);
    let onNews = (_from: string): void => {};
    const connection = await LeaseConnection.open(options.address, options.log, (from) => onNews(from));
    const cluster = new Cluster(options, connection, state, history);
    onNews = (from) => {
      if (from !== options.brokerId) cluster.#read();
    };
    history.fenceWith(cluster.#fence);
    await cluster.#lease.renew();
    return cluster;
  }

  /** Begins to own machines. Call it after every part of the broker has called join(). */
  async start(): Promise<void> {
    this.#stops = [
      every(renewMs, () => void this.#renewAndClaim()),
      every(pollMs, () => this.#read()),
      deleteOutdatedRows(this.#connection, this.brokerId, this.#log),
    ];
    await this.#readOwners();
    await this.#claim();
    await this.#readOwners();
    await this.claims.renew(await this.#lease.renew(), this.#lease.isSteady);
  }

  /**
   * False if the lease of this broker is over, because it could not be renewed or was given up. Another broker may own
   * this broker's machines then.
   */
  get isAlive(): boolean {
    return this.#lease.isGood;
  }

  /** True if the lease has expired because this broker could not renew it. False if this broker gave it up. */
  get isCutOff(): boolean {
    return !this.#isClosed && !this.isAlive;
  }

  /** Number of machines that this broker owns. */
  get ownCount(): number {
    return this.#own.size;
  }

  /**
   * Drops the open work of all machines of this broker. Their agents connect again within `spreadMs` milliseconds. Call
   * it when this broker is cut off from the database.
   */
  handOver(spreadMs: number): void {
    for (const id of [...this.#own.keys()]) {
      this.#drop(id, spreadMs);
      // If no other broker becomes the owner, the next read of owners loads the work again.
      this.#unloaded.add(id);
    }
  }

  /** True if the database answers this broker now, and has answered it for the length of a lease. Never rejects. */
  async hasDatabase(): Promise<boolean> {
    return !this.#isClosed && (await this.#lease.hasDatabase());
  }

  owns(machineId: string): boolean {
    return this.#own.has(machineId);
  }

  ownerElsewhere(machineId: string): Peer | undefined {
    return this.#owners.elsewhere(machineId);
  }

  /** Returns the living broker that owns a machine, which may be this one; undefined if there is none. */
  brokerOf(machineId: string): Peer | undefined {
    return this.#owners.living(machineId);
  }

  newOwner(machineId: string): Promise<Peer | undefined> {
    return this.#owners.newOwner(machineId, this.#history);
  }

  async loaded(machineId: string): Promise<void> {
    await this.#own.get(machineId)?.loaded.catch((error: unknown) => {
      throw databaseUnavailable(error);
    });
  }

  /** True if another living broker has a link to the machine. */
  isLinkedElsewhere(machineId: string): boolean {
    const linkId = this.#owners.of(machineId)?.linkId ?? null;
    return linkId !== null && this.ownerElsewhere(machineId) !== undefined;
  }

  withDirectory(directoryId: string): Peer | undefined {
    return this.#owners.withDirectory(directoryId);
  }

  hasEnded(brokerId: string): boolean {
    return this.#owners.hasEnded(brokerId);
  }

  lastKnownPeers(): readonly Peer[] {
    return this.#owners.lastKnownPeers();
  }

  async advertise(url: string): Promise<void> {
    this.#lease.url = url;
    await this.#lease.renew();
    await this.#notify();
  }

  watch(watcher: (machineIds: readonly string[]) => void): () => void {
    this.#watchers.add(watcher);
    return () => void this.#watchers.delete(watcher);
  }

  join(adopter: Adopter): void {
    this.#adopters.push(adopter);
  }

  /** Calls `read` whenever other brokers may have written something. */
  follow(read: () => Promise<void>): void {
    const failed = (err: unknown): void =>
      this.#log.debug({ err }, 'changes made by other brokers could not be read; trying again within 1 s');
    this.#readers.push(createNewsReader(read, failed));
  }

  /**
   * Makes this broker the owner of a machine; `linkId` is empty if the machine has not linked yet. Resolves once the
   * machine's open work is loaded.
   */
  take(machineId: string, linkId: string): Promise<void> {
    if (this.#isClosed) return Promise.reject(databaseUnavailable());
    const taken = this.#takes.get(machineId)?.taken ?? Promise.withResolvers<void>();
    this.#takes.set(machineId, { linkId, taken });
    if (!this.#isTaking) void this.#takeAll();
    return taken.promise;
  }

  /** Makes this broker the owner of a newly registered machine. If that fails, a broker claims the machine later. */
  async takeNew(machineId: string): Promise<void> {
    if (!this.#owners.of(machineId)) await this.take(machineId, '').catch(() => {});
  }

  /** Records that the link of a machine has ended. This broker stays the owner of the machine. */
  unlinked(machineId: string, linkId: string): void {
    const owner = this.#owners.of(machineId);
    if (owner?.brokerId !== this.brokerId || owner.linkId !== linkId) return;
    this.#endsOfLinks.add(machineId, linkId);
    owner.linkId = null;
  }

  /**
   * Gives up the lease when this broker begins to stop. New requests then get 503, and other brokers claim this
   * broker's machines at once.
   */
  async leave(): Promise<void> {
    if (this.#isClosed) return;
    this.#isClosed = true;
    for (const stop of this.#stops) stop();
    this.claims.drop();
    await endsWithin(idleMs, this.#idle());
    await this.#lease
      .release()
      .then(() => this.#notify())
      .catch((err: unknown) =>
        this.#log.debug({ err }, 'the lease could not be given up; it ends by itself within 10 s'),
      );
  }

  /** Waits for the reads and takes in progress, and starts no further read. */
  async #idle(): Promise<void> {
    await Promise.all(this.#readers.map((reader) => reader.close()));
    while (this.#isTaking) await sleep(5);
  }

  async close(): Promise<void> {
    await this.leave();
    await this.#connection.close();
  }

  readonly #fence: Fence = (machineId) => {
    const own = this.#own.get(machineId);
    return own && { sql: 'SELECT fence(?, ?)', values: [machineId, own.epoch] };
  };

  async #notify(): Promise<void> {
    await this.#connection.query(`NOTIFY ${newsChannel}, '${this.brokerId}'`);
  }

  async #renewAndClaim(): Promise<void> {
    try {
      const renewedAt = await this.#lease.renew();
      if (this.#isClosed) return;
      await this.#endsOfLinks.write();
      await this.#claim();
      await this.claims.renew(renewedAt, this.#lease.isSteady);
      this.#loggedFailure = '';
    } catch (err) {
      if (this.#isClosed) return;
      const text = this.isAlive
        ? 'this broker could not renew its lease, or could not claim machines or tasks; if its lease ends, other brokers take over its machines'
        : 'the lease of this broker ended before it could be renewed; other brokers may now take over its machines';
      this.#log[text === this.#loggedFailure ? 'debug' : 'error']({ err }, `${text}; trying again every 2 s`);
      this.#loggedFailure = text;
    }
  }

  /** Claims machines without a living owner. */
  async #claim(): Promise<void> {
    // After a failure of the database, other brokers need time to renew their expired leases. This broker therefore
    // claims their machines only when its own lease has been valid for `leaseMs` milliseconds.
    const { isSteady } = this.#lease;
    const free = [...this.#state.machines.keys()].filter((id) => this.#owners.isFree(id, isSteady));
    if (free.length === 0) return;
    await this.#connection.query(sql.claiming, [this.brokerId, free, isSteady]);
    await this.#notify();
    this.#read();
  }

  /** Makes this broker the owner of all machines in `#takes`, in as few commits as possible. Never rejects. */
  async #takeAll(): Promise<void> {
    this.#isTaking = true;
    // Machines that link in the same turn of the event loop share one statement.
    await sleep(0);
    while (this.#takes.size > 0) {
      const some = new Map(this.#takes);
      this.#takes.clear();
      try {
        const links = [...some.values()].map(({ linkId }) => linkId);
        const values = [this.brokerId, sql.arrayOf([...some.keys()]), sql.arrayOf(links)];
        // Owners are changed under the lock of commits. Otherwise, this statement and a change about several machines
        // could lock the rows of the same machines in a different order, and deadlock.
        const rows = await this.#history.write((transaction) => transaction.all(sql.taking, ...values));
        for (const row of rows) this.#owners.set(row);
        await this.#become(rows.map((row) => String(row.machine_id)));
        for (const { taken } of some.values()) taken.resolve();
      } catch (error) {
        for (const { taken } of some.values()) taken.reject(error);
      }
    }
    this.#isTaking = false;
  }

  /** Loads the open work of machines that this broker now owns. */
  async #become(machineIds: readonly string[]): Promise<void> {
    const fresh = machineIds.filter((id) => {
      const owner = this.#owners.of(id);
      return owner?.brokerId === this.brokerId && this.#own.get(id)?.epoch !== owner.epoch;
    });
    const adopted = Promise.withResolvers<void>();
    adopted.promise.catch(() => {});
    for (const id of fresh) {
      if (this.#own.has(id)) this.#drop(id);
      this.#unloaded.delete(id);
      this.#own.set(id, { epoch: this.#owners.of(id)?.epoch ?? 0, loaded: adopted.promise });
    }
    if (fresh.length === 0) adopted.resolve();
    else
      await Promise.all(this.#adopters.map((adopter) => adopter.adopt(fresh))).then(
        () => adopted.resolve(),
        (error: unknown) => {
          for (const id of fresh) {
            this.#drop(id);
            this.#unloaded.add(id);
          }
          adopted.reject(error);
        },
      );
    await Promise.all(machineIds.flatMap((id) => this.#own.get(id)?.loaded ?? []));
    await adopted.promise;
  }

  #drop(machineId: string, spreadMs = returnMs): void {
    this.#own.delete(machineId);
    for (const adopter of this.#adopters) adopter.drop(machineId, spreadMs);
  }

  /** Makes all readers (see follow()) read soon, because other brokers may have changed something. */
  #read(): void {
    for (const reader of this.#readers) reader.wake();
  }

  async #readOwners(): Promise<void> {
    const { machineIds, brokersChanged } = await this.#owners.read();
    for (const id of machineIds) this.#dropIfLost(id);
    for (const id of this.#unloaded)
      if (this.#owners.of(id)?.brokerId !== this.brokerId) this.#unloaded.delete(id);
    const own = machineIds.filter((id) => this.#owners.of(id)?.brokerId === this.brokerId);
    // These changes are not read again, so the watchers also get them if the open work cannot be loaded.
    await this.#become([...new Set([...own, ...this.#unloaded])]).finally(() => {
      if (machineIds.length === 0 && !brokersChanged) return;
      for (const watcher of [...this.#watchers]) watcher(machineIds);
    });
    // If another broker has stopped, claims its machines now, not only at the next renewal of the lease.
    if (brokersChanged && this.#stops.length > 0)
      await this.#claim().catch((err: unknown) =>
        this.#log.debug({ err }, 'could not claim machines; trying again when this broker renews its lease'),
      );
  }

  #dropIfLost(machineId: string): void {
    const owner = this.#owners.of(machineId);
    const own = this.#own.get(machineId);
    if (!own || owner?.brokerId === this.brokerId) return;
    this.#log.warn(
      { machine_id: machineId, broker: owner?.brokerId },
      'this broker is no longer the owner of a machine',
    );
    this.#drop(machineId);
  }
}
