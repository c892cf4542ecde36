// state.json on disk, as lowdb's adapter: durable before it resolves, refused when it is not what we wrote.
import { randomBytes } from 'node:crypto';
import { existsSync } from 'node:fs';
import { link, open, readFile, rename, rm } from 'node:fs/promises';
import { join } from 'node:path';
import type { Adapter } from 'lowdb';
import { z } from 'zod';
import { errnoOf, StartError } from '../../shared/errors.ts';
import { type Documents, documents, version } from './documents.ts';

/** Writes one file atomically: old or new after any crash, private from its first byte, on disk when it resolves. */
export class DurableFile implements Adapter<Documents> {
  readonly #directory: string;
  readonly #file: string;

  constructor(directory: string) {
    this.#directory = directory;
    this.#file = join(directory, 'state.json');
  }

  async read(): Promise<Documents | null> {
    const text = await readFile(this.#file, 'utf8').catch((error: unknown) => {
      if (errnoOf(error) === 'ENOENT') return null;
      throw error;
    });
    return text === null ? null : parse(text, this.#file);
  }

  async write(data: Documents): Promise<void> {
    const temporary = join(this.#directory, `.state-${randomBytes(8).toString('hex')}`);
    try {
      await this.#fill(temporary, JSON.stringify(data));
      await this.#keepLast();
      await rename(temporary, this.#file);
      await this.#syncDirectory();
    } catch (error) {
      await rm(temporary, { force: true });
      throw error;
    }
  }

  async #fill(path: string, text: string): Promise<void> {
    const handle = await open(path, 'wx', 0o600);
    try {
      await handle.writeFile(text);
      await handle.sync();
    } finally {
      await handle.close();
    }
  }

  /** The generation before stays beside the new one, under its own name for recovery. */
  async #keepLast(): Promise<void> {
    if (!existsSync(this.#file)) return;
    const beside = `${this.#file}.last.new`;
    await rm(beside, { force: true });
    await link(this.#file, beside);
    await rename(beside, `${this.#file}.last`);
  }

  async #syncDirectory(): Promise<void> {
    const handle = await open(this.#directory, 'r');
    try {
      await handle.sync();
    } finally {
      await handle.close();
    }
  }
}

function parse(text: string, file: string): Documents {
  const recovery = `to go back one generation: mv ${file} ${file}.broken && cp -p ${file}.last ${file}`;
  let json: unknown;
  try {
    json = JSON.parse(text);
  } catch (error) {
    throw new StartError(`${file} is ${text ? 'damaged' : 'empty'}; ${recovery}`, 78, { cause: error });
  }
  if (isNewer(json))
    throw new StartError(`${file} was written by a newer farhand-broker: install that version again`);
  const result = documents.safeParse(json);
  if (result.success) return result.data;
  throw new StartError(
    `${file} does not hold a broker's state (${z.prettifyError(result.error)}); ${recovery}`,
  );
}

function isNewer(json: unknown): boolean {
  const found = z.looseObject({ version: z.number() }).safeParse(json);
  return found.success && found.data.version > version;
}
