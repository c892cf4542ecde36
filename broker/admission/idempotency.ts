// Idempotency-Key: a repeat of a POST gets the first answer, also after a restart of the broker.
import { createHash } from 'node:crypto';
import type { Journal } from '../../shared/api/index.ts';
import { now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import type { Entry, History } from '../history.ts';

interface MadeEntry extends Entry {
  kind: 'idempotency';
  owner: string;
  key: string;
  resource_id: string;
}

/** One keyed request under way. */
export interface Attempt {
  /** Ties the key to what the request makes, in the commit that makes it. */
  made(journal: Journal, id: string): void;
  /** Keeps the answer for repeats. */
  answered(data: unknown): Promise<void>;
  /** Nothing to keep: where nothing was made, the key is free again. */
  released(): Promise<void>;
}

/** What a repeat finds: an answer to give again, with the id of what was made, if anything was; or that id alone. */
export type Outcome = { attempt: Attempt } | { answer: unknown; madeId: string | null } | { madeId: string };

export interface Idempotency {
  /** Begins a keyed request. Throws conflict while the first is under way, idempotency_mismatch for another body. */
  begin(
    owner: string,
    key: string,
    request: { method: string; path: string; body: unknown },
  ): Promise<Outcome>;
}

const keepMs = 24 * 3_600_000;

const tables = [
  `CREATE TABLE idempotency (
    id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, key TEXT NOT NULL, fingerprint TEXT NOT NULL,
    created_at INTEGER NOT NULL, resource_id TEXT, answer TEXT, PRIMARY KEY (owner, key)
  );
  CREATE INDEX idempotency_by_time ON idempotency (created_at)`,
];

const form = /^[\x21-\x7e]{1,255}$/;

export function openIdempotency(history: History): Idempotency {
  history.migrate('idempotency', tables);
  history.retain({ table: 'idempotency', column: 'created_at', keepMs });
  history.onEntry('idempotency', ({ owner, key, resource_id }: MadeEntry) => {
    history
      .sql('UPDATE idempotency SET resource_id = ? WHERE owner = ? AND key = ?')
      .run(resource_id, owner, key);
  });
  const underWay = new Set<string>();

  function attempt(owner: string, key: string, id: string): Attempt {
    return {
      made(journal, resource_id) {
        const entry: MadeEntry = { kind: 'idempotency', owner, key, resource_id };
        journal.append(entry);
      },
      async answered(data) {
        underWay.delete(id);
        await history.write(() => {
          history.sql('UPDATE idempotency SET answer = ? WHERE id = ?').run(JSON.stringify(data), id);
        });
      },
      async released() {
        underWay.delete(id);
        await history.write(() => {
          history.sql('DELETE FROM idempotency WHERE id = ? AND resource_id IS NULL').run(id);
        });
      },
    };
  }

  return {
    async begin(owner, key, request) {
      if (!form.test(key))
        throw new AppError('invalid_request', 'Idempotency-Key must be 1 to 255 visible ASCII characters');
      const fingerprint = createHash('sha256').update(JSON.stringify(request)).digest('hex');
      const id = createHash('sha256').update(`${owner}\n${key}`).digest('hex');
      const begun = history.write((): Outcome => {
        const row = history
          .sql('SELECT * FROM idempotency WHERE id = ? AND created_at > ?')
          .get(id, now() - keepMs);
        if (row && row.fingerprint !== fingerprint) {
          throw new AppError('idempotency_mismatch', 'this Idempotency-Key was used for another request');
        }
        if (row && underWay.has(id))
          throw new AppError('conflict', 'the first request with this Idempotency-Key is still under way', {
            under_way: true,
          });
        const madeId = row?.resource_id ? String(row.resource_id) : null;
        if (row?.answer) return { answer: JSON.parse(String(row.answer)), madeId };
        if (madeId !== null) return { madeId };
        // A row without either is a request that a crash cut off before it made anything.
        history
          .sql(
            'INSERT OR REPLACE INTO idempotency (id, owner, key, fingerprint, created_at) VALUES (?, ?, ?, ?, ?)',
          )
          .run(id, owner, key, fingerprint, now());
        underWay.add(id);
        return { attempt: attempt(owner, key, id) };
      });
      return begun.catch((error: unknown) => {
        // The row was not written: nothing is under way.
        if (!(error instanceof AppError)) underWay.delete(id);
        throw error;
      });
    },
  };
}
