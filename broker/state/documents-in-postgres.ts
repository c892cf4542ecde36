// Stores the declared documents in PostgreSQL, one row per document. A change first reads the changes of other brokers,
// and commits its entries for the history in the same transaction.
import { randomBytes } from 'node:crypto';
import { z } from 'zod';
import { AppError, StartError } from '../../shared/errors.ts';
import {
  type Connection,
  type History,
  type HistoryTransaction,
  jsonIn,
  type Row,
  type RowReader,
  textIn,
} from '../history/history-database.ts';
import {
  type Declared,
  type Documents,
  documents,
  mapsOf,
  names,
  newDocuments,
  version,
} from './state-documents-schema.ts';
import type { Edited, StateStore, Version } from './store-interface.ts';

/**
 * The database lists removed documents, but only those of recent generations (commits). A broker that has missed more
 * than this number of generations does not use the list, but reads all documents again.
 */
export const knownGenerations = 10_000;

export class PostgresStore implements StateStore {
  readonly isUndone = true;
  readonly documents: Documents;
  readonly #history: History;

  private constructor(history: History, stored: Documents) {
    this.#history = history;
    this.documents = stored;
  }

  /** Reads the documents. In an empty database, creates a new installation. Throws StartError. */
  static async open(history: History): Promise<PostgresStore> {
    const installation = await history.get('SELECT id, generation FROM installation');
    if (installation) {
      const rows = await history.all(readingDocuments);
      const stored = parse(textIn(installation, 'id'), Number(installation.generation), rows);
      return new PostgresStore(history, stored);
    }
    const fresh = newDocuments(randomBytes(16).toString('hex'));
    await history.write((transaction) =>
      transaction.run('INSERT INTO installation (id, generation) VALUES (?, ?)', fresh.install_id, 1),
    );
    return new PostgresStore(history, fresh);
  }

  get connection(): Connection {
    return this.#history.connection;
  }

  /** Other brokers that change documents wait until this change is committed. */
  async change(current: Version, edit: (newest: Declared) => Edited): Promise<Version> {
    let result = current;
    await this.#history.write(async (transaction) => {
      const { disconnects } = this.connection;
      const row = await transaction.get('SELECT generation FROM installation FOR UPDATE');
      const newest = await this.#newest(
        current,
        { generation: Number(row?.generation), disconnects },
        transaction,
      );
      const { next, entries } = edit(newest.declared);
      result = newest;
      if (next === newest.declared && entries.length === 0) return;
      const generation = newest.generation + 1;
      result = { declared: next, generation, disconnects };
      transaction.run('UPDATE installation SET generation = ?', generation);
      write(newest.declared, next, generation, transaction);
      for (const entry of entries) transaction.append(entry);
    });
    return result;
  }

  /**
   * Reads the changes of other brokers. Does not wait for writes of this broker, which may take long. So this broker
   * soon refuses a key that another broker has revoked.
   */
  async refresh(current: Version): Promise<Version> {
    const { committed, connection } = this.#history;
    const { disconnects } = connection;
    const row = await committed.get('SELECT generation FROM installation');
    // The generation is read before the documents, so #newest() may also return documents of later generations. The
    // next refresh then reads them a second time, which does no harm.
    return await this.#newest(current, { generation: Number(row?.generation), disconnects }, committed);
  }

  /** Returns the documents, including the changes that other brokers have made since `current` was read. */
  async #newest(
    current: Version,
    reached: Pick<Version, 'generation' | 'disconnects'>,
    reader: RowReader,
  ): Promise<Version> {
    const { declared, generation } = current;
    // If the connection was lost, the database may now be a copy that lacks commits that this broker has read.
    const wasLost = reached.disconnects !== current.disconnects;
    if (wasLost || reached.generation - generation > knownGenerations) {
      const rows = await reader.all(readingDocuments);
      const found = parse(this.documents.install_id, reached.generation, rows);
      return { declared: mapsOf(found), ...reached };
    }
    if (reached.generation === generation) return current;
    const changed = await reader.all(
      'SELECT collection, document FROM documents WHERE generation > ? ORDER BY position',
      generation,
    );
    const removed = await reader.all(
      'SELECT collection, id FROM removed_documents WHERE generation > ?',
      generation,
    );
    const found = parse(this.documents.install_id, generation, changed);
    const next = names.map((name) => {
      const gone = removed.filter(({ collection }) => collection === name).map((row) => textIn(row, 'id'));
      if (found[name].length + gone.length === 0) return [name, declared[name]];
      const all = new Map<string, object>(declared[name]);
      for (const document of found[name]) all.set(document.id, document);
      // A document may be removed after the first of these two reads, and is then in both results. So removals are
      // applied last. A removed id never comes back, because no id is used twice.
      for (const id of gone) all.delete(id);
      return [name, all];
    });
    // The cast is safe: the name of a collection decides the type of its documents.
    return { declared: Object.fromEntries(next) as Declared, ...reached };
  }

  /** Does nothing, because a commit in PostgreSQL already includes the entries for the history. */
  async finish(): Promise<void> {}

  async drainTo(): Promise<void> {}

  bytes(): never {
    throw new AppError(
      'not_supported',
      'the state of this broker is in PostgreSQL: make a backup with pg_dump',
    );
  }

  async close(): Promise<void> {}
}

/** Stores the differences between `before` and `next`. */
function write(before: Declared, next: Declared, generation: number, transaction: HistoryTransaction): void {
  for (const collection of names) {
    if (before[collection] === next[collection]) continue;
    for (const [id, document] of next[collection]) {
      if (before[collection].get(id) === document) continue;
      const row = { collection, id, document: JSON.stringify(document), generation };
      transaction.put('documents', 'collection, id', row);
    }
    for (const id of before[collection].keys()) {
      if (next[collection].has(id)) continue;
      transaction.run('DELETE FROM documents WHERE collection = ? AND id = ?', collection, id);
      transaction.put('removed_documents', 'collection, id', { collection, id, generation });
    }
  }
}

const readingDocuments = 'SELECT collection, document FROM documents ORDER BY position';

function parse(install_id: string, generation: number, rows: readonly Row[]): Documents {
  const all = names.map((name) => [
    name,
    rows.filter(({ collection }) => collection === name).map((row) => jsonIn(row, 'document')),
  ]);
  const found = documents.safeParse({
    ...{ version, install_id, generation, outbox: [] },
    ...Object.fromEntries(all),
  });
  if (found.success) return found.data;
  throw new StartError(
    `the database table "documents" does not contain a broker's state (${z.prettifyError(found.error)})`,
  );
}
