// What a spawner is about to start, on the disk before it does. One with nothing else to do writes it itself: a thread
// of the agent takes longer for the ways to it and back than the disk takes. Its file is a ring, for the journal is told
// the same, only later: when a place is used again the journal's disk has what was there.
import { constants } from 'node:fs';
import { open, readdir, readFile, rm } from 'node:fs/promises';
import { join } from 'node:path';
import { syncDirectory } from '../../shared/durable-file.ts';
import { errnoOf, fromErrno } from '../../shared/errors.ts';

/** A line, and where in the file of the spawner it goes. */
export interface Promised {
  at: number;
  text: string;
}

/** More than any line has: an id has at most 100 characters. */
const placeBytes = 256;
/** What is left in them from long ago is read once more after a restart: few. */
const places = 256;
const prefix = 'promises-';

/** The file of one spawner at a time. */
export class Promises {
  readonly path: string;
  readonly #directory: string;
  readonly #journalled: () => Promise<void>;
  /** Counts on and on; the places are numbered by what is left of it. */
  #next = 0;
  /** Up to this one they are free. */
  #free = 0;
  #freeing = false;
  /** The file is there in its whole length. */
  #made = false;

  /** `nth`: of all in the directory. `journalled`: resolves when the journal's disk has all that it was told before. */
  constructor(directory: string, nth: number, journalled: () => Promise<void>) {
    this.#directory = directory;
    this.path = join(directory, `${prefix}${nth}`);
    this.#journalled = journalled;
  }

  /**
   * Makes the file, for the next spawner, in its whole length: what makes one longer takes more time. Never rejects: where
   * it fails there is no room, and everything goes through the journal, which tells its failures.
   */
  async open(): Promise<void> {
    this.#made = false;
    try {
      if (this.#next > 0) await this.#journalled();
      const { O_WRONLY, O_CREAT } = constants;
      const file = await open(this.path, O_WRONLY | O_CREAT, 0o600);
      try {
        await file.writeFile(Buffer.alloc(places * placeBytes, '\n'));
        await file.sync();
      } finally {
        await file.close();
      }
      await syncDirectory(this.#directory);
      this.#free = this.#next + places;
      this.#made = true;
    } catch {
      // As above.
    }
  }

  get room(): boolean {
    if (!this.#made) return false;
    if (this.#next < this.#free) return true;
    this.#freeAll();
    return false;
  }

  /** Where this line goes; there has to be room, and the journal was told it. */
  take(line: string): Promised {
    const nth = this.#next++;
    if (this.#free - this.#next === places / 2) this.#freeAll();
    return { at: (nth % places) * placeBytes, text: `${line.trimEnd().padEnd(placeBytes - 1)}\n` };
  }

  /** All that are taken by now, as soon as the journal has them. */
  #freeAll(): void {
    if (this.#freeing) return;
    this.#freeing = true;
    const taken = this.#next;
    this.#journalled()
      .then(
        () => {
          this.#free = Math.max(this.#free, taken + places);
        },
        () => {},
      )
      .finally(() => {
        this.#freeing = false;
      });
  }
}

/** All that spawners have written, oldest first or not, in lines; empty ones between them. */
export async function readPromises(directory: string): Promise<string> {
  const texts = (await filesIn(directory)).map((path) =>
    readFile(path, 'utf8').catch((error: unknown) => {
      // No spawner has written there.
      if (errnoOf(error) === 'EISDIR') return '';
      throw fromErrno(error, path);
    }),
  );
  return (await Promise.all(texts)).join('');
}

/** Nobody writes them any more, and the journal's disk has them. */
export async function removePromises(directory: string): Promise<void> {
  for (const path of await filesIn(directory)) await rm(path, { force: true, recursive: true });
}

async function filesIn(directory: string): Promise<string[]> {
  const names = await readdir(directory).catch((error: unknown) => {
    if (errnoOf(error) === 'ENOENT') return [];
    throw fromErrno(error, directory);
  });
  return names.filter((name) => name.startsWith(prefix)).map((name) => join(directory, name));
}
