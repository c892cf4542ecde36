// state.json on disk, as lowdb's adapter: durable before it resolves, refused when it is not what we wrote.
import { existsSync } from 'node:fs';
import { link, readFile, rename, rm } from 'node:fs/promises';
import { join } from 'node:path';
import type { Adapter } from 'lowdb';
import { z } from 'zod';
import { writeDurably } from '../../shared/durable-file.ts';
import { errnoOf, StartError } from '../../shared/errors.ts';
import { type Documents, documents, version } from './documents.ts';

/** Writes one file atomically: old or new after any crash, private from its first byte, on disk when it resolves. */
export class DurableFile implements Adapter<Documents> {
  readonly #file: string;

  constructor(directory: string) {
    this.#file = join(directory, 'state.json');
  }

  async read(): Promise<Documents | null> {
    const text = await readFile(this.#file, 'utf8').catch((error: unknown) => {
      if (errnoOf(error) === 'ENOENT') return null;
      throw error;
    });
    return text === null ? null : parse(text, this.#file);
  }

  write(data: Documents): Promise<void> {
    return writeDurably(this.#file, JSON.stringify(data), { beforeRename: () => this.#keepLast() });
  }

  /** The generation before stays beside the new one, under its own name for recovery. */
  async #keepLast(): Promise<void> {
    if (!existsSync(this.#file)) return;
    const beside = `${this.#file}.last.new`;
    await rm(beside, { force: true });
    await link(this.#file, beside);
    await rename(beside, `${this.#file}.last`);
  }
}

function parse(text: string, file: string): Documents {
  const recovery = recoveryOf(file);
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

function recoveryOf(file: string): string {
  if (!existsSync(`${file}.last`)) return 'put it back from a backup';
  const [broken, last] = [quoted(`${file}.broken`), quoted(`${file}.last`)];
  return `to go back one generation: mv ${quoted(file)} ${broken} && cp -p ${last} ${quoted(file)}`;
}

/** A path as a word of the shell. */
export function quoted(path: string): string {
  return /^[\w@%+=:,./-]+$/.test(path) ? path : `'${path.replaceAll("'", "'\\''")}'`;
}

function isNewer(json: unknown): boolean {
  const found = z.looseObject({ version: z.number() }).safeParse(json);
  return found.success && found.data.version > version;
}
