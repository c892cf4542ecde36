// Records when and from where each key was last used. It writes in the background, so that no request waits.
import type { KeyId } from '../../shared/api/route.ts';
import { monotonic, now } from '../../shared/clock.ts';
import { type History, textIn } from '../history.ts';

interface Use {
  /** Milliseconds since 1970. */
  at: number;
  ip: string;
  /** Time of the last write on the monotonic clock; undefined before this process has written the use. */
  written_at?: number | undefined;
}

const tables = [
  'CREATE TABLE key_uses (key_id TEXT PRIMARY KEY, last_used_at INTEGER NOT NULL, ip TEXT NOT NULL) WITHOUT ROWID',
];

/** Shortest time between two writes for the same key. */
const betweenMs = 60_000;

export class KeyUsage {
  readonly #history: History;
  readonly #uses = new Map<string, Use>();

  /** Reads the last uses, and deletes those of keys that no longer exist. */
  constructor(history: History, keys: ReadonlyMap<string, unknown>) {
    this.#history = history;
    history.migrate('keys', tables);
    const others = 'DELETE FROM key_uses WHERE key_id NOT IN (SELECT value FROM json_each(?))';
    history.sql(others).run(JSON.stringify([...keys.keys()]));
    for (const row of history.sql('SELECT * FROM key_uses').all()) {
      this.#uses.set(textIn(row, 'key_id'), { at: Number(row.last_used_at), ip: textIn(row, 'ip') });
    }
  }

  note(id: KeyId, ip: string): void {
    const written_at = this.#uses.get(id)?.written_at;
    const use: Use = { at: now(), ip, written_at };
    this.#uses.set(id, use);
    if (written_at !== undefined && monotonic() - written_at < betweenMs) return;
    use.written_at = monotonic();
    this.#write('INSERT OR REPLACE INTO key_uses VALUES (?, ?, ?)', id, use.at, ip);
  }

  lastOf(id: string): Use | undefined {
    return this.#uses.get(id);
  }

  forget(id: KeyId): void {
    this.#uses.delete(id);
    this.#write('DELETE FROM key_uses WHERE key_id = ?', id);
  }

  #write(sql: string, ...values: (string | number)[]): void {
    this.#history
      .write(() => this.#history.sql(sql).run(...values))
      // History logs a failed write. The next use of the key after a minute or a restart is written again.
      .catch(() => {});
  }
}
