// A file of JSON lines that costs whoever writes it nothing: gathered for a moment, written behind their back, rotated.
import { appendFile, open, rename, stat } from 'node:fs/promises';
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
/** So much is not gathered any longer. */
const enough = 256 * 1024;

/** Characters that a terminal obeys and JSON does not escape. */
const controls = /[\u007f-\u009f]/g;

export class Lines {
  readonly #directory: string;
  readonly #name: string;
  readonly #log: Logger;
  readonly #fileBytes: number;
  readonly #gatherMs: number;
  #size: number;
  /** The last line may have been cut off. */
  #torn: boolean;
  #waiting: string[] = [];
  #bytes = 0;
  #dropped = 0;
  #failing = false;
  #cancel: (() => void) | undefined;
  #writing: Promise<void> | undefined;

  private constructor(
    { directory, name, log }: { directory: string; name: string; log: Logger },
    { fileBytes = 16 * 1024 * 1024, gatherMs = 1_000 }: LinesOptions,
    present: { size: number; torn: boolean },
  ) {
    this.#directory = directory;
    this.#name = name;
    this.#log = log;
    this.#fileBytes = fileBytes;
    this.#gatherMs = gatherMs;
    this.#size = present.size;
    this.#torn = present.torn;
  }

  /** NAME.log of a directory, older ones NAME.1.log and so on; only this user reads them. */
  static async open(
    directory: string,
    name: string,
    log: Logger,
    options: LinesOptions = {},
  ): Promise<Lines> {
    const present = await look(join(directory, `${name}.log`));
    return new Lines({ directory, name, log }, options, present);
  }

  add(line: object): void {
    const text = `${JSON.stringify(line).replace(controls, escaped)}\n`;
    if (this.#bytes + text.length > mostWaiting) {
      this.#dropped += 1;
      return;
    }
    this.#waiting.push(text);
    this.#bytes += text.length;
    if (this.#bytes >= enough) void this.#flush();
    else this.#cancel ??= after(this.#gatherMs, () => void this.#flush());
  }

  /** All lines are in the file when it resolves, or cannot be. */
  async close(): Promise<void> {
    await this.#flush();
    await this.#flush();
  }

  /** Never rejects. */
  #flush(): Promise<void> {
    this.#cancel?.();
    this.#cancel = undefined;
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
    const text = Buffer.from((this.#torn ? '\n' : '') + told + lines.join(''));
    this.#waiting = [];
    this.#bytes = 0;
    try {
      if (this.#size > 0 && this.#size + text.length > this.#fileBytes) await this.#rotate();
      await appendFile(this.#path(), text, { mode: 0o600 });
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

  async #rotate(): Promise<void> {
    for (let age = keptFiles; age > 0; age -= 1) {
      await rename(this.#path(age - 1), this.#path(age)).catch((error: unknown) => {
        if (errnoOf(error) !== 'ENOENT') throw error;
      });
    }
    this.#size = 0;
    this.#torn = false;
  }

  #path(age = 0): string {
    return join(this.#directory, age === 0 ? `${this.#name}.log` : `${this.#name}.${age}.log`);
  }
}

const escaped = (one: string): string => `\\u${one.charCodeAt(0).toString(16).padStart(4, '0')}`;

/** A killed agent may have left half a line. */
async function look(path: string): Promise<{ size: number; torn: boolean }> {
  const size = await stat(path).then(
    (stats) => stats.size,
    () => 0,
  );
  if (size === 0) return { size, torn: false };
  const file = await open(path, 'r');
  try {
    const { buffer } = await file.read(Buffer.alloc(1), 0, 1, size - 1);
    return { size, torn: buffer[0] !== 10 };
  } finally {
    await file.close();
  }
}
