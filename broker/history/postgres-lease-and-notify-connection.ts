// The connection to PostgreSQL for a broker's lease and notifications. Writes use another connection, because they
// could delay a renewal of the lease.
import { Client } from 'pg';
import { after } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Row } from './database-interface.ts';
import { databaseUnavailable } from './group-commit.ts';
import type { PostgresAddress } from './postgres-settings.ts';
import { isTimeout, newsChannel, types } from './postgres-write-connection.ts';

/** Milliseconds before a lost connection is opened again. */
const betweenMs = 250;
/** Milliseconds after which a statement without an answer counts as a lost connection. */
const answerMs = 3_000;

type Value = string | number | boolean | null | readonly string[];

export class LeaseConnection {
  readonly #address: PostgresAddress;
  readonly #log: Logger;
  /** Is called with the id of the broker that has committed something, and with '' after each connect. */
  readonly #onNews: (from: string) => void;
  #client: Client | undefined;
  /** Number of times that the connection was opened. */
  connects = 0;
  #isClosed = false;
  #cancelRetry = (): void => {};

  private constructor(address: PostgresAddress, log: Logger, onNews: (from: string) => void) {
    this.#address = address;
    this.#log = log;
    this.#onNews = onNews;
  }

  static async open(
    address: PostgresAddress,
    log: Logger,
    onNews: (from: string) => void,
  ): Promise<LeaseConnection> {
    const connection = new LeaseConnection(address, log, onNews);
    await connection.#connect();
    return connection;
  }

  /** Runs one statement, which is committed at once. `$1` stands for the first value. */
  async query(text: string, values: readonly Value[] = []): Promise<Row[]> {
    const client = this.#client;
    if (!client) throw databaseUnavailable();
    try {
      return (await client.query<Row>({ text, values: [...values] })).rows;
    } catch (error) {
      // If no answer comes in time, the connection counts as lost.
      if (isTimeout(error)) this.#lost(client);
      throw error;
    }
  }

  async close(): Promise<void> {
    this.#isClosed = true;
    this.#cancelRetry();
    const client = this.#client;
    this.#client = undefined;
    await client?.end().catch(() => {});
  }

  async #connect(): Promise<void> {
    const client = new Client({ ...this.#address.config, types, pipeline: true, query_timeout: answerMs });
    client.on('error', () => this.#lost(client));
    client.on('end', () => this.#lost(client));
    client.on('notification', ({ payload = '' }) => this.#onNews(payload));
    try {
      await client.connect();
      // A standby refuses LISTEN, so #connect() rejects if the server is a standby. The rows of a standby may be out of
      // date.
      await client.query(`LISTEN ${newsChannel}`);
    } catch (error) {
      void client.end().catch(() => {});
      throw error;
    }
    this.#client = client;
    this.connects += 1;
    this.#onNews('');
  }

  #lost(client: Client): void {
    if (this.#client !== client) return;
    this.#client = undefined;
    void client.end().catch(() => {});
    this.#retry();
  }

  #retry(): void {
    if (this.#isClosed) return;
    this.#cancelRetry = after(betweenMs, () => {
      this.#connect().catch((err: unknown) => {
        this.#log.debug(
          { err },
          'the database does not answer, so the lease of this broker cannot be renewed',
        );
        this.#retry();
      });
    });
  }
}
