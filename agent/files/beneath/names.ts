// The names in a directory, a bounded number at a time: readdir() has all of them in memory before it gives the first.
import type { Dir, Dirent } from 'node:fs';
import { opendir, readdir } from 'node:fs/promises';
import type { Bytes } from './path.ts';

/** Names in memory at once. */
const batchSize = 256;

/** Node takes 'buffer' here as readdir() does, which its types do not know; where a file system tells no types, Node looks at each name itself and must have its true bytes. */
const options = { bufferSize: batchSize, encoding: 'buffer' as 'latin1' };
const nameOf = (entry: Dirent): Bytes => Buffer.from(entry.name, 'latin1').toString('latin1');

export interface Named {
  name: Bytes;
  directory: boolean;
}

export async function* namesIn(at: Bytes): AsyncGenerator<Named, void, void> {
  for await (const entry of await opendir(at, options))
    yield { name: nameOf(entry), directory: entry.isDirectory() };
}

/** All names, in the order of their bytes. */
export async function sortedNames(at: Bytes): Promise<Bytes[]> {
  // One character per byte, so this is the order of bytes.
  return (await readdir(at, 'latin1')).sort();
}

/** The names of a directory in the order in which it has them; what is open must be closed. */
export class Names {
  #directory: Dir | undefined;

  private constructor(directory: Dir) {
    this.#directory = directory;
  }

  static async open(at: Bytes): Promise<Names> {
    return new Names(await opendir(at, options));
  }

  /** Whether there may be more. */
  get open(): boolean {
    return this.#directory !== undefined;
  }

  /** The next ones, or all that are left; closed at the end. */
  async next(all = false): Promise<Bytes[]> {
    const names: Bytes[] = [];
    while (this.#directory && (all || names.length < batchSize)) {
      const entry = await this.#directory.read();
      if (entry) names.push(nameOf(entry));
      else this.close();
    }
    return names;
  }

  close(): void {
    this.#directory?.close().catch(() => undefined);
    this.#directory = undefined;
  }
}
