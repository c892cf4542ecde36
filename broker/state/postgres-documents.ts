// Stores the declared documents in PostgreSQL, a row each. They are committed in one transaction with their
// entries for the history.
import { randomBytes } from 'node:crypto';
import { z } from 'zod';
import { AppError, StartError } from '../../shared/errors.ts';
import { type History, jsonIn, type OutboxEntry, textIn } from '../history/history.ts';
import { type Declared, type Documents, documents, names, newDocuments } from './document-types.ts';
import type { StateStore } from './store-interface.ts';

export class PostgresStore implements StateStore {
  readonly isUndone = true;
  readonly #history: History;
  #documents: Documents;

  private constructor(history: History, stored: Documents) {
    this.#history = history;
    this.#documents = stored;
  }

  /** Reads the documents. In a database without an installation, a new one is created. Throws StartError. */
  static async open(history: History): Promise<PostgresStore> {
    const installation = await history.get('SELECT id, generation FROM installation');
    if (installation) return new PostgresStore(history, await read(history, textIn(installation, 'id')));
    const fresh = newDocuments(randomBytes(16).toString('hex'));
    await history.write((transaction) =>
      transaction.run('INSERT INTO installation (id, generation) VALUES (?, ?)', fresh.install_id, 1),
    );
    return new PostgresStore(history, fresh);
  }

  get documents(): Documents {
    return this.#documents;
  }

  async write(before: Declared, next: Declared, entries: readonly OutboxEntry[]): Promise<void> {
    const { generation } = this.#documents;
    await this.#history.write(async (transaction) => {
      const counted = await transaction.get(
        'UPDATE installation SET generation = ?1 + 1 WHERE generation = ?1 RETURNING generation',
        generation,
      );
      if (!counted)
        throw new AppError('unavailable', 'another broker has changed the database; start this one again');
      for (const name of names) {
        if (before[name] === next[name]) continue;
        for (const [id, document] of next[name]) {
          if (before[name].get(id) === document) continue;
          const row = { collection: name, id, document: JSON.stringify(document) };
          transaction.put('documents', 'collection, id', row);
        }
        const remove = 'DELETE FROM documents WHERE collection = ? AND id = ?';
        for (const id of before[name].keys()) if (!next[name].has(id)) transaction.run(remove, name, id);
      }
      for (const entry of entries) transaction.append(entry);
    });
    this.#documents = { ...this.#documents, generation: generation + 1 };
  }

  /** Nothing is left to do after a commit. */
  async finish(): Promise<void> {}

  async drainTo(): Promise<void> {}

  bytes(): never {
    throw new AppError(
      'not_supported',
      'the documents of this broker are in PostgreSQL: make a backup with pg_dump',
    );
  }

  async close(): Promise<void> {}
}

async function read(history: History, install_id: string): Promise<Documents> {
  const [installation] = await history.all('SELECT generation FROM installation');
  const rows = await history.all('SELECT collection, document FROM documents ORDER BY position');
  const all = names.map((name) => [
    name,
    rows.filter(({ collection }) => collection === name).map((row) => jsonIn(row, 'document')),
  ]);
  const found = documents.safeParse({
    ...newDocuments(install_id),
    ...Object.fromEntries(all),
    generation: Number(installation?.generation),
  });
  if (found.success) return found.data;
  throw new StartError(
    `the table documents does not contain a broker's state (${z.prettifyError(found.error)})`,
  );
}
