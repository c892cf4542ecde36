// Does each step of a command by itself, at the least cost, so that the bench of commands can measure the step.
import { mkdirSync } from 'node:fs';
import { open } from 'node:fs/promises';
import { join } from 'node:path';
import { DatabaseSync } from 'node:sqlite';
import { Pool } from 'undici';
import type { Targets } from './ways-to-run-a-command.ts';

export interface Floors {
  /** Sends the cheapest request that needs a key. */
  http(): Promise<void>;
  /** Sends a request that needs one short call to the agent. */
  call(): Promise<void>;
  /** Writes a row to the disk, as the broker writes to history.db. */
  row(): Promise<void>;
  /** Writes a line to the disk, as the agent writes to its journal. */
  line(): Promise<void>;
  close(): Promise<void>;
}

/** A text about as long as the stored record of the command `true`. */
const rowText = 'x'.repeat(400);
const lineText = `${'x'.repeat(80)}\n`;

/**
 * Creates a function for each step of a command. `folder` must be on the disk that has the data of broker and agent.
 */
export async function createFloors(folder: string, { http, key, machine }: Targets): Promise<Floors> {
  const place = join(folder, 'floors');
  mkdirSync(place);
  const pool = new Pool(http, { connections: 1 });
  const headers = { authorization: `Bearer ${key}` };
  const get = async (path: string): Promise<void> => {
    const { statusCode, body } = await pool.request({ method: 'GET', path: `/api/v1${path}`, headers });
    await body.dump();
    if (statusCode !== 200) throw new Error(`${path} answered ${statusCode}`);
  };
  const database = new DatabaseSync(join(place, 'rows.db'));
  database.exec('PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; CREATE TABLE rows (text TEXT)');
  const insert = database.prepare('INSERT INTO rows VALUES (?)');
  const file = await open(join(place, 'lines'), 'a');
  return {
    http: () => get('/auth/me'),
    call: () => get(`/machines/${machine}/files/stat?path=${encodeURIComponent(place)}`),
    row: async () => void insert.run(rowText),
    async line() {
      await file.appendFile(lineText);
      await file.datasync();
    },
    async close() {
      await pool.close();
      database.close();
      await file.close();
    },
  };
}
