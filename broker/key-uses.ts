// When and from where each key was used last: an observation that holds nobody up.
import type { KeyId } from '../shared/api/route.ts';
import { monotonic, now } from '../shared/clock.ts';
import { type History, textIn } from './history.ts';

export interface Use {
  /** Milliseconds. */
  at: number;
  ip: string;
}

export interface KeyUses {
  note(id: KeyId, ip: string): void;
  lastOf(id: string): Use | undefined;
  forget(id: KeyId): void;
}

const tables = [
  'CREATE TABLE key_uses (key_id TEXT PRIMARY KEY, last_used_at INTEGER NOT NULL, ip TEXT NOT NULL) WITHOUT ROWID',
];

/** Written no more often than this for each key. */
const betweenMs = 60_000;

/** Opens what is known of these keys; of others nothing is kept. */
export function openKeyUses(history: History, keys: ReadonlyMap<string, unknown>): KeyUses {
  history.migrate('keys', tables);
  const known = 'DELETE FROM key_uses WHERE key_id NOT IN (SELECT value FROM json_each(?))';
  history.sql(known).run(JSON.stringify([...keys.keys()]));
  const uses = new Map<string, Use & { written: number }>();
  for (const row of history.sql('SELECT * FROM key_uses').all()) {
    const use = { at: Number(row.last_used_at), ip: textIn(row, 'ip') };
    uses.set(textIn(row, 'key_id'), { ...use, written: Number.NEGATIVE_INFINITY });
  }

  function write(id: KeyId, { at, ip }: Use): void {
    history
      .write(() => history.sql('INSERT OR REPLACE INTO key_uses VALUES (?, ?, ?)').run(id, at, ip))
      // A full disk tells of itself; the next minute tries again.
      .catch(() => {});
  }

  return {
    note(id, ip) {
      const { written = Number.NEGATIVE_INFINITY } = uses.get(id) ?? {};
      const due = monotonic() - written >= betweenMs;
      const use = { at: now(), ip, written: due ? monotonic() : written };
      uses.set(id, use);
      if (due) write(id, use);
    },
    lastOf: (id) => uses.get(id),
    forget(id) {
      uses.delete(id);
      history
        .write(() => history.sql('DELETE FROM key_uses WHERE key_id = ?').run(id))
        // The next start does it.
        .catch(() => {});
    },
  };
}
