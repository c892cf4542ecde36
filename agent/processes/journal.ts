// What this machine promised to run and how it ended: one JSON line per step in a file that is only added to. It
// has its whole length from the start: a line that makes it longer takes 240 us to the disk, one within it 170 (measured).
import { randomUUID } from 'node:crypto';
import { constants } from 'node:fs';
import { type FileHandle, open, readFile, rename } from 'node:fs/promises';
import { join } from 'node:path';
import type { ProcessExit__Output } from '../../proto/types/farhand/agent/v1/ProcessExit.ts';
import { after, now } from '../../shared/clock.ts';
import { syncDirectory } from '../../shared/durable-file.ts';
import { AppError, errnoOf, fromErrno } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Leader } from './census.ts';
import { readPromises, removePromises } from './promises.ts';

export type Exit = ProcessExit__Output;

export type ProcessKind = 'command' | 'terminal';

/** A promise was not kept, and the process never ran; `cause` says why. */
export class Unkept extends Error {
  override readonly name = 'Unkept';
}

/** A process the broker may still ask about. */
export interface Entry {
  accepted_at: number;
  /** A command otherwise. */
  terminal?: true;
  /** `start`: see proc(5); with the pid it names one process for ever. */
  started?: { pid: number; start: string; at: number };
  exit?: Exit;
}

type Line =
  | { t: 'journal'; id: string; version: number }
  | { t: 'accepted'; id: string; at: number; terminal?: true }
  | { t: 'started'; id: string; pid: number; start: string; at: number }
  | { t: 'end'; id: string; exit: Exit }
  /** It was never accepted: the promise could not be kept. */
  | { t: 'refused'; id: string }
  /** `at`: when it was accepted. */
  | { t: 'forgotten'; id: string; at: number };

type Head = Extract<Line, { t: 'journal' }>;

/** What is on the disk when a write returns: perhaps not even that, itself, or all that was written before, too. */
type Sync = 'none' | 'own' | 'all';

interface Queued {
  text: string;
  sync: Sync;
  resolve(): void;
  reject(error: unknown): void;
}

const version = 1;
/**
 * What need not be synced goes with the next promise, or after this. Without it a process counts as lost, once its promise
 * is on the disk here or with its spawner.
 */
const noteMs = 5;
/** A rewritten journal has room for three times what it carries over, within these bounds. */
const leastRoom = 1024 * 1024;
const mostRoom = 16 * 1024 * 1024;

/**
 * Reads the journal of a directory, or makes one. `seenMs`: how long a forgotten id is still refused. `alone` ends the
 * spawners of the agent that had the journal of this id: they might still add to its promises, and keep them.
 */
export async function openJournal(
  directory: string,
  log: Logger,
  seenMs: number,
  alone: (id: string) => Promise<void>,
): Promise<Journal> {
  const path = join(directory, 'journal');
  const journal = new Journal(directory, log, seenMs);
  const text = await readFile(path, 'utf8').catch((error: unknown) => {
    if (errnoOf(error) === 'ENOENT') return '';
    throw fromErrno(error, path);
  });
  const head = headOf(text);
  if (head) {
    await alone(head.id);
    journal.load(head, text, await readPromises(directory));
  } else if (text) {
    // Under a new journal id the broker takes what it started before as lost, never as "never ran".
    log.error({ path }, 'the journal of processes is unreadable, set aside as journal.unreadable');
    await rename(path, `${path}.unreadable`);
  }
  await journal.compact();
  await removePromises(directory);
  return journal;
}

export class Journal {
  id: string = randomUUID();
  readonly entries = new Map<string, Entry>();
  /** Forgotten ids and when they were accepted: within the window they never run again. */
  readonly #forgotten = new Map<string, number>();
  /** Refused ids and when: a spawner may have written their promise all the same. */
  readonly #refused = new Map<string, number>();
  readonly #directory: string;
  readonly #log: Logger;
  readonly #seenMs: number;
  #file: FileHandle | undefined;
  /** The same file; what is written through it is on the disk when the write returns. */
  #synced: FileHandle | undefined;
  #queue: Queued[] = [];
  #writing: Promise<void> | undefined;
  #cancelLater: (() => void) | undefined;
  /** Where the next line goes; from there on it is empty lines. */
  #end = 0;
  #length = 0;
  /** After a failed write or fsync nobody knows what the file holds: the next write makes a new one. */
  #damaged = false;

  /** Through openJournal. */
  constructor(directory: string, log: Logger, seenMs: number) {
    this.#directory = directory;
    this.#log = log;
    this.#seenMs = seenMs;
  }

  wasForgotten(id: string): boolean {
    return this.#forgotten.has(id);
  }

  /** Resolves when the promise to run this id is on the disk; rejects, and knows nothing of it, when it is not. */
  async accept(id: string, kind: ProcessKind): Promise<void> {
    try {
      await this.#write(this.#enter(id, kind), 'own');
    } catch (error) {
      this.entries.delete(id);
      throw fromErrno(error, join(this.#directory, 'journal'));
    }
  }

  /** Whether nothing of this id was ever told here: what was is stronger than the promise of a spawner. */
  isNew(id: string): boolean {
    return !this.entries.has(id) && !this.#forgotten.has(id) && !this.#refused.has(id);
  }

  /**
   * The same promise where a spawner is to keep it, for an id that is new: what is answered must be on the disk before
   * this id is run.
   */
  expect(id: string, kind: ProcessKind): string {
    const line = this.#enter(id, kind);
    this.#note(line);
    return format(line);
  }

  /** What was expected was not kept, and never ran. */
  refuse(id: string): void {
    this.entries.delete(id);
    this.#refused.set(id, now());
    this.#note({ t: 'refused', id });
  }

  #enter(id: string, kind: ProcessKind): Line {
    const known = this.entries.get(id);
    // One that is over surely never ran.
    const at = known && !known.exit ? known.accepted_at : now();
    const which = kind === 'terminal' ? ({ terminal: true } as const) : {};
    this.entries.set(id, { accepted_at: at, ...which });
    return { t: 'accepted', id, at, ...which };
  }

  started(id: string, { pid, start }: Leader, at: number): void {
    const entry = this.entries.get(id);
    if (!entry) return;
    entry.started = { pid, start, at };
    this.#note({ t: 'started', id, pid, start, at });
  }

  /** Not synced: if a power cut takes it, the process counts as lost, which is true. */
  ended(id: string, exit: Exit): void {
    const entry = this.entries.get(id);
    if (!entry) return;
    entry.exit = exit;
    this.#note({ t: 'end', id, exit });
  }

  forget(id: string): void {
    const entry = this.entries.get(id);
    if (!entry) return;
    this.entries.delete(id);
    this.#forgotten.set(id, entry.accepted_at);
    this.#note({ t: 'forgotten', id, at: entry.accepted_at });
  }

  async close(): Promise<void> {
    this.#begin();
    await this.#writing;
    await this.#letGo();
  }

  /** Resolves when all that was told before is on the disk. */
  onDisk(): Promise<void> {
    return this.#enqueue('', 'all');
  }

  /** Takes what files hold. `promises`: of spawners. */
  load(head: Head, text: string, promises: string): void {
    this.id = head.id;
    for (const line of text.trimEnd().split('\n').slice(1)) {
      const step = parse(line);
      if (step) this.#take(step);
      // Nothing follows a line that a crash tore, for every opening rewrites the file.
      else if (line) this.#log.warn('a torn line of the journal was ignored');
    }
    for (const line of promises.split('\n')) {
      const step = parse(line);
      // Of what was told here long ago nothing may be left: then it counts as lost once more, until the broker forgets it.
      if (step?.t === 'accepted' && this.isNew(step.id)) this.#take(step);
    }
    // From here on no spawner's promise is older than what is told here.
    this.#refused.clear();
  }

  /** Writes what still matters to a new file and puts it in place of the old one. */
  async compact(): Promise<void> {
    const path = join(this.#directory, 'journal');
    const carried = Buffer.from(this.#snapshot());
    const room = Math.min(Math.max(leastRoom, 3 * carried.length), mostRoom);
    const { O_WRONLY, O_DSYNC } = constants;
    const file = await open(`${path}.new`, 'w', 0o600);
    let synced: FileHandle | undefined;
    try {
      await file.writeFile(carried);
      // On a disk that is full it grows with each line.
      await file.writeFile(Buffer.alloc(room, '\n')).catch(() => file.truncate(carried.length));
      await file.sync();
      synced = await open(`${path}.new`, O_WRONLY | O_DSYNC);
      await rename(`${path}.new`, path);
      await syncDirectory(this.#directory);
    } catch (error) {
      await file.close();
      await synced?.close();
      throw error;
    }
    await this.#letGo().catch(() => {});
    this.#file = file;
    this.#synced = synced;
    this.#damaged = false;
    this.#end = carried.length;
    this.#length = carried.length + room;
  }

  async #letGo(): Promise<void> {
    const files = [this.#file, this.#synced];
    this.#file = undefined;
    this.#synced = undefined;
    for (const file of files) await file?.close();
  }

  #snapshot(): string {
    const oldest = now() - this.#seenMs;
    for (const [id, at] of this.#forgotten) if (at < oldest) this.#forgotten.delete(id);
    for (const [id, at] of this.#refused) if (at < oldest) this.#refused.delete(id);
    const lines: Line[] = [{ t: 'journal', id: this.id, version }];
    for (const [id, at] of this.#forgotten) lines.push({ t: 'forgotten', id, at });
    for (const id of this.#refused.keys()) lines.push({ t: 'refused', id });
    for (const [id, { accepted_at, terminal, started, exit }] of this.entries) {
      lines.push({ t: 'accepted', id, at: accepted_at, ...(terminal && { terminal }) });
      if (started) lines.push({ t: 'started', id, ...started });
      if (exit) lines.push({ t: 'end', id, exit });
    }
    return lines.map(format).join('');
  }

  #take(step: Line): void {
    if (step.t === 'accepted') {
      this.entries.set(step.id, { accepted_at: step.at, ...(step.terminal && { terminal: true }) });
    }
    if (step.t === 'refused') {
      this.entries.delete(step.id);
      this.#refused.set(step.id, now());
    }
    const entry = this.entries.get(step.id);
    if (step.t === 'started' && entry) entry.started = { pid: step.pid, start: step.start, at: step.at };
    if (step.t === 'end' && entry) entry.exit = step.exit;
    if (step.t !== 'forgotten') return;
    this.entries.delete(step.id);
    this.#forgotten.set(step.id, step.at);
  }

  #note(line: Line): void {
    this.#write(line, 'none').catch((error: unknown) => {
      this.#log.error(
        { err: error, id: line.id, step: line.t },
        'a step of a process could not be journalled',
      );
    });
  }

  #write(line: Line, sync: Sync): Promise<void> {
    return this.#enqueue(format(line), sync);
  }

  #enqueue(text: string, sync: Sync): Promise<void> {
    return new Promise((resolve, reject) => {
      this.#queue.push({ text, sync, resolve, reject });
      if (sync === 'none') this.#cancelLater ??= after(noteMs, () => this.#begin());
      else this.#begin();
    });
  }

  #begin(): void {
    this.#cancelLater?.();
    this.#cancelLater = undefined;
    this.#writing ??= this.#drain();
  }

  /** One write for all that arrived meanwhile. */
  async #drain(): Promise<void> {
    // What is asked for in the same turn shares the first round.
    await Promise.resolve();
    while (this.#queue.length > 0) {
      const batch = this.#queue.splice(0);
      try {
        await this.#writeBatch(batch);
        for (const { resolve } of batch) resolve();
      } catch (error) {
        this.#damaged = true;
        for (const { reject } of batch) reject(error);
        // Who was refused forgets it now; a rewrite for those who wait would keep it.
        await Promise.resolve();
      }
    }
    this.#writing = undefined;
  }

  async #writeBatch(batch: Queued[]): Promise<void> {
    const sync = batch.some((queued) => queued.sync !== 'none');
    const file = sync ? this.#synced : this.#file;
    if (!file) throw new AppError('unavailable', 'the journal of processes is closed');
    const text = batch.map((queued) => queued.text).join('');
    // Where the file grows, what was not synced before may be zeros after a power cut, without its line break.
    const bytes = Buffer.from(sync ? `\n${text}` : text);
    const from = this.#end;
    // The memory is ahead of the batch, so a rewrite holds it already.
    if (this.#damaged || from + bytes.length > this.#length) return this.compact();
    this.#end += bytes.length;
    for (let at = 0; at < bytes.length; ) {
      at += (await file.write(bytes, at, bytes.length - at, from + at)).bytesWritten;
    }
    if (batch.some((queued) => queued.sync === 'all')) await file.datasync();
  }
}

function format(line: Line): string {
  return `${JSON.stringify(line)}\n`;
}

function parse(text: string): Line | undefined {
  try {
    const value: unknown = JSON.parse(text);
    return isLine(value) ? value : undefined;
  } catch {
    return undefined;
  }
}

/** What a text begins with, if that is a journal that we can read. */
function headOf(text: string): Head | undefined {
  const head = parse(text.split('\n', 1)[0] ?? '');
  return head?.t === 'journal' && head.version === version ? head : undefined;
}

/** We wrote the file ourselves: this catches torn lines, not forged ones. */
function isLine(value: unknown): value is Line {
  if (typeof value !== 'object' || value === null) return false;
  return 't' in value && typeof value.t === 'string' && 'id' in value && typeof value.id === 'string';
}
