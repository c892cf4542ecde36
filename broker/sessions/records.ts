// Sessions in history: a row each from the moment one is asked for, and a row for each client while it is attached.
import type { Api, Input, Reply } from '../../shared/api/index.ts';
import type { KeyId, MachineId, SessionId } from '../../shared/api/route.ts';
import { type History, type Row, textIn } from '../history.ts';

export type Detail = Reply<Api['sessions']['get']>;
export type Status = Detail['status'];
export type Mode = Detail['attached_clients'][number]['mode'];
/** What is asked for. */
export type Wish = Input<Api['sessions']['create']>;

/** A session as the broker holds it: times in milliseconds. */
export interface Session {
  id: SessionId;
  machine_id: MachineId;
  machine_hostname: string;
  shell: string | null;
  status: Status;
  created_at: number;
  connected_at: number | null;
  last_heartbeat_at: number | null;
  grace_period: number;
  grace_period_started_at: number | null;
  ended_at: number | null;
  exit_code: number | null;
  signal: string | null;
  reason: string | null;
  cols: number;
  rows: number;
  requested_by: KeyId;
  /** The agent process that has the terminal; it dies with that. */
  instance_id: string;
  /** Somebody asked to end it. */
  ending: boolean;
}

/** A client that is attached, whatever carries it. */
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

const columns = [
  ...(['id', 'machine_id', 'machine_hostname', 'shell', 'status', 'created_at', 'connected_at'] as const),
  ...(['last_heartbeat_at', 'grace_period', 'grace_period_started_at', 'ended_at', 'exit_code'] as const),
  ...(['signal', 'reason', 'cols', 'rows', 'requested_by', 'instance_id', 'ending'] as const),
];
const clientColumns = [
  ...(['client_id', 'session_id', 'key_id', 'key_name', 'mode', 'attached_at', 'request_id'] as const),
];

export interface Records {
  /** Writes a session as it is; inside a transaction. */
  put(session: Session): void;
  find(id: string): Session | undefined;
  machineOf(id: string): MachineId | undefined;
  /** In the order they came. */
  open(): Session[];
  attach(client: Attached): void;
  detach(clientId: string): void;
  /** Who was attached when an earlier broker stopped. */
  attached(): Attached[];
}

/** Opens the tables; sessions that ended longer than `keepMs` ago go. */
export function openRecords(history: History, keepMs: number): Records {
  history.migrate('sessions', tables);
  history.retain({ table: 'sessions', column: 'ended_at', keepMs, where: 'ended_at IS NOT NULL' });
  const values = (names: readonly string[]): string => names.map(() => '?').join(', ');
  const changes = columns.map((name) => `${name} = excluded.${name}`).join(', ');
  const put = `INSERT INTO sessions (${columns.join(', ')}) VALUES (${values(columns)})
    ON CONFLICT (id) DO UPDATE SET ${changes}`;
  const attach = `INSERT INTO session_clients (${clientColumns.join(', ')}) VALUES (${values(clientColumns)})`;
  return {
    put(session) {
      const flat = { ...session, ending: session.ending ? 1 : 0 };
      history.sql(put).run(...columns.map((name) => flat[name]));
    },
    find(id) {
      const row = history.sql('SELECT * FROM sessions WHERE id = ?').get(id);
      return row && fromRow(row);
    },
    machineOf(id) {
      const row = history.sql('SELECT machine_id FROM sessions WHERE id = ?').get(id);
      return row && (textIn(row, 'machine_id') as MachineId);
    },
    open: () =>
      history
        .sql('SELECT * FROM sessions WHERE ended_at IS NULL ORDER BY created_at, rowid')
        .all()
        .map(fromRow),
    attach: (client) => void history.sql(attach).run(...clientColumns.map((name) => client[name])),
    detach: (clientId) => void history.sql('DELETE FROM session_clients WHERE client_id = ?').run(clientId),
    // The columns are those that attach() wrote.
    attached: () =>
      history
        .sql('SELECT * FROM session_clients ORDER BY rowid')
        .all()
        .map((row) => row as unknown as Attached),
  };
}

/** A row back as a session; the columns are those that put() wrote. */
export function fromRow(row: Row): Session {
  return { ...(row as unknown as Session), ending: row.ending === 1 };
}
