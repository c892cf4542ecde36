// Who did what and when, never with which keys or words: rows that are only ever added, with the change they tell of.
import type { Deed } from '../shared/api/audit.ts';
import type { Handlers, Journal } from '../shared/api/index.ts';
import { iso, now } from '../shared/clock.ts';
import { newId } from '../shared/ids.ts';
import { type Entry, type History, jsonIn, type Row, textIn } from './history.ts';
import { pageOfRows, reachableOnly } from './paging.ts';

export interface Audit {
  handlers: Handlers['audit'];
  /** Records a deed with the transaction, or outbox, that it is about. */
  record(journal: Journal, deed: Deed): void;
}

interface AuditEntry extends Entry {
  kind: 'audit';
  id: string;
  created_at: number;
  deed: Deed;
}

const tables = [
  `CREATE TABLE audit (
    id TEXT NOT NULL UNIQUE, created_at INTEGER NOT NULL, key_id TEXT NOT NULL, key_name TEXT NOT NULL,
    action TEXT NOT NULL, machine_id TEXT, what TEXT NOT NULL, request_id TEXT NOT NULL, result TEXT NOT NULL
  );
  CREATE INDEX audit_by_time ON audit (created_at);
  CREATE INDEX audit_by_key ON audit (key_id, created_at);
  CREATE INDEX audit_by_machine ON audit (machine_id, created_at)`,
];

/** Opens the record; what is older than `keepMs` goes. */
export function openAudit(history: History, keepMs: number): Audit {
  history.migrate('audit', tables);
  history.retain({ table: 'audit', column: 'created_at', keepMs });
  history.onEntry('audit', ({ id, created_at, deed }: AuditEntry) => {
    const { key_id, key_name, action, machine_id, what, request_id, result } = deed;
    history
      .sql('INSERT OR IGNORE INTO audit VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)')
      .run(id, created_at, key_id, key_name, action, machine_id, JSON.stringify(what), request_id, result);
  });

  return {
    record(journal, deed) {
      const entry: AuditEntry = { kind: 'audit', id: newId('audit'), created_at: now(), deed };
      journal.append(entry);
    },
    handlers: {
      list(input, caller) {
        const page = pageOfRows(
          history,
          { table: 'audit', columns: '*' },
          [
            reachableOnly(caller.reachable()),
            input.action ? ['action = ?', input.action] : undefined,
            input.key ? ['key_id = ?', input.key] : undefined,
            input.machine_id && ['machine_id = ?', input.machine_id],
            input.since && ['created_at >= ?', input.since.getTime()],
          ],
          input,
          // Several may happen in one millisecond.
          'rowid',
        );
        return { items: page.items.map(shown), total: page.total };
      },
    },
  };
}

function shown({ created_at, ...row }: Row) {
  return {
    // The columns are those of a deed, all of them texts.
    ...(row as unknown as Omit<Deed, 'what'>),
    id: textIn(row, 'id'),
    at: iso(Number(created_at)),
    what: jsonIn(row, 'what') as Deed['what'],
  };
}
