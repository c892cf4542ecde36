// A file of JSON lines that costs whoever writes it nothing: gathered for a moment, written behind their back, rotated.
import { type FileHandle, open, rename, stat } from 'node:fs/promises';
import { join } from 'node:path';
import { after } from '../../shared/clock.ts';
import { errnoOf } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';

export interface LinesOptions {
  /** Beyond this a file becomes the first of the old ones. */
  fileBytes?: number;
  /** Longest time that a line is in memory only. */
  gatherMs?: number;
}

const keptFiles = 4;
/** What waits for a disk that hangs; lines beyond are counted and left out. */
const mostWaiting = 4 * 1024 * 1024;
/** So many lines become text before the next flush: what they tell of can be large. */
const mostFresh = 8;
/** So much is not gathered any longer. */
const enough = 256 * 1024;

/** Bytes of all texts of a line as they are written: with the rest of it they stay below 8 KiB. */
const mostText = 6 * 1024;

/** Characters that a terminal obeys, or that end a line or turn it round, and JSON does not escape. */
const controls = /[\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g;

export class Lines {
  readonly #directory: string;
  readonly #name: string;
  readonly #log: Logger;
  readonly #fileBytes: number;
  readonly #gatherMs: number;
  /** Held open, so that whoever uses up all descriptors hides nothing. */
  #file: FileHandle | undefined;
  #size = 0;
  /** The last line may have been cut off. */
  #torn = false;
  /** Not yet text: who adds a line has more to do. */
  #fresh: object[] = [];
  #waiting: string[] = [];
  #bytes = 0;
  #dropped = 0;
  #failing = false;
  #cancel: (() => void) | undefined;
  #writing: Promise<void> | undefined;

  private constructor(
    { directory, name, log }: { directory: string; name: string; log: Logger },
    { fileBytes = 16 * 1024 * 1024, gatherMs = 1_000 }: LinesOptions,
  ) {
    this.#directory = directory;
    this.#name = name;
    this.#log = log;
    this.#fileBytes = fileBytes;
    this.#gatherMs = gatherMs;
  }

  /** NAME.log of a directory, older ones NAME.1.log and so on; only this user reads them. */
  static async open(
    directory: string,
    name: string,
    log: Logger,
    options: LinesOptions = {},
  ): Promise<Lines> {
    const lines = new Lines({ directory, name, log }, options);
    // Where that fails, it is told when there is something to write.
    await lines.#opened().catch(() => undefined);
    return lines;
  }

  /** The line is not to change afterwards. */
  add(line: object): void {
    this.#fresh.push(line);
    if (this.#fresh.length >= mostFresh) this.#format();
    if (this.#bytes >= enough) void this.#flush();
    else this.#cancel ??= after(this.#gatherMs, () => void this.#flush());
  }

  /** All lines are in the file when it resolves, or cannot be. */
  async close(): Promise<void> {
    await this.#flush();
    await this.#flush();
    await this.#file?.close();
    this.#file = undefined;
  }

  #format(): void {
    for (const line of this.#fresh.splice(0)) {
      const text = `${lineOf(line)}\n`;
      if (this.#bytes + text.length > mostWaiting) {
        this.#dropped += 1;
        continue;
      }
      this.#waiting.push(text);
      this.#bytes += text.length;
    }
  }

  /** Never rejects. */
  #flush(): Promise<void> {
    this.#cancel?.();
    this.#cancel = undefined;
    this.#format();
    this.#writing ??= this.#write().finally(() => {
      this.#writing = undefined;
      if (this.#bytes >= enough) void this.#flush();
      else if (this.#bytes > 0) this.#cancel ??= after(this.#gatherMs, () => void this.#flush());
    });
    return this.#writing;
  }

  async #write(): Promise<void> {
    const lines = this.#waiting;
    if (lines.length === 0) return;
    const dropped = this.#dropped;
    const told = dropped > 0 ? `${JSON.stringify({ dropped_lines: dropped })}\n` : '';
    this.#waiting = [];
    this.#bytes = 0;
    try {
      let file = await this.#opened();
      const text = Buffer.from((this.#torn ? '\n' : '') + told + lines.join(''));
      if (this.#size > 0 && this.#size + text.length > this.#fileBytes) file = await this.#rotated(file);
      await file.appendFile(text);
      this.#size += text.length;
      this.#torn = false;
      this.#dropped -= dropped;
      this.#failing = false;
    } catch (error) {
      this.#dropped += lines.length;
      this.#torn = true;
      if (!this.#failing)
        this.#log.error({ err: error }, 'the log of what is done on this machine cannot be written');
      this.#failing = true;
    }
  }

  /** Opens the file where it is not open, or where somebody has put another in its place, or none. */
  async #opened(): Promise<FileHandle> {
    const path = this.#path();
    if (this.#file && (await isAt(this.#file, path))) return this.#file;
    const file = await open(path, 'a+', 0o600);
    await this.#file?.close();
    this.#file = file;
    ({ size: this.#size, torn: this.#torn } = await look(file));
    return file;
  }

  /** The new file is open before the old one is closed; where it cannot be had, the old one grows. */
  async #rotated(full: FileHandle): Promise<FileHandle> {
    const next = join(this.#directory, `${this.#name}.next.log`);
    const file = await open(next, 'a+', 0o600).catch(() => undefined);
    if (!file) return full;
    try {
      await this.#shift();
      await rename(next, this.#path());
    } catch (error) {
      await file.close();
      throw error;
    }
    await full.close();
    this.#file = file;
    this.#size = 0;
    this.#torn = false;
    return file;
  }

  async #shift(): Promise<void> {
    for (let age = keptFiles; age > 0; age -= 1) {
      await rename(this.#path(age - 1), this.#path(age)).catch((error: unknown) => {
        if (errnoOf(error) !== 'ENOENT') throw error;
      });
    }
  }

  #path(age = 0): string {
    return join(this.#directory, age === 0 ? `${this.#name}.log` : `${this.#name}.${age}.log`);
  }
}

/** Bytes of a UTF-16 unit as it is written: \uXXXX. */
const mostPerCharacter = 6;

const escaped = (one: string): string => `\\u${one.charCodeAt(0).toString(16).padStart(4, '0')}`;

const written = (text: string): string => JSON.stringify(text).replace(controls, escaped);

/** Without its quotes. */
const lengthOf = (text: string): number => Buffer.byteLength(written(text)) - 2;

/** As JSON; where its texts are too long, the last ones are cut. */
function lineOf(line: object): string {
  const plain = JSON.stringify(line);
  if (plain.length * mostPerCharacter <= mostText) return plain.replace(controls, escaped);
  let left = mostText;
  const whole = JSON.stringify(line, (_name, value: unknown) => {
    if (typeof value !== 'string') return value;
    const kept = cut(value, left);
    left = Math.max(0, left - lengthOf(kept));
    return kept;
  });
  return whole.replace(controls, escaped);
}

/** As much of a text as is written in so many bytes. */
export function cut(text: string, most: number): string {
  if (text.length * mostPerCharacter <= most) return text;
  if (text.length <= most && lengthOf(text) <= most) return text;
  let [low, high] = [0, Math.min(text.length, most)];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (lengthOf(text.slice(0, middle)) <= most) low = middle;
    else high = middle - 1;
  }
  return `${text.slice(0, low)}…`;
}

async function isAt(file: FileHandle, path: string): Promise<boolean> {
  const [held, there] = await Promise.all([file.stat(), stat(path).catch(() => undefined)]);
  return there?.ino === held.ino && there.dev === held.dev;
}

/** A killed agent may have left half a line. */
async function look(file: FileHandle): Promise<{ size: number; torn: boolean }> {
  const { size } = await file.stat();
  if (size === 0) return { size, torn: false };
  const { buffer } = await file.read(Buffer.alloc(1), 0, 1, size - 1);
  return { size, torn: buffer[0] !== 10 };
}
