// The connection that writes to PostgreSQL. After a loss it is opened again. It holds a lock of the database, so that
// several brokers can use the database only if all of them were started with --peer-listen.
import { randomBytes } from 'node:crypto';
import { Client, type CustomTypesConfig, type QueryConfig } from 'pg';
import { after, endsWithin, sleep } from '../../shared/clock.ts';
import { StartError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Row, Value, Writer } from './database-interface.ts';
import { databaseUnavailable } from './group-commit.ts';
import type { PostgresAddress } from './postgres-settings.ts';
import { requestErrorOf, startErrorOf } from './translate-postgres-errors.ts';
import { toPostgres } from './translate-to-postgres.ts';

/** The oldest version of PostgreSQL that is supported, as its setting server_version_num. */
export const oldestVersion = 140_000;
/**
 * The advisory lock of the brokers that use the database. A broker that uses the database alone takes the lock
 * exclusively. Brokers that share the database take the lock as a shared lock.
 */
const lock = 0x66_61_72_68;
/** The advisory lock of a broker that starts, so that two brokers do not create tables at the same time. */
const startLock = lock + 1;
/**
 * The advisory lock of the broker that commits. Without this lock, new rows could become visible out of order, and two
 * brokers could deadlock.
 */
export const commitLock = lock + 2;
/**
 * The channel on which each commit notifies the other brokers. The payload is the id of the broker that has
 * committed.
 */
export const newsChannel = 'farhand';
/** In the table `writers`, the prefix of the id of a broker that uses the database alone. */
const alone = 'only';
/** Milliseconds after which the server ends a transaction of a broker that is frozen, so that the others can commit. */
const frozenMs = 3_000;
/**
 * Maximum number of attempts to get the lock. The first ones may fail, because the server may notice late that an
 * earlier broker has ended.
 */
const lockTries = 30;
const betweenMs = 250;
/**
 * Milliseconds after which a statement without an answer counts as a lost connection, because the server may
 * be frozen.
 */
const answerMs = 10_000;
/** Maximum number of milliseconds that a stopping broker waits for the deletion of its row. */
const deletionMs = 1_000;
/** Maximum number of statements that are prepared on each connection. */
const mostPrepared = 300;

/** Parsers that convert values to what SQLite would return: numbers, 1 for true, and bytes. */
const parsers = new Map<number, (text: string) => unknown>([
  ...[20, 21, 23, 700, 701, 1700].map((oid) => [oid, Number] as const),
  [16, (text) => (text === 't' ? 1 : 0)],
  [17, (text) => Buffer.from(text.slice(2), 'hex')],
]);
export const types: CustomTypesConfig = {
  getTypeParser: (oid: number) => parsers.get(oid) ?? ((text: string) => text),
};

const prepared = new Map<string, { text: string; name: string }>();

/**
 * Translates SQL for SQLite to a query for PostgreSQL. Each connection prepares the query only once. Set `isOneOfFew`
 * to false for SQL with many variants. Such a query is not prepared, because the variants would use up `mostPrepared`.
 */
export function queryOf(sql: string, values: readonly Value[], isOneOfFew = true): QueryConfig {
  const found = prepared.get(sql);
  if (found) return { ...found, values: [...values] };
  const text = toPostgres(sql);
  if (!isOneOfFew || prepared.size >= mostPrepared) return { text, values: [...values] };
  const entry = { text, name: `s${prepared.size}` };
  prepared.set(sql, entry);
  return { ...entry, values: [...values] };
}

export class PostgresSession implements Writer {
  readonly #address: PostgresAddress;
  readonly #log: Logger;
  /** The connection; undefined while it is lost. */
  #client: Client | undefined;
  /** Resolves when the connection is open again. */
  #returned = Promise.withResolvers<void>();
  /** Number of the transaction in progress, or of the last one. Each transaction stores its number. */
  #number = 0;
  /** Number of the last transaction that is known to be committed. */
  #committed = 0;
  /**
   * A random text for each connection, also stored in the table `writers`. A transaction that begins on an older
   * connection fails, because the table then has another text.
   */
  #session = '';
  /** Number of times that the connection was lost. */
  disconnects = 0;
  #cancelRetry = (): void => {};
  readonly #listeners: (() => void)[] = [];
  #commitsLost: (error: Error) => void = () => {};
  #isClosed = false;
  #isStopping = false;
  /** Id of this broker; undefined if no other broker may use the database. */
  readonly #brokerId: string | undefined;
  /** Id of this broker's row in the table `writers`. */
  readonly #writerId: string;
  /**
   * The query that each transaction sends after BEGIN. It stores the transaction's number in the table `writers`. If a
   * later connection of this broker has stored another `session` there, the query divides by zero, so the transaction
   * fails. If brokers share the database, the query also takes `commitLock` and notifies the other brokers.
   */
  readonly #startOfTransaction: string;

  private constructor(address: PostgresAddress, log: Logger, brokerId: string | undefined) {
    this.#address = address;
    this.#log = log;
    this.#brokerId = brokerId;
    this.#writerId = brokerId ?? `${alone}${randomBytes(8).toString('hex')}`;
    // The server sends the notification at COMMIT.
    const shared = `pg_advisory_xact_lock(${commitLock})::text, pg_notify('${newsChannel}', ?1::text)::text, `;
    this.#startOfTransaction = `UPDATE writers SET number = ?2 / CASE session WHEN ?3::text THEN 1 ELSE 0 END
      WHERE id = ?1::text RETURNING ${brokerId === undefined ? '' : shared}number`;
  }

  /**
   * Connects and gets the lock. A broker that shares the database also waits until no other broker is starting. Call
   * `started()` at the end of the start. Throws StartError.
   */
  static async open(address: PostgresAddress, log: Logger, brokerId?: string): Promise<PostgresSession> {
    const session = new PostgresSession(address, log, brokerId);
    try {
      const client = await session.#connect(lockTries);
      const starting = `${address.name} is in use by another farhand-broker that is starting: try again`;
      if (brokerId !== undefined)
        await lockOrThrow(client, `pg_try_advisory_lock(${startLock})`, lockTries, starting);
      session.#use(client);
      return session;
    } catch (error) {
      throw startErrorOf(error, address.name);
    }
  }

  get isReady(): boolean {
    return this.#client !== undefined;
  }

  onUnavailable(listener: () => void): void {
    this.#listeners.push(listener);
  }

  onCommitsLost(listener: (error: Error) => void): void {
    this.#commitsLost = listener;
  }

  stopWaiting(): void {
    this.#isStopping = true;
    this.#returned.reject(databaseUnavailable());
  }

  /**
   * Creates this broker's row in the table `writers`, which must exist. Call it before the first transaction. Deletes
   * the rows of brokers that cannot share the database with this one. If such a broker still runs, it finds its row
   * missing when it reconnects.
   */
  async createWriterRow(): Promise<void> {
    await this.execute('DELETE FROM writers WHERE id LIKE ?', [
      this.#brokerId === undefined ? '%' : `${alone}%`,
    ]);
    await this.execute("INSERT INTO writers (id, session, number) VALUES (?, '', 0)", [this.#writerId]);
    if (this.#client) await this.#fence(this.#client);
  }

  /** Releases the start lock, so that other brokers can start. */
  async started(): Promise<void> {
    if (this.#brokerId !== undefined) await this.execute(`SELECT pg_advisory_unlock(${startLock})::text`, []);
  }

  async begin(): Promise<void> {
    if (!this.#client) throw databaseUnavailable();
    this.#number += 1;
    // Errors of these queries are ignored: the statements after them then fail too, and report the error.
    this.execute('BEGIN', []).catch(() => {});
    const values = [this.#writerId, this.#number, this.#session];
    this.execute(this.#startOfTransaction, values).catch(() => {});
  }

  async execute(sql: string, values: readonly Value[]): Promise<Row[]> {
    const client = this.#client;
    if (!client) throw databaseUnavailable();
    try {
      return (await client.query<Row>(queryOf(sql, values))).rows;
    } catch (error) {
      if (isTimeout(error)) this.#lost(client);
      throw requestErrorOf(error);
    }
  }

  /**
   * Commits. If the connection is lost before the answer arrives, waits until the database is available
   * again, and reads whether the commit has happened.
   */
  async commit(): Promise<void> {
    const client = this.#client;
    if (!client) throw databaseUnavailable();
    const number = this.#number;
    try {
      const { command } = await client.query('COMMIT');
      if (command !== 'COMMIT') throw new Error('a statement failed, so the transaction was rolled back');
      this.#committed = number;
    } catch (error) {
      if (isTimeout(error)) this.#lost(client);
      if (this.#client === client) throw requestErrorOf(error);
      await this.#returned.promise;
      if (this.#committed < number) throw databaseUnavailable(error);
    }
  }

  async rollback(): Promise<void> {
    await this.#client?.query('ROLLBACK');
  }

  async close(): Promise<void> {
    this.#isClosed = true;
    this.#cancelRetry();
    this.stopWaiting();
    const client = this.#client;
    this.#client = undefined;
    if (!client) return;
    const left = client.query('DELETE FROM writers WHERE id = $1', [this.#writerId]).then(() => client.end());
    // A server that is frozen must not delay the stop. If the row remains, a broker deletes it later.
    await endsWithin(
      deletionMs,
      left.catch(() => {}),
    );
    client.connection.stream.destroy();
  }

  /**
   * Stores a new `session`, so that an earlier connection can begin no more transactions. If it has begun one, that
   * transaction has locked the row, so this query waits for its end. Returns the number of the last committed
   * transaction; undefined if this broker's row is missing.
   */
  async #fence(client: Client): Promise<number | undefined> {
    const session = randomBytes(8).toString('hex');
    const text = 'UPDATE writers SET session = $1 WHERE id = $2 RETURNING number';
    const { rows } = await client.query<Row>({ text, values: [session, this.#writerId] });
    this.#session = session;
    return rows[0] && Number(rows[0].number);
  }

  async #connect(tries: number): Promise<Client> {
    const client = new Client({ ...this.#address.config, types, pipeline: true, query_timeout: answerMs });
    client.on('error', () => this.#lost(client));
    client.on('end', () => this.#lost(client));
    await client.connect();
    try {
      await assertUsable(client, this.#address.name, this.#log);
      const isShared = this.#brokerId !== undefined;
      if (isShared) await client.query(`SET idle_in_transaction_session_timeout = ${frozenMs}`);
      const how = `pg_try_advisory_lock${isShared ? '_shared' : ''}(${lock})`;
      const used = isShared
        ? 'a farhand-broker that was started without --peer-listen: stop that broker first'
        : 'another farhand-broker: stop that broker first, or start all brokers with --peer-listen';
      await lockOrThrow(client, how, tries, `${this.#address.name} is in use by ${used}`);
      return client;
    } catch (error) {
      await client.end().catch(() => {});
      throw error;
    }
  }

  #use(client: Client): void {
    this.#client = client;
    this.#returned.promise.catch(() => {});
    this.#returned.resolve();
  }

  #lost(client: Client): void {
    if (this.#client !== client) return;
    this.#client = undefined;
    this.disconnects += 1;
    this.#returned = Promise.withResolvers();
    this.#returned.promise.catch(() => {});
    if (this.#isStopping) this.#returned.reject(databaseUnavailable());
    this.#log.error(`${this.#address.name} does not answer: requests that need it get 503`);
    for (const listener of this.#listeners) listener();
    this.#retry();
  }

  #retry(): void {
    if (this.#isClosed) return;
    this.#cancelRetry = after(betweenMs, () => {
      this.#reconnect().catch(() => this.#retry());
    });
  }

  async #reconnect(): Promise<void> {
    const client = await this.#connect(1);
    try {
      const committed = (await this.#fence(client)) ?? -1;
      if (committed < 0 && this.#brokerId === undefined) throw this.#usedByAnother();
      if (committed < this.#committed) throw new CommitsLostError(this.#address.name);
      this.#committed = committed;
      if (this.#isClosed) throw databaseUnavailable();
    } catch (error) {
      void client.end().catch(() => {});
      if (error instanceof CommitsLostError) this.#commitsLost(error);
      throw error;
    }
    this.#log.info(`${this.#address.name} answers again`);
    this.#use(client);
  }

  /** Logs and returns an error: another broker has used the database, so this broker's memory is out of date. */
  #usedByAnother(): Error {
    const message = `another broker has written to ${this.#address.name} while this broker was disconnected: restart this broker`;
    this.#log.error(message);
    return new Error(message);
  }
}

/** Thrown if the database no longer has a commit that it had confirmed, as after a failover to an outdated standby. */
class CommitsLostError extends StartError {
  constructor(name: string) {
    super(
      `${name} has lost changes that it had confirmed, so this broker ends. After a restart, it uses the data that the database has now. Check whether a standby that lacked these changes was promoted`,
      1,
    );
  }
}

/** Tries to get a lock several times, because the server may notice late that the broker with the lock has ended. */
async function lockOrThrow(client: Client, how: string, tries: number, message: string): Promise<void> {
  for (let left = tries; ; left -= 1) {
    const { rows } = await client.query<Row>(`SELECT ${how}::text AS has`);
    if (rows[0]?.has === 'true') return;
    if (left <= 1) throw new StartError(message, 1);
    await sleep(betweenMs);
  }
}

/** True if pg has closed the connection because a statement was not answered in time. */
export const isTimeout = (error: unknown): boolean =>
  error instanceof Error && error.message === 'Query read timeout';

async function assertUsable(client: Client, name: string, log: Logger): Promise<void> {
  const { rows } = await client.query<Row>(
    `SELECT current_setting('server_version_num') AS version, current_setting('server_version') AS text,
      current_setting('fsync') AS fsync, current_setting('server_encoding') AS encoding, pg_is_in_recovery()::text AS standby`,
  );
  const { version, text, fsync, encoding, standby } = rows[0] ?? {};
  if (Number(version) < oldestVersion)
    throw new StartError(
      `${name} is PostgreSQL ${String(text)}: version ${oldestVersion / 10_000} or newer is needed`,
    );
  if (encoding !== 'UTF8')
    throw new StartError(
      `${name} has the encoding ${String(encoding)}: create the database with the encoding UTF8`,
    );
  if (standby === 'true')
    throw new StartError(`${name} is a standby that cannot be written: use the primary`, 1);
  if (fsync === 'off') log.warn(`${name} has fsync off: a power failure can lose or damage its data`);
  // A commit that the server has confirmed must survive a crash of the server.
  await client.query(
    "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'",
  );
}
