// Stores sessions in two tables of the history: a row for each session, and a row for each client while it is attached.

import type { Api, Reply } from '../../shared/api/route-table.ts';
import type { KeyId, MachineId, SessionId } from '../../shared/api/shared-schemas.ts';
import { notFound } from '../find-or-not-found.ts';
import type { History, HistoryTransaction, Row, RowReader } from '../history/history-database.ts';
import { allOf, reachableOnly } from '../list-pages-and-filters.ts';

type Detail = Reply<Api['sessions']['get']>;
type Times = 'created_at' | 'connected_at' | 'last_heartbeat_at' | 'grace_period_started_at' | 'ended_at';
export type Status = Detail['status'];
export type Mode = Detail['attached_clients'][number]['mode'];

/** A session as the broker stores it. Times are in milliseconds since 1970. The fields are the columns of the table. */
export interface Session extends Omit<Detail, Times | 'session_id' | 'attached_count' | 'attached_clients'> {
  id: SessionId;
  machine_id: MachineId;
  requested_by: KeyId;
  created_at: number;
  connected_at: number | null;
  last_heartbeat_at: number | null;
  grace_period_started_at: number | null;
  ended_at: number | null;
  /** The agent process that runs the terminal. When this process ends, the terminal ends too. */
  instance_id: string;
  /** True when the end of the session was requested, even if the session has not ended yet. */
  ending: boolean;
  /** Offset after the last byte of output that was sent to an operator. */
  sent_to: number;
}

/** An attached client, of any transport. The fields are the columns of the table. */
export interface Attached {
  client_id: string;
  session_id: SessionId;
  key_id: KeyId;
  key_name: string;
  mode: Mode;
  attached_at: number;
  /** Id of the request that attached the client. */
  request_id: string;
}

const tables = [
  `CREATE TABLE sessions (
    id TEXT NOT NULL UNIQUE, machine_id TEXT NOT NULL, machine_hostname TEXT NOT NULL, shell TEXT,
    status TEXT NOT NULL, created_at INTEGER NOT NULL, connected_at INTEGER, last_heartbeat_at INTEGER,
    grace_period INTEGER NOT NULL, grace_period_started_at INTEGER, ended_at INTEGER, exit_code INTEGER, signal TEXT,
    reason TEXT, cols INTEGER NOT NULL, rows INTEGER NOT NULL, requested_by TEXT NOT NULL, instance_id TEXT NOT NULL,
    ending INTEGER NOT NULL
  );
  CREATE INDEX sessions_by_time ON sessions (created_at, id);
  CREATE INDEX sessions_by_machine ON sessions (machine_id, created_at);
  CREATE INDEX sessions_by_end ON sessions (ended_at);
  CREATE INDEX sessions_open ON sessions (created_at) WHERE ended_at IS NULL;
  CREATE TABLE session_clients (
    client_id TEXT NOT NULL UNIQUE, session_id TEXT NOT NULL, key_id TEXT NOT NULL, key_name TEXT NOT NULL,
    mode TEXT NOT NULL, attached_at INTEGER NOT NULL, request_id TEXT NOT NULL
  )`,
  'ALTER TABLE sessions ADD COLUMN sent_to INTEGER NOT NULL DEFAULT 0',
];

/** The columns of a session. They are listed, because "SELECT *" would include the row number in PostgreSQL. */
export const columns = `id, machine_id, machine_hostname, shell, status, created_at, connected_at, last_heartbeat_at,
  grace_period, grace_period_started_at, ended_at, exit_code, signal, reason, cols, rows, requested_by, instance_id, ending,
  sent_to`;
const clientColumns = 'client_id, session_id, key_id, key_name, mode, attached_at, request_id';

export class SessionRecords {
  readonly #history: History;

  private constructor(history: History) {
    this.#history = history;
  }

  /** Creates the tables. Sessions are deleted `keepMs` milliseconds after their end. */
  static async open(history: History, keepMs: number): Promise<SessionRecords> {
    await history.migrate('sessions', tables);
    history.retain({ table: 'sessions', column: 'ended_at', keepMs, where: 'ended_at IS NOT NULL' });
    return new SessionRecords(history);
  }

  put(session: Session, transaction: HistoryTransaction): void {
    transaction.about(session.machine_id);
    transaction.put('sessions', 'id', { ...session, ending: Number(session.ending) });
  }

  /** Finds a session. Throws session_not_found. */
  async get(session_id: string): Promise<Session> {
    const session = await this.find(session_id);
    if (session) return session;
    throw notFound('session', session_id);
  }

  async find(id: string, reader: RowReader = this.#history): Promise<Session | undefined> {
    const row = await reader.get(`SELECT ${columns} FROM sessions WHERE id = ?`, id);
    return row && sessionOf(row);
  }

  /** Returns the sessions that have not ended, oldest first. Without `machineIds`, returns those on all machines. */
  async open(machineIds?: readonly string[]): Promise<Session[]> {
    const [where, values] = allOf([['ended_at IS NULL'], reachableOnly(machineIds)]);
    const text = `SELECT ${columns} FROM sessions WHERE ${where} ORDER BY created_at, rowid`;
    return (await this.#history.all(text, ...values)).map(sessionOf);
  }

  attach(client: Attached, transaction: HistoryTransaction): void {
    transaction.put('session_clients', 'client_id', { ...client });
  }

  detach(clientId: string, transaction: HistoryTransaction): void {
    transaction.run('DELETE FROM session_clients WHERE client_id = ?', clientId);
  }

  /**
   * Returns the clients that were still attached when their broker stopped. With `machineIds`, returns only the clients
   * of sessions on these machines.
   */
  async attached(machineIds?: readonly string[]): Promise<Attached[]> {
    const [where, values] = allOf([reachableOnly(machineIds)]);
    const ofThese = `session_id IN (SELECT id FROM sessions WHERE ${where})`;
    const rows = await this.#history.all(
      `SELECT ${clientColumns} FROM session_clients WHERE ${machineIds ? ofThese : 'TRUE'} ORDER BY rowid`,
      ...values,
    );
    // The cast is safe: the columns are exactly the fields that attach() wrote.
    return rows.map((row) => row as unknown as Attached);
  }
}

/** Converts a row to a session. The columns are exactly the fields that put() wrote. */
export function sessionOf(row: Row): Session {
  return { ...(row as unknown as Session), ending: row.ending === 1 };
}
