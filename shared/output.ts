// An output log: bytes appended to plain segment files, addressed by offset, bounded by a sliding window;
// its readers pace its writer.
import { constants } from 'node:fs';
import { type FileHandle, mkdir, open, readdir, rm, stat, unlink } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { Backpressure, Wake } from './backpressure.ts';
import { syncDirectory } from './durable-file.ts';
import { errnoOf, fromErrno } from './errors.ts';
import { countTransferred } from './garbage-collection.ts';
import { outputWindowBytes, readerStallMs } from './limits.ts';

export { Wake };

export interface OutputOptions {
  /** At least this many of the last bytes are retained, and at most a segment (a sixteenth) more. */
  windowBytes?: number;
  /** Woken whenever `end` moved; a log has its own unless one is given. */
  changed?: Wake;
  /** Until it outgrows this many bytes a log stays in memory and makes no file; none by default. */
  memoryBytes?: number;
  /** A reader that has not read for that long no longer holds up the writer. */
  stallMs?: number;
}

/** Result of read(): an `offset` beyond the requested one means that the bytes between are gone. */
export interface Piece {
  offset: number;
  data: Buffer;
}

/** Reads in order, at its own pace; a writer that waits for its appends does not run away from it. */
export interface OutputReader {
  /** Offset of the next byte. */
  readonly position: number;
  read(max: number): Promise<Piece>;
  /** From now on it holds up no writer. */
  close(): void;
}

interface Segment {
  start: number;
  size: number;
  /** Its bytes, while it has no file. */
  memory?: Buffer;
}

/** Far more than a window has: gaps and restarts begin new ones, and an attacker might make many. */
const mostSegments = 64;

/** A log where nothing is on disk yet; nothing is made before the first byte. */
export function newOutput(directory: string, options: OutputOptions = {}): OutputLog {
  return new OutputLog(directory, [], options);
}

/** Opens the log that is on the disk, if any; appending continues at its end. */
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
  readonly #memoryBytes: number;
  readonly #segments: Segment[];
  readonly #backpressure: Backpressure;
  #end: number;
  /** Of the last segment while it takes more. */
  #live: FileHandle | undefined;
  #queue: Promise<void> = Promise.resolve();
  #made: boolean;

  /** Through newOutput and openOutput. */
  constructor(directory: string, segments: Segment[], options: OutputOptions) {
    this.changed = options.changed ?? new Wake();
    this.#directory = directory;
    this.#windowBytes = options.windowBytes ?? outputWindowBytes;
    this.#segmentBytes = Math.ceil(this.#windowBytes / 16);
    this.#memoryBytes = Math.min(options.memoryBytes ?? 0, this.#windowBytes);
    this.#backpressure = new Backpressure(this.#windowBytes / 8, options.stallMs ?? readerStallMs);
    this.#segments = segments;
    this.#made = segments.length > 0;
    const last = segments.at(-1);
    this.#end = last ? last.start + last.size : 0;
  }

  /** Offset of the first retained byte. */
  get start(): number {
    return this.#segments[0]?.start ?? this.#end;
  }

  /** One past the last byte. */
  get end(): number {
    return this.#end;
  }

  /** Bytes on the disk now. */
  get size(): number {
    return this.#segments.reduce((sum, { size, memory }) => sum + (memory ? 0 : size), 0);
  }

  /**
   * Adds bytes at the end, in the order of the calls. When they cannot be written it rejects and counts them
   * all the same, so that offsets stay true: readers find a gap there. Resolves once the bytes are in and a
   * reader is near enough.
   */
  async append(data: Uint8Array): Promise<void> {
    await this.#inTurn(() => this.#append(data));
    await this.#backpressure.hold(() => this.#end);
  }

  /** No append waits for readers any more. */
  release(): void {
    this.#backpressure.release();
  }

  reader(from: number): OutputReader {
    const place = this.#backpressure.join(from);
    return {
      get position() {
        return place.position;
      },
      read: async (max) => {
        this.#backpressure.moved(place, place.position);
        const piece = await this.read(place.position, max);
        this.#backpressure.moved(place, piece.offset + piece.data.length);
        return piece;
      },
      close: () => this.#backpressure.leave(place),
    };
  }

  /** Moves the end to `to` without bytes; readers find a gap there. */
  skip(to: number): Promise<void> {
    return this.#inTurn(async () => {
      if (to <= this.#end) return;
      await this.#closeLive();
      this.#end = to;
      this.changed.wake();
    });
  }

  /** At most `max` bytes from `from` or the first retained byte after it; no data at the end. */
  async read(from: number, max: number): Promise<Piece> {
    for (;;) {
      const segment = this.#segments.find(({ start, size }) => start + size > from);
      if (!segment) return { offset: Math.max(from, this.#end), data: Buffer.alloc(0) };
      const offset = Math.max(from, segment.start);
      const data = await this.#readSegment(segment, offset - segment.start, max);
      if (data.length > 0) return { offset, data };
      // The file is gone or shorter than we left it: its bytes are lost, and the next round reports the gap.
      if (offset === segment.start) this.#forget(segment);
      else segment.size = offset - segment.start;
    }
  }

  /** Closes the open file; reading and appending may still go on. */
  close(): Promise<void> {
    return this.#inTurn(() => this.#closeLive());
  }

  /** Resolves once its files survive a power cut, and their names down from `root`; nothing is done where it has none. */
  sync(root: string): Promise<void> {
    return this.#inTurn(async () => {
      if (!this.#made) return;
      await this.#closeLive();
      for (const { start, memory } of this.#segments) {
        if (memory) continue;
        await using file = await open(this.#file(start));
        await file.datasync();
      }
      for (let at = this.#directory; at.startsWith(root); at = dirname(at)) await syncDirectory(at);
    });
  }

  /** Drops all bytes; `start` is `end` from now on. */
  remove(): Promise<void> {
    this.release();
    return this.#inTurn(async () => {
      await this.#closeLive();
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
    if (data.length === 0) return;
    try {
      if (!this.#remember(data)) await this.#write(data);
    } catch (error) {
      await this.#abandon();
      throw fromErrno(error, this.#directory);
    } finally {
      this.#end += data.length;
      this.changed.wake();
    }
    await this.#slide();
  }

  /** Takes bytes into memory; false where they belong on the disk. */
  #remember(data: Uint8Array): boolean {
    const [first] = this.#segments;
    if (first && (!first.memory || first.start + first.size !== this.#end)) return false;
    const segment = first ?? { start: this.#end, size: 0 };
    const size = segment.size + data.length;
    if (size > this.#memoryBytes) return false;
    // A new one each time: readers hold views of the old one.
    Object.assign(segment, { size, memory: Buffer.concat([segment.memory ?? Buffer.alloc(0), data]) });
    if (!first) this.#segments.push(segment);
    return true;
  }

  async #write(data: Uint8Array): Promise<void> {
    const [first] = this.#segments;
    if (first?.memory) await this.#spill(first, first.memory);
    const full = (this.#segments.at(-1)?.size ?? 0) >= this.#segmentBytes;
    if (!this.#live || full) await this.#roll(this.#end);
    await this.#writeLive(data);
    const last = this.#segments.at(-1);
    if (last) last.size += data.length;
  }

  /** Moves the bytes in memory to the first file. */
  async #spill(segment: Segment, memory: Buffer): Promise<void> {
    await this.#roll(segment.start);
    try {
      await this.#writeLive(memory);
    } catch (error) {
      // It stays in memory; the next append tries again.
      await unlink(this.#file(segment.start)).catch(() => {});
      throw error;
    }
    delete segment.memory;
    // The end may have moved on without bytes.
    if (segment.start + segment.size !== this.#end) await this.#closeLive();
  }

  async #writeLive(data: Uint8Array): Promise<void> {
    for (let at = 0; this.#live && at < data.length; ) at += (await this.#live.write(data, at)).bytesWritten;
  }

  /** Makes and opens the file of the segment that starts there. */
  async #roll(start: number): Promise<void> {
    await this.#closeLive();
    if (!this.#made) await mkdir(this.#directory, { recursive: true, mode: 0o700 });
    this.#made = true;
    const flags = constants.O_RDWR | constants.O_CREAT | constants.O_EXCL | constants.O_APPEND;
    this.#live = await open(this.#file(start), flags, 0o600);
    // In the same turn, for readers take the live file for the last segment's.
    if (!this.#segments[0]?.memory) this.#segments.push({ start, size: 0 });
  }

  /** After a failed write the segment ends where it was good; an empty one goes. */
  async #abandon(): Promise<void> {
    await this.#closeLive().catch(() => {});
    const last = this.#segments.at(-1);
    if (last?.size !== 0) return;
    this.#segments.pop();
    await unlink(this.#file(last.start)).catch(() => {});
  }

  async #slide(): Promise<void> {
    for (;;) {
      const [first, second] = this.#segments;
      const enough = second && this.#end - second.start >= this.#windowBytes;
      if (!first || !second || (!enough && this.#segments.length <= mostSegments)) return;
      this.#segments.shift();
      // Already gone, or left for remove(): either way no reader finds it any more.
      await unlink(this.#file(first.start)).catch(() => {});
    }
  }

  async #readSegment(segment: Segment, at: number, max: number): Promise<Buffer> {
    const length = Math.min(Math.max(max, 1), segment.size - at);
    if (segment.memory) return segment.memory.subarray(at, at + length);
    const buffer = Buffer.allocUnsafe(length);
    countTransferred(length);
    if (this.#live && segment === this.#segments.at(-1)) return readAt(this.#live, buffer, at);
    try {
      await using file = await open(this.#file(segment.start));
      return await readAt(file, buffer, at);
    } catch (error) {
      if (errnoOf(error) === 'ENOENT') return Buffer.alloc(0);
      throw fromErrno(error, this.#directory);
    }
  }

  #forget(segment: Segment): void {
    const index = this.#segments.indexOf(segment);
    if (index >= 0) this.#segments.splice(index, 1);
  }

  async #closeLive(): Promise<void> {
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
