// The audit log: who did what and when. If a request changes the broker's data, its entry is committed in the same
// transaction. Entries are never changed later, and never contain keystrokes or secrets.
import { type Deed, audit as routes } from '../shared/api/audit.ts';
import type { Caller, Handlers, Journal } from '../shared/api/route-table.ts';
import type { MachineId } from '../shared/api/shared-schemas.ts';
import { iso, now } from '../shared/clock.ts';
import { newTimedId, timeOf } from '../shared/ids-and-secrets.ts';
import { type History, jsonIn, type OutboxEntry, type Row, textIn } from './history/history-database.ts';
import { type CountedTable, createCounts, sequencesPerMs } from './history/row-counts.ts';
import { OrderedTable } from './history/time-ordered-table.ts';
import type { Condition } from './list-pages-and-filters.ts';

interface AuditEntry extends OutboxEntry {
  kind: 'audit';
  id: string;
  created_at: number;
  deed: Deed;
}

const counted: CountedTable = {
  ...{ table: 'audit', time: 'created_at', number: 'seq' },
  columns: ['action', 'key_id', 'key_name'],
};
// The table has few indexes, because each index makes every audited request (such as the start of a command) write one
// more database page.
const tables = [
  `CREATE TABLE audit (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL, created_at INTEGER NOT NULL, key_id TEXT NOT NULL,
    key_name TEXT NOT NULL, action TEXT NOT NULL, machine_id TEXT, what TEXT NOT NULL, request_id TEXT NOT NULL,
    result TEXT NOT NULL, address TEXT NOT NULL, UNIQUE (request_id, id)
  );
  CREATE INDEX audit_by_key ON audit (key_id);
  CREATE INDEX audit_by_machine ON audit (machine_id)`,
  `CREATE INDEX audit_by_action ON audit (action); CREATE INDEX audit_by_key_name ON audit (key_name)`,
  'ALTER TABLE audit ADD COLUMN login_id TEXT',
  // The new index by machine also has the columns by which GET /audit filters. So the entries of one machine can be
  // filtered by the index alone.
  `DROP INDEX audit_by_machine;
  CREATE INDEX audit_by_machine ON audit (machine_id, seq, created_at, action, key_id, key_name);
  CREATE INDEX audit_by_login ON audit (login_id) WHERE login_id IS NOT NULL;
  ${createCounts(counted)}`,
];

/** Opens the audit log. Deletes rows older than `keepMs` milliseconds, and the oldest rows beyond `keepRows`. */
export async function createAudit(history: History, keepMs: number, keepRows?: number) {
  const findBy = ['request_id', 'login_id', 'machine_id', 'action', 'key_id', 'key_name'];
  const table = await OrderedTable.open(history, counted, tables, { keepMs, keepRows, findBy });
  history.onEntry('audit', ({ id, created_at, deed }: AuditEntry, transaction) => {
    const { key_id, key_name, login_id = null, action, machine_id, what, request_id, result, address } = deed;
    const row = {
      id,
      created_at,
      key_id,
      key_name,
      action,
      machine_id,
      request_id,
      result,
      address,
      login_id,
    };
    // This catch does nothing: if add() fails, the transaction itself reports the error.
    table.add(transaction, created_at, { ...row, what: JSON.stringify(what) }).catch(() => {});
  });

  const list: Handlers['audit']['list'] = async (input, caller) => {
    const { id, action, key, key_id, login_id } = input;
    const conditions: Condition[] = [
      visibleTo(caller),
      action ? ['action = ?', action] : undefined,
      key ? ['key_id = ?', key] : undefined,
      key_id ? ['key_id = ?', key_id] : undefined,
      login_id ? ['login_id = ?', login_id] : undefined,
      id === undefined ? undefined : await numberIs(history, id),
    ];
    const { items, total } = await table.page(routes.list, conditions, input);
    return { items: items.map((row) => serialize(row, caller)), total };
  };
  return {
    handlers: { list },
    /**
     * Records an action in the transaction of its change. If the same request has already written a record with this
     * id, adds nothing.
     */
    record(journal: Journal, deed: Deed, id: string = newTimedId('audit', now())): void {
      const entry: AuditEntry = { kind: 'audit', id, created_at: now(), deed };
      journal.append(entry);
    },
  };
}

/** SQL condition for rows of machines that the key may use, and for the key's own rows without a machine. */
function visibleTo(caller: Caller): Condition {
  const reachable = caller.reachable();
  if (!reachable) return undefined;
  return [
    '(machine_id IN (SELECT value FROM json_each(?)) OR machine_id IS NULL AND key_id = ?)',
    JSON.stringify(reachable),
    caller.key_id,
  ];
}

function serialize({ seq: _, created_at, ...row }: Row, caller: Caller) {
  const what = jsonIn(row, 'what') as Deed['what'];
  return {
    // The cast is safe: the other columns are fields of a Deed. They are texts; machine_id and login_id may be null.
    ...(row as unknown as Omit<Deed, 'what' | 'login_id'> & { login_id: string | null }),
    id: textIn(row, 'id'),
    at: iso(Number(created_at)),
    what: reachesAll(what, caller) ? what : {},
  };
}

/** True if the caller may use all machines that a request named. */
function reachesAll({ machine_ids }: Deed['what'], caller: Caller): boolean {
  return !Array.isArray(machine_ids) || machine_ids.every((id: MachineId) => caller.reaches(id));
}

/**
 * Returns a SQL condition on the sequence number of the row with this id, so that the list finds the row fast. Returns
 * undefined if no row is found. The list then filters by the id alone.
 */
async function numberIs(history: History, id: string): Promise<Condition> {
  // An id contains the time of its row, and the search begins at that time. Ids from version 0.1.0 contain no time. For
  // them timeOf() usually returns a time in the future, and no search takes place.
  const at = timeOf(id);
  if (!(at <= now())) return undefined;
  // Ids have no index, because every command would have to write to that index. The search therefore uses `seq`, which
  // grows with time, and reads no rows that are older than the id.
  const sql = 'SELECT seq FROM audit WHERE seq >= ? AND id = ? ORDER BY seq LIMIT 1';
  const [[row] = []] = await history.read([{ sql, values: [at * sequencesPerMs, id] }]);
  return row && ['seq = ?', Number(row.seq)];
}
