// Stores the last bytes of an output in segment files, and slows a writer that is far ahead of all readers.
import { constants } from 'node:fs';
import { type FileHandle, mkdir, open, readdir, rm, stat, unlink } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { outputWindowBytes, readerStallMs } from './command-and-terminal-limits.ts';
import { syncDirectory } from './durable-file.ts';
import { errnoOf, fromErrno } from './errors.ts';
import { Backpressure } from './output-backpressure.ts';
import { countTransferred } from './v8-garbage-collection.ts';
import { Wake } from './wait-for-change.ts';

export interface OutputOptions {
  /** How many of the output's last bytes the log stores. It may store about a sixteenth (one segment) more. */
  windowBytes?: number;
  /** Wakes waiting readers whenever `end` changes. By default each log has a Wake of its own. */
  changed?: Wake;
  /** Size in bytes up to which a log stays in memory and creates no file; 0 by default. */
  memoryBytes?: number;
  /** Milliseconds without a read after which a reader no longer slows the writer. */
  stallMs?: number;
}

/** Result of read(). Bytes between the requested offset and `offset` are not stored. */
export interface Piece {
  offset: number;
  data: Buffer;
}

/** Reads a log in order. append() waits while all readers are far behind. */
export interface OutputReader {
  /** Offset of the next byte to read. */
  readonly position: number;
  read(max: number): Promise<Piece>;
  /** Ends the reader, which then no longer slows the writer. */
  close(): void;
}

interface Segment {
  start: number;
  size: number;
  /** The content of the segment while it has no file. */
  memory?: Buffer;
}

/**
 * Maximum number of segments. 16 full segments hold `windowBytes`, but each gap and each restart begins a new segment,
 * so segments may be small. Without the maximum, an attacker could cause any number of small files.
 */
const mostSegments = 64;

/** Opens the log in `directory`. Without files there, the log is empty. Appended bytes follow the stored ones. */
export async function openOutput(directory: string, options: OutputOptions = {}): Promise<OutputLog> {
  const names = await readdir(directory).catch((error: unknown) => {
    if (errnoOf(error) === 'ENOENT') return [];
    throw fromErrno(error, directory);
  });
  const segments: Segment[] = [];
  for (const name of names.filter((text) => /^\d{16}$/.test(text)).sort()) {
    const { size } = await stat(join(directory, name));
    if (size > 0) segments.push({ start: Number(name), size });
    // A segment's file is named by the offset of its first byte. This empty file must go, because the next segment
    // needs its name.
    else await unlink(join(directory, name));
  }
  return new OutputLog(directory, options, segments);
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
  /** The last segment's file, as long as bytes can be appended to it. */
  #live: FileHandle | undefined;
  #queue: Promise<void> = Promise.resolve();
  #made: boolean;

  /** Makes an empty log, which creates no file before the first byte. Only openOutput() passes `segments`. */
  constructor(directory: string, options: OutputOptions = {}, segments: Segment[] = []) {
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

  /** Offset of the first stored byte. */
  get start(): number {
    return this.#segments[0]?.start ?? this.#end;
  }

  /** Offset after the last byte. */
  get end(): number {
    return this.#end;
  }

  /** Number of bytes that are on disk now. */
  get size(): number {
    return this.#segments.reduce((sum, { size, memory }) => sum + (memory ? 0 : size), 0);
  }

  /**
   * Adds bytes in the order of the calls. Resolves once the bytes are written and the fastest reader is not far behind.
   * Rejects if the write fails.
   */
  async append(data: Uint8Array): Promise<void> {
    await this.#inTurn(() => this.#append(data));
    await this.#backpressure.hold(() => this.#end);
  }

  /** From now on, append() does not wait for readers. Calls that already wait for them stop waiting and resolve. */
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

  /**
   * Moves the end of the log to offset `to`. Nothing is stored for the bytes in between, so readers find a gap there.
   */
  skip(to: number): Promise<void> {
    return this.#inTurn(async () => {
      if (to <= this.#end) return;
      await this.#closeLive();
      this.#end = to;
      this.changed.wake();
    });
  }

  /**
   * Reads at most `max` bytes from offset `from`. If the byte there is not stored, reads from the first stored byte
   * after it. Returns no bytes at the end of the log.
   */
  async read(from: number, max: number): Promise<Piece> {
    for (;;) {
      const segment = this.#segments.find(({ start, size }) => start + size > from);
      if (!segment) return { offset: Math.max(from, this.#end), data: Buffer.alloc(0) };
      const offset = Math.max(from, segment.start);
      const data = await this.#readSegment(segment, offset - segment.start, max);
      if (data.length > 0) return { offset, data };
      // Another program has removed or shortened the file. The loop skips the lost bytes, which become a gap.
      if (offset === segment.start) this.#forget(segment);
      else segment.size = offset - segment.start;
    }
  }

  /** Closes the open file. The log can still be read and appended to. */
  close(): Promise<void> {
    return this.#inTurn(() => this.#closeLive());
  }

  /**
   * Flushes the log's files, and the directories from its own up to `root`. Does nothing if the log has no directory.
   */
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

  /** Removes all bytes and files, so that `start` is equal to `end`. */
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
    // A failure does not stop the queue: the next operation still starts. The caller gets the error from the returned
    // promise.
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
      // The end moves even if the bytes could not be stored. Later bytes then have the right offsets, and readers find
      // a gap in place of the lost bytes.
      this.#end += data.length;
      this.changed.wake();
    }
    await this.#slide();
  }

  /** Adds bytes to the segment in memory. Returns false, and adds nothing, if they must go to a file instead. */
  #remember(data: Uint8Array): boolean {
    const [first] = this.#segments;
    if (first && (!first.memory || first.start + first.size !== this.#end)) return false;
    const segment = first ?? { start: this.#end, size: 0 };
    const size = segment.size + data.length;
    if (size > this.#memoryBytes) return false;
    // Each append makes a new buffer, because readers have views of the old one.
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

  /** Writes the segment in memory to the first file. */
  async #spill(segment: Segment, memory: Buffer): Promise<void> {
    await this.#roll(segment.start);
    try {
      await this.#writeLive(memory);
    } catch (error) {
      // The bytes stay in memory. The next append creates this file again, so the incomplete file must go.
      await unlink(this.#file(segment.start)).catch(() => {});
      throw error;
    }
    delete segment.memory;
    // If skip() has moved the end of the log past this segment, the next bytes belong to a new segment. In this case
    // the file is closed.
    if (segment.start + segment.size !== this.#end) await this.#closeLive();
  }

  async #writeLive(data: Uint8Array): Promise<void> {
    for (let at = 0; this.#live && at < data.length; ) at += (await this.#live.write(data, at)).bytesWritten;
  }

  /** Creates and opens the file of the segment that begins at offset `start`. */
  async #roll(start: number): Promise<void> {
    await this.#closeLive();
    if (!this.#made) await mkdir(this.#directory, { recursive: true, mode: 0o700 });
    this.#made = true;
    const flags = constants.O_RDWR | constants.O_CREAT | constants.O_EXCL | constants.O_APPEND;
    this.#live = await open(this.#file(start), flags, 0o600);
    // Nothing may be awaited between open() and push(). Until push(), the previous segment is still the last
    // one, so a reader of that segment would read from the new file.
    if (!this.#segments[0]?.memory) this.#segments.push({ start, size: 0 });
  }

  /** After a failed write, closes the file, so that the next write begins a new one. Removes an empty last segment. */
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
      // A file that cannot be removed stays until the log's directory is removed. No reader uses it any more.
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
