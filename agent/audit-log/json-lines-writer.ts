// Writes JSON lines to a log file in the background, at most a second late, and rotates full files.
import { type FileHandle, open, rename, stat } from 'node:fs/promises';
import { join } from 'node:path';
import { after } from '../../shared/clock.ts';
import { ignoring } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { cleanJson, escapeControls } from '../../shared/sanitize-text.ts';

const defaults = {
  /** Size at which the file is renamed and a new file begins. */
  fileBytes: 16 * 1024 * 1024,
  /** Milliseconds for which a line waits in memory, so that several lines share one write. */
  gatherMs: 1_000,
};

const oldFiles = 4;
/** Maximum number of bytes that wait in memory for the disk. Lines beyond that are dropped and counted. */
const mostWaiting = 4 * 1024 * 1024;
/** If this many bytes wait in memory, the lines are written immediately. */
const enough = 256 * 1024;
/**
 * Maximum total size of the string values in a line, in bytes of JSON. With its other fields, the line stays below
 * 8 KiB.
 */
const mostText = 6 * 1024;

export class Lines {
  readonly #path: string;
  readonly #log: Logger;
  readonly #options: typeof defaults;
  /**
   * The current log file, always open, so that lines can be written even when the process has no free file descriptor.
   */
  #file: FileHandle | undefined;
  #size = 0;
  /** True if the last line of the file may be incomplete. */
  #torn = false;
  #waiting: string[] = [];
  #bytes = 0;
  #dropped = 0;
  #failing = false;
  #cancel: (() => void) | undefined;
  #writing: Promise<void> | undefined;

  private constructor(path: string, log: Logger, options: typeof defaults) {
    this.#path = path;
    this.#log = log;
    this.#options = options;
  }

  /**
   * Opens NAME.log in a directory; older files are NAME.1.log and so on. Only the agent's user can read these files.
   */
  static async open(
    directory: string,
    name: string,
    log: Logger,
    options: Partial<typeof defaults> = {},
  ): Promise<Lines> {
    const lines = new Lines(join(directory, name), log, { ...defaults, ...options });
    // If the file cannot be opened now, the first write tries again and reports the failure.
    await lines.#open().catch(() => undefined);
    return lines;
  }

  add(line: object): void {
    const text = `${lineOf(line)}\n`;
    if (this.#bytes + text.length > mostWaiting) {
      this.#dropped += 1;
      return;
    }
    this.#waiting.push(text);
    this.#bytes += text.length;
    if (this.#bytes >= enough) void this.#flush();
    else this.#cancel ??= after(this.#options.gatherMs, () => void this.#flush());
  }

  /** Resolves when all lines are in the file, or the write has failed. */
  async close(): Promise<void> {
    await this.#flush();
    await this.#file?.close();
    this.#file = undefined;
  }

  /** Writes the waiting lines. Never rejects. */
  #flush(): Promise<void> {
    this.#cancel?.();
    this.#cancel = undefined;
    this.#writing ??= this.#write().finally(() => {
      this.#writing = undefined;
    });
    return this.#writing;
  }

  async #write(): Promise<void> {
    while (this.#waiting.length > 0) {
      const lines = this.#waiting.splice(0);
      const dropped = this.#dropped;
      this.#bytes = 0;
      const count = dropped > 0 ? `${JSON.stringify({ dropped_lines: dropped })}\n` : '';
      const text = Buffer.from(count + lines.join(''));
      try {
        const file = await this.#open(text.length);
        await file.appendFile(this.#torn ? Buffer.concat([Buffer.from('\n'), text]) : text);
        this.#size += text.length;
        this.#dropped -= dropped;
        this.#torn = false;
        this.#failing = false;
      } catch (error) {
        this.#dropped += lines.length;
        this.#torn = true;
        if (!this.#failing)
          this.#log.error(
            { err: error },
            "the machine's own log (activity.log) cannot be written, so its lines are dropped and counted; check the disk that has the file",
          );
        this.#failing = true;
      }
    }
  }

  /**
   * Returns the open log file. `bytes`: number of bytes that the caller will append. Begins a new file if these bytes
   * do not fit into the current one, or if the current one was removed or replaced.
   */
  async #open(bytes = 0): Promise<FileHandle> {
    const held = this.#file;
    if (held && (await isAt(held, this.#pathOf(0)))) {
      if (this.#size === 0 || this.#size + bytes <= this.#options.fileBytes) return held;
      await this.#shift();
    }
    try {
      this.#file = await open(this.#pathOf(0), 'a+', 0o600);
    } catch (error) {
      // If no new file can be created, lines still go to the old file. A file that is too large is better than lost
      // lines.
      if (held) return held;
      throw error;
    }
    await held?.close();
    this.#size = (await this.#file.stat()).size;
    // A killed agent may have left an incomplete line.
    const last = await this.#file.read(Buffer.alloc(1), 0, 1, Math.max(0, this.#size - 1));
    this.#torn = this.#size > 0 && last.buffer[0] !== 10;
    return this.#file;
  }

  async #shift(): Promise<void> {
    for (let age = oldFiles; age > 0; age -= 1) {
      await rename(this.#pathOf(age - 1), this.#pathOf(age)).catch(ignoring('ENOENT'));
    }
  }

  #pathOf(age: number): string {
    return `${this.#path}${age === 0 ? '' : `.${age}`}.log`;
  }
}

/** Returns the line as JSON. If its string values together exceed `mostText` bytes, the last ones are cut. */
function lineOf(line: object): string {
  let left = mostText;
  const shortened = JSON.stringify(line, (_name, value: unknown) => {
    if (typeof value !== 'string') return value;
    const start = cut(value, left);
    left = Math.max(0, left - lengthOf(start));
    return start;
  });
  return escapeControls(shortened);
}

/** Length in bytes of a text as JSON, without its quotes. */
const lengthOf = (text: string): number => Buffer.byteLength(cleanJson(text)) - 2;

/** Cuts a text to at most `most` bytes of JSON. A cut text gets an ellipsis, which is not counted in `most`. */
export function cut(text: string, most: number): string {
  let start = text.slice(0, most);
  for (let length = lengthOf(start); length > most; length = lengthOf(start))
    start = start.slice(0, Math.floor((start.length * most) / length));
  return start === text ? text : `${start}…`;
}

async function isAt(file: FileHandle, path: string): Promise<boolean> {
  const [held, there] = await Promise.all([file.stat(), stat(path).catch(() => undefined)]);
  return there?.ino === held.ino && there.dev === held.dev;
}
