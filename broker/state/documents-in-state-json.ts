// Stores the declared documents in state.json, with an outbox of entries that still have to be written to the
// history.
import { randomBytes } from 'node:crypto';
import { existsSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { Low } from 'lowdb';
import { removeLeftovers } from '../../shared/durable-file.ts';
import { StartError } from '../../shared/errors.ts';
import { fileConnection } from '../history/database-interface.ts';
import type { OutboxEntry } from '../history/history-database.ts';
import { type Declared, type Documents, names, newDocuments } from './state-documents-schema.ts';
import { commandBack, StateFile } from './state-file.ts';
import type { Apply, Edited, StateStore, Version } from './store-interface.ts';

/** Files that a broker creates. If one of them exists without state.json, then state.json was lost. */
const traces = ['state.json.last', 'history.db', 'authority.json'];

export class FileStore implements StateStore {
  readonly connection = fileConnection;
  readonly #file: StateFile;
  readonly #low: Low<Documents>;
  #apply: Apply | undefined;
  /** Number of entries at the start of the outbox that the history already contains. The next write drops them. */
  #applied = 0;

  private constructor(file: StateFile, data: Documents) {
    this.#file = file;
    this.#low = new Low(file, data);
  }

  /**
   * Reads the file. Creates it if no broker has run here before. Throws StartError, as openState() describes.
   */
  static async open(directory: string, acceptEdit: boolean): Promise<FileStore> {
    await removeLeftovers(join(directory, 'state.json'));
    const file = new StateFile(directory, acceptEdit);
    const found = await file.read();
    if (found) return new FileStore(file, found);
    assertFresh(directory);
    const data = newDocuments(randomBytes(16).toString('hex'));
    await file.write(data);
    return new FileStore(file, data);
  }

  get documents(): Documents {
    return this.#low.data;
  }

  get isUndone(): boolean {
    return !this.#file.mayHoldFailed;
  }

  async change({ declared }: Version, edit: (newest: Declared) => Edited): Promise<Version> {
    const { next, entries } = edit(declared);
    if (next !== declared || entries.length > 0) await this.#write(next, entries);
    return { declared: next, generation: this.documents.generation, disconnects: 0 };
  }

  /** No other broker can change the file, so `current` is up to date. */
  async refresh(current: Version): Promise<Version> {
    return current;
  }

  async #write(next: Declared, entries: readonly OutboxEntry[]): Promise<void> {
    const before = this.#low.data;
    this.#low.data = {
      ...before,
      generation: before.generation + 1,
      ...Object.fromEntries(names.map((name) => [name, [...next[name].values()]])),
      outbox: [...before.outbox.slice(this.#applied), ...entries],
    };
    try {
      await this.#low.write();
    } catch (error) {
      this.#low.data = before;
      throw error;
    }
    this.#applied = 0;
  }

  async finish(): Promise<void> {
    await this.#file.revert();
    const { outbox } = this.#low.data;
    if (!this.#apply || this.#applied === outbox.length) return;
    await this.#apply(outbox);
    this.#applied = outbox.length;
  }

  async drainTo(apply: Apply): Promise<void> {
    this.#apply = apply;
    await this.finish();
  }

  bytes(): Buffer {
    return this.#file.toBytes(this.#low.data);
  }

  async close(): Promise<void> {
    await this.#file.revert().catch(() => {});
  }
}

function assertFresh(directory: string): void {
  const trace = traces.find((name) => existsSync(join(directory, name)));
  if (!trace) return;
  const file = join(directory, 'state.json');
  const moved = readdirSync(directory).find((name) => name.startsWith('before-migration-'));
  const fromBackup = `put state.json from a backup into ${directory}`;
  const how = moved
    ? `if the data was moved to a database (${moved} has the former files), set --database-url; otherwise ${fromBackup}`
    : fromBackup;
  throw new StartError(
    `${file} is missing, but a broker has run here (${trace} exists); to recover: ${commandBack(file) ?? how}`,
  );
}
