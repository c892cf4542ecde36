// An adapter of lowdb that reads state.json and writes it durably. Its error messages contain the commands for
// recovery.
import { existsSync, readFileSync } from 'node:fs';
import { link, readFile, rename, rm } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import type { Adapter } from 'lowdb';
import { z } from 'zod';
import { syncDirectory, writeDurably } from '../../shared/durable-file.ts';
import { StartError } from '../../shared/errors.ts';
import { quoteForShell } from '../../shared/quote-for-shell.ts';
import { checksumOf, StateJson } from './serialize-state.ts';
import { type Documents, documents, version } from './state-documents-schema.ts';

/** Reads and writes state.json, with mode 0600. A write is atomic even in a crash, and is on disk when it resolves. */
export class StateFile implements Adapter<Documents> {
  /** True if a failed write may have replaced the file. */
  mayHoldFailed = false;
  readonly #file: string;
  readonly #acceptEdit: boolean;
  readonly #json = new StateJson();

  /** If `acceptEdit` is true, a missing or wrong checksum is accepted. An edit by hand leaves the checksum wrong. */
  constructor(directory: string, acceptEdit: boolean) {
    this.#file = join(directory, 'state.json');
    this.#acceptEdit = acceptEdit;
  }

  /**
   * Reads the documents; null if the file does not exist. Throws StartError if the file is damaged, or was edited by
   * hand without `acceptEdit`. If the checksum of an accepted file is missing or wrong, writes the file again with the
   * right one.
   */
  async read(): Promise<Documents | null> {
    if (!existsSync(this.#file)) return null;
    const bytes = await readFile(this.#file);
    const data = { ...parse(bytes, this.#file, this.#acceptEdit), version } as const;
    if (checksumOf(bytes) === 'right') return data;
    await this.write(data);
    // Each write saves the previous file as state.json.last, so this second write gives state.json.last a checksum too.
    // From then on, parse() refuses a state.json without a checksum (see mustHaveOne()).
    await this.write(data);
    return data;
  }

  toBytes(data: Documents): Buffer {
    return this.#json.toBytes(data);
  }

  async write(data: Documents): Promise<void> {
    await this.revert();
    await writeDurably(this.#file, this.toBytes(data), {
      beforeRename: async () => {
        // The previous file becomes state.json.last, for recovery.
        if (existsSync(this.#file)) await linkOver(this.#file, lastOf(this.#file));
        this.mayHoldFailed = true;
      },
    });
    this.mayHoldFailed = false;
  }

  /**
   * If a failed write may have replaced state.json, puts state.json.last back in its place. If revert() throws, it must
   * be called again.
   */
  async revert(): Promise<void> {
    if (!this.mayHoldFailed) return;
    await linkOver(lastOf(this.#file), this.#file);
    await syncDirectory(dirname(this.#file));
    this.mayHoldFailed = false;
  }
}

const lastOf = (file: string): string => `${file}.last`;

/** Makes `to` a second name (hard link) of the file `from`. An existing file `to` is replaced. */
async function linkOver(from: string, to: string): Promise<void> {
  const beside = `${to}.new`;
  await rm(beside, { force: true });
  await link(from, beside);
  await rename(beside, to);
  // rename(2) does nothing if both names already belong to the same file, so the temporary name is removed here.
  await rm(beside, { force: true });
}

function parse(bytes: Buffer, file: string, acceptEdit: boolean): Documents {
  const checksum = acceptEdit ? 'right' : checksumOf(bytes);
  if (checksum === 'wrong') throw unchecked('a wrong', file);
  const json = jsonIn(bytes, file);
  if (isNewer(json))
    throw new StartError(`${file} was written by a newer farhand-broker: install the newer version again`);
  const result = documents.safeParse(json);
  if (!result.success) {
    const problem = `does not contain a broker's state (${z.prettifyError(result.error)})`;
    throw new StartError(`${file} ${problem}; ${recoveryOf(file)}`);
  }
  if (checksum === 'missing' && mustHaveOne(result.data, file)) throw unchecked('no', file);
  return result.data;
}

function jsonIn(bytes: Buffer, file: string): unknown {
  try {
    return JSON.parse(bytes.toString());
  } catch (cause) {
    // The message of JSON.parse() contains the line and column of the error, or the text around it.
    const where = cause instanceof SyntaxError ? cause.message.replace(/\s+/g, ' ') : '';
    const damage = bytes.length > 0 ? `damaged: ${where}` : 'empty';
    throw new StartError(`${file} is ${damage}; ${recoveryOf(file)}`, 78, { cause });
  }
}

/** True if a missing checksum is an error. */
function mustHaveOne(data: Documents, file: string): boolean {
  // Version 0.1.0 of the broker wrote format version 1 without a checksum.
  if (data.version !== 1) return true;
  // A broker that writes a checksum to state.json.last also writes one to state.json. So if only state.json.last has
  // one, state.json was edited or replaced.
  return existsSync(lastOf(file)) && checksumOf(readFileSync(lastOf(file))) !== 'missing';
}

function unchecked(which: string, file: string): StartError {
  const accept = `farhand broker state accept --data-dir ${quoteForShell(dirname(file))}`;
  return new StartError(
    `${file} has ${which} checksum: it is damaged, or was edited by hand; if you edited it, run ${accept}; otherwise, ${recoveryOf(file)}`,
  );
}

function recoveryOf(file: string): string {
  const back = commandBack(file);
  if (!back) return 'restore it from a backup';
  return `to go back to the previous version of the file, without the last changes: mv ${quoteForShell(file)} ${quoteForShell(`${file}.broken`)} && ${back}`;
}

/** Returns the shell command that restores state.json.last; undefined if that file is missing or damaged. */
export function commandBack(file: string): string | undefined {
  const last = lastOf(file);
  if (!existsSync(last) || checksumOf(readFileSync(last)) === 'wrong') return undefined;
  return `cp -p ${quoteForShell(last)} ${quoteForShell(file)}`;
}

function isNewer(json: unknown): boolean {
  const found = z.looseObject({ version: z.number() }).safeParse(json);
  return found.success && found.data.version > version;
}
