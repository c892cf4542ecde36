// The journal: an append-only file that records each step of the machine's commands and terminals as a JSON line. It
// makes a command run at most once, even if the agent crashes.
import { randomUUID } from 'node:crypto';
import { type FileHandle, open, readFile, rename } from 'node:fs/promises';
import { join } from 'node:path';
import type { ProcessExit__Output } from '../../proto/types/farhand/agent/v1/ProcessExit.ts';
import { after, now } from '../../shared/clock.ts';
import { syncDirectory } from '../../shared/durable-file.ts';
import { AppError, errnoOf, fromErrno } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { bootId } from '../boot-id.ts';
import type { Leader } from './proc-pid-stat.ts';

export type Exit = ProcessExit__Output;

export type ProcessKind = 'command' | 'terminal';

/** The start of a process. */
interface Started extends Leader {
  at: number;
  /**
   * Id of the machine's boot. After a reboot, other processes may have the same pid and start time. Undefined in a
   * journal of version 0.1.0.
   */
  boot?: string | undefined;
}

/** A command or terminal whose result the broker has not acknowledged. */
export interface JournalEntry {
  accepted_at: number;
  /** True for a terminal; absent for a command. */
  terminal?: true;
  /** Name of the cgroup that the process has for itself; absent without cgroups. */
  cgroup?: string;
  started?: Started;
  exit?: Exit;
}

export type Line =
  | { t: 'journal'; id: string; version: number }
  | { t: 'accepted'; id: string; at: number; terminal?: true; cgroup?: string }
  | ({ t: 'started'; id: string } & Started)
  | { t: 'end'; id: string; exit: Exit }
  /** The command was not accepted after all. Only agents of version 0.1.0 wrote this line. */
  | { t: 'refused'; id: string }
  /** The broker has acknowledged the result. `at`: when the command was accepted. */
  | { t: 'forgotten'; id: string; at: number };

export interface StoredJournal {
  /** Random id, created together with the journal. */
  id: string;
  lines: Line[];
}

interface Batch {
  lines: Line[];
  /** True if the lines must be on the disk when `written` resolves. */
  durable: boolean;
  written: PromiseWithResolvers<void>;
}

const emptyBatch = (): Batch => ({ lines: [], durable: false, written: Promise.withResolvers() });

const version = 1;
/** Milliseconds that a line waits for further lines, to share one write with them. A durable line does not wait. */
const noteMs = 5;
/** Milliseconds after which a failed write is repeated, even if there are no further lines. */
const retryMs = 1_000;
/** Minimum growth of the journal between two rewrites, in bytes. */
const leastGrowth = 1024 * 1024;

/** Reads the journal. If it is missing or its first line is invalid, returns an empty journal with a new id. */
export async function readJournal(directory: string, log: Logger): Promise<StoredJournal> {
  const path = join(directory, 'journal');
  const text = await readFile(path, 'utf8').catch((error: unknown) => {
    if (errnoOf(error) === 'ENOENT') return '';
    throw fromErrno(error, path);
  });
  const [first = '', ...rest] = text.split('\n');
  const [head] = parseLine(first);
  if (head?.t === 'journal' && head.version === version) return { id: head.id, lines: parseLines(rest) };
  if (text) {
    // The new journal has another id. From that id the broker knows that the commands of the unreadable journal are
    // lost.
    log.error(
      { path },
      'the journal of processes is unreadable and was renamed to journal.unreadable; commands and terminals of earlier runs of the agent count as lost',
    );
    await rename(path, `${path}.unreadable`);
  }
  return { id: randomUUID(), lines: [] };
}

/**
 * Parses the lines of a journal. Leaves out a last line that a crash cut off, and the empty lines with which version
 * 0.1.0 padded files.
 */
export const parseLines = (texts: string[]): Line[] => texts.flatMap(parseLine);

/** Checks only the fields `t` and `id`, because only the agent writes the file. */
function parseLine(text: string): Line[] {
  try {
    const value: unknown = JSON.parse(text);
    return isLine(value) ? [value] : [];
  } catch {
    return [];
  }
}

function isLine(value: unknown): value is Line {
  if (typeof value !== 'object' || value === null) return false;
  return 't' in value && typeof value.t === 'string' && 'id' in value && typeof value.id === 'string';
}

export class Journal {
  readonly id: string;
  readonly entries = new Map<string, JournalEntry>();
  /**
   * Ids of commands and terminals whose results the broker has acknowledged. The value is the time at which the journal
   * accepted the id.
   */
  readonly #forgotten = new Map<string, number>();
  readonly #directory: string;
  readonly #seenMs: number;
  readonly #log: Logger;
  #file: FileHandle | undefined;
  #size = 0;
  #mostSize = 0;
  /** True after a failed write: the content of the file is then unknown. The next write replaces the file. */
  #damaged = false;
  #next = emptyBatch();
  #writing: Promise<void> | undefined;
  #cancelLater: (() => void) | undefined;

  /**
   * Opens the journal and rewrites its file. The journal stores an id for at least `seenMs` milliseconds after its
   * acceptance. In that time a repeated request with the id starts nothing.
   */
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

  /**
   * Records that an id was accepted. Resolves when the line is on the disk. If the write fails, removes the id and
   * rejects.
   */
  async accept(id: string, kind: ProcessKind, cgroup?: string): Promise<void> {
    try {
      const which = kind === 'terminal' ? ({ terminal: true } as const) : {};
      await this.#write({ t: 'accepted', id, at: now(), ...which, ...(cgroup && { cgroup }) }, true);
    } catch (error) {
      this.entries.delete(id);
      throw fromErrno(error, join(this.#directory, 'journal'));
    }
  }

  /**
   * Records the start of a process. Unlike accept(), the methods started(), ended() and forget() do not wait for the
   * disk. After a power cut, a process whose exit was not yet on the disk counts as lost.
   */
  started(id: string, { pid, start }: Leader, at: number): void {
    this.#note({ t: 'started', id, pid, start, at, boot: bootId() });
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
      const { at, terminal, cgroup } = line;
      this.entries.set(id, { accepted_at: at, ...(terminal && { terminal }), ...(cgroup && { cgroup }) });
    }
    if (line.t === 'started' && entry) {
      const { pid, start, at, boot } = line;
      entry.started = { pid, start, at, boot };
    }
    if (line.t === 'end' && entry) entry.exit = line.exit;
    if (line.t === 'refused' || line.t === 'forgotten') this.entries.delete(id);
    if (line.t === 'forgotten') this.#forgotten.set(id, line.at);
  }

  #note(line: Line): void {
    this.#write(line, false).catch((err: unknown) => {
      const { id, t: step } = line;
      const message =
        'the journal of processes could not be written, so after a crash of the agent the process with this id would count as lost; check the free disk space';
      this.#log.error({ err, id, step }, message);
    });
  }

  /** Applies the line to the entries in memory immediately. Resolves when the line is in the file. */
  #write(line: Line, durable: boolean): Promise<void> {
    this.#apply(line);
    const batch = this.#next;
    batch.lines.push(line);
    batch.durable ||= durable;
    if (durable) this.#begin();
    else this.#cancelLater ??= after(noteMs, () => this.#begin());
    return batch.written.promise;
  }

  #begin(): void {
    this.#cancelLater?.();
    this.#cancelLater = undefined;
    this.#writing ??= this.#drain();
  }

  /**
   * Writes the waiting lines. Lines that arrive during a write share the next write. Without waiting lines, repeats a
   * write that has failed.
   */
  async #drain(): Promise<void> {
    // Waits one microtask. All lines added until then share the first write.
    await Promise.resolve();
    do {
      const batch = this.#next;
      this.#next = emptyBatch();
      try {
        await this.#writeBatch(batch);
        batch.written.resolve();
      } catch (error) {
        this.#damaged = true;
        if (batch.lines.length > 0) batch.written.reject(error);
        if (this.#file) this.#cancelLater ??= after(retryMs, () => this.#begin());
        // Waits one microtask, in which the failed accept() calls remove their entries. The next write replaces the
        // file by one with all current entries, and must not contain the failed ones.
        await Promise.resolve();
      }
    } while (this.#next.lines.length > 0);
    this.#writing = undefined;
  }

  async #writeBatch({ lines, durable }: Batch): Promise<void> {
    const file = this.#file;
    if (!file) throw new AppError('unavailable', 'the agent is stopping and has closed its journal');
    const bytes = Buffer.from(textOf(lines));
    // A rewrite also writes the lines of this batch, because #apply() has added them to the entries in memory.
    if (this.#damaged || this.#size + bytes.length > this.#mostSize) return this.#rewrite();
    this.#size += bytes.length;
    for (let at = 0; at < bytes.length; ) at += (await file.write(bytes, at)).bytesWritten;
    // datasync() flushes this batch and all earlier lines, which may not be on the disk yet. O_DSYNC would flush only
    // this batch. A power cut could then lose an earlier line, and leave a hole in the file. The hole would make a
    // line of this batch unreadable.
    if (durable) await file.datasync();
  }

  /** Replaces the file with one that contains only the current entries and ids. */
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
    // The file doubles before the next rewrite, so rewrites write no more bytes than the new lines have.
    this.#mostSize = 2 * bytes.length + leastGrowth;
  }

  #snapshot(): Line[] {
    const oldest = now() - this.#seenMs;
    const lines: Line[] = [{ t: 'journal', id: this.id, version }];
    for (const [id, at] of this.#forgotten) {
      if (at < oldest) this.#forgotten.delete(id);
      else lines.push({ t: 'forgotten', id, at });
    }
    for (const [id, { accepted_at, started, exit, ...accepted }] of this.entries) {
      lines.push({ t: 'accepted', id, at: accepted_at, ...accepted });
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
