// The journal of a machine: which commands and terminals it accepted and how each ended, a JSON line for each step in a
// file that is only appended to. It is what lets an id run at most once.
import { randomUUID } from 'node:crypto';
import { type FileHandle, open, readFile, rename } from 'node:fs/promises';
import { join } from 'node:path';
import type { ProcessExit__Output } from '../../proto/types/farhand/agent/v1/ProcessExit.ts';
import { after, now } from '../../shared/clock.ts';
import { syncDirectory } from '../../shared/durable-file.ts';
import { AppError, errnoOf, fromErrno } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Leader } from './census.ts';

export type Exit = ProcessExit__Output;

export type ProcessKind = 'command' | 'terminal';

/** A command or terminal that the broker may still ask for. */
export interface JournalEntry {
  accepted_at: number;
  /** A command otherwise. */
  terminal?: true;
  /** `start`: see proc(5); with the pid it names one process for ever. */
  started?: { pid: number; start: string; at: number };
  exit?: Exit;
}

export type Line =
  | { t: 'journal'; id: string; version: number }
  | { t: 'accepted'; id: string; at: number; terminal?: true }
  | { t: 'started'; id: string; pid: number; start: string; at: number }
  | { t: 'end'; id: string; exit: Exit }
  /** Of agents up to 0.1.0: it was not accepted after all. */
  | { t: 'refused'; id: string }
  /** `at`: when it was accepted. */
  | { t: 'forgotten'; id: string; at: number };

/** What the disk has of a journal. */
export interface StoredJournal {
  /** Made with the journal. */
  id: string;
  lines: Line[];
}

interface Queued {
  line: Line;
  durable: boolean;
  resolve(): void;
  reject(error: unknown): void;
}

const version = 1;
/** Steps that need not be durable wait this long for one that must be: a write costs as much for several as for one. */
const noteMs = 5;
/** A journal is rewritten once it has grown by three times what the last rewrite left, within these bounds. */
const leastGrowth = 1024 * 1024;
const mostGrowth = 16 * 1024 * 1024;

/** A new one where there is none; one that cannot be read is set aside. */
export async function readJournal(directory: string, log: Logger): Promise<StoredJournal> {
  const path = join(directory, 'journal');
  const text = await readFile(path, 'utf8').catch((error: unknown) => {
    if (errnoOf(error) === 'ENOENT') return '';
    throw fromErrno(error, path);
  });
  const [first = '', ...rest] = text.split('\n');
  const head = parseLine(first);
  if (head?.t === 'journal' && head.version === version) return { id: head.id, lines: parseLines(rest) };
  if (text) {
    // Under a new journal id the broker takes what it started before as lost, never as "never ran".
    log.error({ path }, 'the journal of processes is unreadable, set aside as journal.unreadable');
    await rename(path, `${path}.unreadable`);
  }
  return { id: randomUUID(), lines: [] };
}

/**
 * Lines that a crash tore are left out: nothing follows them, for every start rewrites the file. Files of 0.1.0 are filled
 * up with empty ones.
 */
export function parseLines(texts: string[]): Line[] {
  const lines = texts.filter((text) => text !== '').map(parseLine);
  return lines.filter((line) => line !== undefined);
}

/** The agent wrote the file itself: this finds torn lines, not forged ones. */
function parseLine(text: string): Line | undefined {
  try {
    const value: unknown = JSON.parse(text);
    return isLine(value) ? value : undefined;
  } catch {
    return undefined;
  }
}

function isLine(value: unknown): value is Line {
  if (typeof value !== 'object' || value === null) return false;
  return 't' in value && typeof value.t === 'string' && 'id' in value && typeof value.id === 'string';
}

export class Journal {
  readonly id: string;
  readonly entries = new Map<string, JournalEntry>();
  /** Forgotten ids and when they were accepted: they never run again before `seenMs` have passed. */
  readonly #forgotten = new Map<string, number>();
  readonly #directory: string;
  readonly #seenMs: number;
  readonly #log: Logger;
  #file: FileHandle | undefined;
  #size = 0;
  #mostSize = 0;
  /** After a failed write the content of the file is unknown: the next write replaces it. */
  #damaged = false;
  #queue: Queued[] = [];
  #writing: Promise<void> | undefined;
  #cancelLater: (() => void) | undefined;

  /** Opens it with what is stored, rewritten. `seenMs`: how long a forgotten id is still refused. */
  static async open(directory: string, stored: StoredJournal, seenMs: number, log: Logger): Promise<Journal> {
    const journal = new Journal(directory, stored, seenMs, log);
    await journal.#rewrite();
    return journal;
  }

  private constructor(directory: string, { id, lines }: StoredJournal, seenMs: number, log: Logger) {
    this.id = id;
    this.#directory = directory;
    this.#seenMs = seenMs;
    this.#log = log;
    for (const line of lines) this.#apply(line);
  }

  wasForgotten(id: string): boolean {
    return this.#forgotten.has(id);
  }

  /** Resolves when the disk has it; rejects, and forgets the id, when it has not. */
  async accept(id: string, kind: ProcessKind): Promise<void> {
    try {
      const which = kind === 'terminal' ? ({ terminal: true } as const) : {};
      await this.#write({ t: 'accepted', id, at: now(), ...which }, true);
    } catch (error) {
      this.entries.delete(id);
      throw fromErrno(error, join(this.#directory, 'journal'));
    }
  }

  /** Not durable, as all that follows: what a power cut takes counts as lost, which is true. */
  started(id: string, { pid, start }: Leader, at: number): void {
    this.#note({ t: 'started', id, pid, start, at });
  }

  ended(id: string, exit: Exit): void {
    this.#note({ t: 'end', id, exit });
  }

  forget(id: string): void {
    const entry = this.entries.get(id);
    if (entry) this.#note({ t: 'forgotten', id, at: entry.accepted_at });
  }

  async close(): Promise<void> {
    this.#begin();
    await this.#writing;
    await this.#closeFile();
  }

  #apply(line: Line): void {
    const { id } = line;
    const entry = this.entries.get(id);
    if (line.t === 'accepted') {
      this.entries.set(id, { accepted_at: line.at, ...(line.terminal && { terminal: true }) });
    }
    if (line.t === 'started' && entry) entry.started = { pid: line.pid, start: line.start, at: line.at };
    if (line.t === 'end' && entry) entry.exit = line.exit;
    if (line.t === 'refused' || line.t === 'forgotten') this.entries.delete(id);
    if (line.t === 'forgotten') this.#forgotten.set(id, line.at);
  }

  #note(line: Line): void {
    this.#write(line, false).catch((error: unknown) => {
      const { id, t } = line;
      this.#log.error({ err: error, id, step: t }, 'a step of a process could not be journalled');
    });
  }

  /** The memory has it at once, the disk later. */
  #write(line: Line, durable: boolean): Promise<void> {
    this.#apply(line);
    return new Promise((resolve, reject) => {
      this.#queue.push({ line, durable, resolve, reject });
      if (durable) this.#begin();
      else this.#cancelLater ??= after(noteMs, () => this.#begin());
    });
  }

  #begin(): void {
    this.#cancelLater?.();
    this.#cancelLater = undefined;
    this.#writing ??= this.#drain();
  }

  /** One write for all that arrived meanwhile. */
  async #drain(): Promise<void> {
    // What is accepted in the same turn shares the first write.
    await Promise.resolve();
    while (this.#queue.length > 0) {
      const batch = this.#queue.splice(0);
      try {
        await this.#writeBatch(batch);
        for (const { resolve } of batch) resolve();
      } catch (error) {
        this.#damaged = true;
        for (const { reject } of batch) reject(error);
        // accept() takes back what it could not write; the next batch would rewrite it.
        await Promise.resolve();
      }
    }
    this.#writing = undefined;
  }

  async #writeBatch(batch: Queued[]): Promise<void> {
    if (!this.#file) throw new AppError('unavailable', 'the journal of processes is closed');
    const bytes = Buffer.from(textOf(batch.map(({ line }) => line)));
    // The memory has the batch, so a rewrite holds it already.
    if (this.#damaged || this.#size + bytes.length > this.#mostSize) return this.#rewrite();
    this.#size += bytes.length;
    for (let at = 0; at < bytes.length; ) at += (await this.#file.write(bytes, at)).bytesWritten;
    if (batch.some(({ durable }) => durable)) await this.#file.datasync();
  }

  /** Replaces the file by one that holds only what still matters. */
  async #rewrite(): Promise<void> {
    const path = join(this.#directory, 'journal');
    const bytes = Buffer.from(textOf(this.#snapshot()));
    const file = await open(`${path}.new`, 'w', 0o600);
    try {
      await file.writeFile(bytes);
      await file.sync();
      await rename(`${path}.new`, path);
      await syncDirectory(this.#directory);
    } catch (error) {
      await file.close();
      throw error;
    }
    await this.#closeFile().catch(() => {});
    this.#file = file;
    this.#damaged = false;
    this.#size = bytes.length;
    this.#mostSize = bytes.length + Math.min(Math.max(leastGrowth, 3 * bytes.length), mostGrowth);
  }

  #snapshot(): Line[] {
    const oldest = now() - this.#seenMs;
    const lines: Line[] = [{ t: 'journal', id: this.id, version }];
    for (const [id, at] of this.#forgotten) {
      if (at < oldest) this.#forgotten.delete(id);
      else lines.push({ t: 'forgotten', id, at });
    }
    for (const [id, { accepted_at, terminal, started, exit }] of this.entries) {
      lines.push({ t: 'accepted', id, at: accepted_at, ...(terminal && { terminal }) });
      if (started) lines.push({ t: 'started', id, ...started });
      if (exit) lines.push({ t: 'end', id, exit });
    }
    return lines;
  }

  async #closeFile(): Promise<void> {
    const file = this.#file;
    this.#file = undefined;
    await file?.close();
  }
}

const textOf = (lines: Line[]): string => lines.map((line) => `${JSON.stringify(line)}\n`).join('');
