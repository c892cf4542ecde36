// Sessions in history: a row for each session from its creation on, and for each client while it is attached.
import type { Api, Reply } from '../../shared/api/index.ts';
import type { KeyId, MachineId, SessionId } from '../../shared/api/route.ts';
import { AppError } from '../../shared/errors.ts';
import type { History, Row } from '../history.ts';

type Detail = Reply<Api['sessions']['get']>;
type Times = 'created_at' | 'connected_at' | 'last_heartbeat_at' | 'grace_period_started_at' | 'ended_at';
export type Status = Detail['status'];
export type Mode = Detail['attached_clients'][number]['mode'];

/** A session as the broker holds it: times in milliseconds. The fields are the columns. */
export interface Session extends Omit<Detail, Times | 'session_id' | 'attached_count' | 'attached_clients'> {
  id: SessionId;
  machine_id: MachineId;
  requested_by: KeyId;
  created_at: number;
  connected_at: number | null;
  last_heartbeat_at: number | null;
  grace_period_started_at: number | null;
  ended_at: number | null;
  /** The agent process that has the terminal, which dies with it. */
  instance_id: string;
  /** Its end was requested. */
  ending: boolean;
}

/** An attached client of any transport. The fields are the columns. */
export interface Attached {
  client_id: string;
  session_id: SessionId;
  key_id: KeyId;
  key_name: string;
  mode: Mode;
  attached_at: number;
  /** Of the call that attached it. */
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
];

/** Both tables; sessions that ended longer than `keepMs` ago are removed. Call what writes inside a transaction. */
export class SessionRecords {
  readonly #history: History;

  constructor(history: History, keepMs: number) {
    this.#history = history;
    history.migrate('sessions', tables);
    history.retain({ table: 'sessions', column: 'ended_at', keepMs, where: 'ended_at IS NOT NULL' });
  }

  put(session: Session): void {
    this.#put('sessions', 'id', { ...session, ending: Number(session.ending) });
  }

  /** Throws session_not_found. */
  get(session_id: string): Session {
    const session = this.find(session_id);
    if (session) return session;
    throw new AppError('session_not_found', 'no such session', { session_id });
  }

  find(id: string): Session | undefined {
    const row = this.#history.sql('SELECT * FROM sessions WHERE id = ?').get(id);
    return row && sessionOf(row);
  }

  /** In the order they came. */
  open(): Session[] {
    const text = 'SELECT * FROM sessions WHERE ended_at IS NULL ORDER BY created_at, rowid';
    return this.#history.sql(text).all().map(sessionOf);
  }

  attach(client: Attached): void {
    this.#put('session_clients', 'client_id', { ...client });
  }

  detach(clientId: string): void {
    this.#history.sql('DELETE FROM session_clients WHERE client_id = ?').run(clientId);
  }

  /** Clients that were attached when an earlier broker stopped. */
  attached(): Attached[] {
    const rows = this.#history.sql('SELECT * FROM session_clients ORDER BY rowid').all();
    // The columns are those that attach() wrote.
    return rows.map((row) => row as unknown as Attached);
  }

  #put(table: string, key: string, row: Row): void {
    const names = Object.keys(row);
    const places = names.map(() => '?').join(', ');
    const changes = names.map((name) => `${name} = excluded.${name}`).join(', ');
    const text = `INSERT INTO ${table} (${names.join(', ')}) VALUES (${places}) ON CONFLICT (${key}) DO UPDATE SET ${changes}`;
    this.#history.sql(text).run(...Object.values(row));
  }
}

/** A row back as a session; the columns are those that put() wrote. */
export function sessionOf(row: Row): Session {
  return { ...(row as unknown as Session), ending: row.ending === 1 };
}
