// An output log: bytes appended to plain segment files, addressed by offset, bounded by a sliding window.
import { constants } from 'node:fs';
import { type FileHandle, mkdir, open, readdir, rm, stat, unlink } from 'node:fs/promises';
import { join } from 'node:path';
import { errnoOf, fromErrno } from './errors.ts';

/** Lets readers sleep until something happened; one may be shared by several sources. */
export class Wake {
  readonly #waiting = new Set<() => void>();

  wake(): void {
    const waiting = [...this.#waiting];
    this.#waiting.clear();
    for (const run of waiting) run();
  }

  /** Resolves at the next wake(), or when the signal fires. Look at the state, then wait, in one turn. */
  wait(signal: AbortSignal): Promise<void> {
    return new Promise((resolve) => {
      if (signal.aborted) return resolve();
      const done = (): void => {
        this.#waiting.delete(done);
        signal.removeEventListener('abort', done);
        resolve();
      };
      this.#waiting.add(done);
      signal.addEventListener('abort', done, { once: true });
    });
  }
}

export interface OutputOptions {
  /** At least this many of the last bytes are kept, and at most a segment (a sixteenth) more. */
  windowBytes?: number;
  /** Woken whenever `end` moved; a log has its own unless one is given. */
  changed?: Wake;
}

/** What read() found: `offset` beyond the one asked for means that the bytes between are gone. */
export interface Piece {
  offset: number;
  data: Buffer;
}

interface Segment {
  start: number;
  size: number;
}

/** A log where nothing is on disk yet; nothing is made before the first byte. */
export function newOutput(directory: string, options: OutputOptions = {}): OutputLog {
  return new OutputLog(directory, [], options);
}

/** The log as the disk has it, perhaps nothing; what is appended goes on at its end. */
export async function openOutput(directory: string, options: OutputOptions = {}): Promise<OutputLog> {
  const names = await readdir(directory).catch((error: unknown) => {
    if (errnoOf(error) === 'ENOENT') return [];
    throw fromErrno(error, directory);
  });
  const segments: Segment[] = [];
  for (const name of names.filter((text) => /^\d{16}$/.test(text)).sort()) {
    const { size } = await stat(join(directory, name));
    if (size > 0) segments.push({ start: Number(name), size });
    // An empty one would be in the way when appending goes on at its offset.
    else await unlink(join(directory, name));
  }
  return new OutputLog(directory, segments, options);
}

export class OutputLog {
  readonly changed: Wake;
  readonly #directory: string;
  readonly #windowBytes: number;
  readonly #segmentBytes: number;
  readonly #segments: Segment[];
  #end: number;
  /** Of the last segment while it takes more. */
  #live: FileHandle | undefined;
  #queue: Promise<void> = Promise.resolve();
  #made: boolean;

  /** Through newOutput and openOutput. */
  constructor(directory: string, segments: Segment[], options: OutputOptions) {
    this.changed = options.changed ?? new Wake();
    this.#directory = directory;
    this.#windowBytes = options.windowBytes ?? 64 * 1024 * 1024;
    this.#segmentBytes = Math.ceil(this.#windowBytes / 16);
    this.#segments = segments;
    this.#made = segments.length > 0;
    const last = segments.at(-1);
    this.#end = last ? last.start + last.size : 0;
  }

  /** Offset of the first byte kept. */
  get start(): number {
    return this.#segments[0]?.start ?? this.#end;
  }

  /** One past the last byte. */
  get end(): number {
    return this.#end;
  }

  /**
   * Adds bytes at the end, in the order of the calls. When they cannot be written it rejects and counts them
   * all the same, so that offsets stay true: readers find a gap there.
   */
  append(data: Uint8Array): Promise<void> {
    return this.#inTurn(() => this.#append(data));
  }

  /** Moves the end to `to` without bytes; readers find a gap there. */
  skip(to: number): Promise<void> {
    return this.#inTurn(async () => {
      if (to <= this.#end) return;
      await this.#release();
      this.#end = to;
      this.changed.wake();
    });
  }

  /** At most `max` bytes from `from` on or from the first one kept after it; no data at the end. */
  async read(from: number, max: number): Promise<Piece> {
    for (;;) {
      const segment = this.#segments.find(({ start, size }) => start + size > from);
      if (!segment) return { offset: Math.max(from, this.#end), data: Buffer.alloc(0) };
      const offset = Math.max(from, segment.start);
      const data = await this.#readSegment(segment, offset - segment.start, max);
      if (data.length > 0) return { offset, data };
      // The file is gone or shorter than we left it: what it held is lost, and the next round says so.
      if (offset === segment.start) this.#forget(segment);
      else segment.size = offset - segment.start;
    }
  }

  /** Lets go of the open file; reading and appending may still go on. */
  close(): Promise<void> {
    return this.#inTurn(() => this.#release());
  }

  /** Takes everything off the disk; `start` is `end` from now on. */
  remove(): Promise<void> {
    return this.#inTurn(async () => {
      await this.#release();
      this.#segments.length = 0;
      this.changed.wake();
      if (this.#made) await rm(this.#directory, { recursive: true, force: true });
      this.#made = false;
    });
  }

  #inTurn(run: () => Promise<void>): Promise<void> {
    const done = this.#queue.then(run);
    // The caller has the failure; the next in turn starts all the same.
    this.#queue = done.catch(() => {});
    return done;
  }

  async #append(data: Uint8Array): Promise<void> {
    try {
      const live = this.#live && this.#lastSize() < this.#segmentBytes ? this.#live : await this.#roll();
      for (let at = 0; at < data.length; ) at += (await live.write(data, at)).bytesWritten;
      const last = this.#segments.at(-1);
      if (last) last.size += data.length;
    } catch (error) {
      await this.#abandon();
      throw fromErrno(error, this.#directory);
    } finally {
      this.#end += data.length;
      this.changed.wake();
    }
    await this.#slide();
  }

  #lastSize(): number {
    return this.#segments.at(-1)?.size ?? 0;
  }

  /** Opens the segment that starts at the end. */
  async #roll(): Promise<FileHandle> {
    await this.#release();
    if (!this.#made) await mkdir(this.#directory, { recursive: true, mode: 0o700 });
    this.#made = true;
    const flags = constants.O_RDWR | constants.O_CREAT | constants.O_EXCL | constants.O_APPEND;
    this.#live = await open(this.#file(this.#end), flags, 0o600);
    this.#segments.push({ start: this.#end, size: 0 });
    return this.#live;
  }

  /** After a failed write the segment ends where it was good; an empty one goes. */
  async #abandon(): Promise<void> {
    await this.#release().catch(() => {});
    const last = this.#segments.at(-1);
    if (last?.size !== 0) return;
    this.#segments.pop();
    await unlink(this.#file(last.start)).catch(() => {});
  }

  async #slide(): Promise<void> {
    for (;;) {
      const [first, second] = this.#segments;
      if (!first || !second || this.#end - second.start < this.#windowBytes) return;
      this.#segments.shift();
      // Already gone, or left for remove(): either way no reader finds it any more.
      await unlink(this.#file(first.start)).catch(() => {});
    }
  }

  async #readSegment(segment: Segment, at: number, max: number): Promise<Buffer> {
    const buffer = Buffer.allocUnsafe(Math.min(Math.max(max, 1), segment.size - at));
    if (this.#live && segment === this.#segments.at(-1)) return readAt(this.#live, buffer, at);
    try {
      const file = await open(this.#file(segment.start));
      try {
        return await readAt(file, buffer, at);
      } finally {
        await file.close();
      }
    } catch (error) {
      if (errnoOf(error) === 'ENOENT') return Buffer.alloc(0);
      throw fromErrno(error, this.#directory);
    }
  }

  #forget(segment: Segment): void {
    const index = this.#segments.indexOf(segment);
    if (index >= 0) this.#segments.splice(index, 1);
  }

  async #release(): Promise<void> {
    const live = this.#live;
    this.#live = undefined;
    await live?.close();
  }

  #file(start: number): string {
    return join(this.#directory, String(start).padStart(16, '0'));
  }
}

async function readAt(file: FileHandle, buffer: Buffer, position: number): Promise<Buffer> {
  const { bytesRead } = await file.read(buffer, 0, buffer.length, position);
  return buffer.subarray(0, bytesRead);
}
