// state.json on disk, as lowdb's adapter: durable before it resolves, refused when it is not what we wrote.
import { existsSync } from 'node:fs';
import { link, readFile, rename, rm } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import type { Adapter } from 'lowdb';
import { z } from 'zod';
import { syncDirectory, writeDurably } from '../../shared/durable-file.ts';
import { errnoOf, StartError } from '../../shared/errors.ts';
import { type Documents, documents, version } from './documents.ts';

/** Writes one file atomically: old or new after any crash, private from its first byte, on disk when it resolves. */
export class DurableFile implements Adapter<Documents> {
  readonly #file: string;
  #mayHoldFailed = false;

  /** Whether a write that failed may have replaced the file. */
  get mayHoldFailed(): boolean {
    return this.#mayHoldFailed;
  }

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

  async write(data: Documents): Promise<void> {
    await this.revert();
    await writeDurably(this.#file, JSON.stringify(data), {
      beforeRename: async () => {
        await this.#keepLast();
        this.#mayHoldFailed = true;
      },
    });
    this.#mayHoldFailed = false;
  }

  /** Puts the generation before back if a write failed after its rename; to be called again when it throws. */
  async revert(): Promise<void> {
    if (!this.#mayHoldFailed) return;
    await linkOver(lastOf(this.#file), this.#file);
    await syncDirectory(dirname(this.#file));
    this.#mayHoldFailed = false;
  }

  /** The generation before stays beside the new one, under its own name for recovery. */
  async #keepLast(): Promise<void> {
    if (existsSync(this.#file)) await linkOver(this.#file, lastOf(this.#file));
  }
}

const lastOf = (file: string): string => `${file}.last`;

/** Gives a file a second name, which another one may have now. */
async function linkOver(from: string, to: string): Promise<void> {
  const beside = `${to}.new`;
  await rm(beside, { force: true });
  await link(from, beside);
  await rename(beside, to);
  // rename(2) does nothing where both names are of one file already.
  await rm(beside, { force: true });
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
