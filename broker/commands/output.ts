// The output of commands on the broker's side: in memory while it is small, in files when it grows.
import { readdir, rm, statfs } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import type { Logger } from '../../shared/logger.ts';
import { newOutput, type OutputLog, openOutput, Wake } from '../../shared/output.ts';

export const streams = ['stdout', 'stderr'] as const;
export type Stream = (typeof streams)[number];

/** What a record keeps of each stream. */
const tailBytes = 1024 * 1024;
/** Below this a stream has no file: most commands say little. */
const memoryBytes = 64 * 1024;
const readBytes = 256 * 1024;

/** Both streams of a command; `changed` wakes its readers and those who wait for its start or end. */
export class Output {
  readonly stdout: OutputLog;
  readonly stderr: OutputLog;
  readonly changed: Wake;
  /** No more will come for now, for the broker stops. */
  stopped = false;
  readonly #disk: OutputDirectory;
  #reported = false;

  constructor({ stdout, stderr }: Record<Stream, OutputLog>, changed: Wake, disk: OutputDirectory) {
    this.stdout = stdout;
    this.stderr = stderr;
    this.changed = changed;
    this.#disk = disk;
  }

  /**
   * Takes bytes that lie at `offset`; what was taken already is left out. Never rejects: what the disk does not take, or
   * must not, is a gap.
   */
  async append(stream: Stream, offset: number, data: Buffer): Promise<void> {
    this.#reported = true;
    const output = this[stream];
    if (offset > output.end) await output.skip(offset);
    const fresh = data.subarray(Math.max(0, output.end - offset));
    if (fresh.length === 0) return;
    const inMemory = output.size === 0 && output.end - output.start + fresh.length <= memoryBytes;
    if (!inMemory && !(await this.#disk.hasSpaceFor(fresh.length)))
      return output.skip(output.end + fresh.length);
    await output.append(fresh).catch((error: unknown) => {
      this.#disk.log.error({ err: error }, 'output of a command could not be stored');
    });
  }

  /** The last bytes of a stream that lie together, at most `most`. Never rejects: what cannot be read is a gap. */
  async tail(stream: Stream, most = tailBytes): Promise<Buffer> {
    try {
      return await tailOf(this[stream], most);
    } catch (error) {
      this.#disk.log.error({ err: error, stream }, 'the output of a command could not be read');
      return Buffer.alloc(0);
    }
  }

  /** Nothing has come or is on its way: there is nothing to be read, nor to be closed. */
  get silent(): boolean {
    return !this.#reported && this.stdout.end === 0 && this.stderr.end === 0;
  }

  /** Where both start and end, and what of them is in files. */
  extent() {
    const { stdout, stderr } = this;
    return {
      stdout_bytes: stdout.end,
      stderr_bytes: stderr.end,
      stdout_start: stdout.start,
      stderr_start: stderr.start,
      kept_bytes: stdout.size + stderr.size,
    };
  }

  /**
   * What the record of an ended command says of its output. Files are synced first: once the record is on disk, the
   * agent removes its copy, also after a power cut of the broker. Never rejects.
   */
  async final() {
    if (this.silent) return this.extent();
    const tails = { stdout: await this.tail('stdout'), stderr: await this.tail('stderr') };
    for (const stream of streams) {
      await this[stream].sync(this.#disk.root).catch(async (error: unknown) => {
        this.#disk.log.error({ err: error, stream }, 'the output of a command could not be synced to disk');
        // A record must not promise files that may be gone.
        await this[stream].remove().catch(() => {});
      });
    }
    const extent = this.extent();
    // Of what has no file the record keeps the tail alone.
    for (const stream of streams)
      if (this[stream].size === 0) extent[`${stream}_start`] = this[stream].end - tails[stream].length;
    return { ...tails, ...extent };
  }

  /** The command is about to end, or the broker stops: no append waits for readers any more. */
  release(): void {
    for (const stream of streams) this[stream].release();
  }

  /** Wakes all who wait; they find that it has stopped. */
  stop(): void {
    this.stopped = true;
    this.release();
    this.changed.wake();
  }

  async close(): Promise<void> {
    await Promise.all(streams.map((stream) => this[stream].close()));
  }
}

/** Free space that output leaves to history and state, and the share of a small disk that is as good. */
const reserveBytes = 256 * 1024 * 1024;
const reserveShare = 0.1;
/** The disk is asked again after so many bytes. */
const checkEveryBytes = 1024 * 1024;

/** What the record of a command that has ended has of its output. */
type Ended = Record<Stream, Buffer> & Record<`${Stream}_bytes`, number> & { id: string; kept_bytes: number };

/** Where the output of all commands lies: a directory for each command that needs files. */
export class OutputDirectory {
  /** The data directory: names below it are synced with the files. */
  readonly root: string;
  readonly log: Logger;
  readonly #directory: string;
  #unchecked = checkEveryBytes;
  #hasSpace = true;

  constructor(directory: string, log: Logger) {
    this.root = dirname(directory);
    this.log = log;
    this.#directory = directory;
  }

  /** Of a new command. */
  fresh(id: string): Output {
    const changed = new Wake();
    const fresh = (stream: Stream) => newOutput(this.#pathOf(id, stream), { changed, memoryBytes });
    return new Output({ stdout: fresh('stdout'), stderr: fresh('stderr') }, changed, this);
  }

  /** Of one that an earlier broker had begun to follow: more may come. */
  async reopen(id: string): Promise<Output> {
    const changed = new Wake();
    const reopen = (stream: Stream) => openOutput(this.#pathOf(id, stream), { changed, memoryBytes });
    return new Output({ stdout: await reopen('stdout'), stderr: await reopen('stderr') }, changed, this);
  }

  /** Of one that has ended: its files, or where there are none, the tail that its record keeps. */
  async ofEnded(command: Ended): Promise<Output> {
    const changed = new Wake();
    const ended = async (stream: Stream): Promise<OutputLog> => {
      const bytes = command[`${stream}_bytes`];
      const path = this.#pathOf(command.id, stream);
      const file = command.kept_bytes > 0 ? await openOutput(path, { changed }) : undefined;
      if (file && file.end > file.start) {
        // After a power cut it may be shorter than what was reported: readers find a gap there.
        await file.skip(bytes);
        return file;
      }
      const tail = command[stream];
      const kept = newOutput('', { changed, memoryBytes: Number.POSITIVE_INFINITY });
      await kept.skip(bytes - tail.length);
      if (tail.length > 0) await kept.append(tail);
      return kept;
    };
    return new Output({ stdout: await ended('stdout'), stderr: await ended('stderr') }, changed, this);
  }

  remove(ids: readonly string[]): void {
    for (const id of ids) {
      rm(join(this.#directory, id), { recursive: true, force: true }).catch((error: unknown) => {
        this.log.warn({ err: error, command_id: id }, 'the output of a command could not be removed');
      });
    }
  }

  /** Removes files of commands that went while no broker ran. */
  async removeAllBut(ids: ReadonlySet<string>): Promise<void> {
    // The directory is made with the first output that needs it.
    for (const id of await readdir(this.#directory).catch(() => [])) {
      if (!ids.has(id)) await rm(join(this.#directory, id), { recursive: true, force: true });
    }
  }

  /** Whether so many bytes more leave the disk enough for everything else: a runaway command must not fill it. */
  async hasSpaceFor(bytes: number): Promise<boolean> {
    this.#unchecked += bytes;
    if (this.#unchecked < checkEveryBytes) return this.#hasSpace;
    this.#unchecked = 0;
    const before = this.#hasSpace;
    const space = await statfs(this.root).catch(() => undefined);
    this.#hasSpace =
      !space ||
      space.bavail * space.bsize > Math.min(reserveBytes, reserveShare * space.blocks * space.bsize);
    if (before && !this.#hasSpace) {
      const { root } = this;
      this.log.error({ root }, 'the disk is nearly full: output of commands is not stored any more');
    }
    return this.#hasSpace;
  }

  #pathOf(id: string, stream: Stream): string {
    return join(this.#directory, id, stream);
  }
}

async function tailOf(log: OutputLog, most: number): Promise<Buffer> {
  let pieces: Buffer[] = [];
  const { end } = log;
  for (let at = Math.max(log.start, end - most); at < end; ) {
    const { offset, data } = await log.read(at, Math.min(readBytes, end - at));
    if (offset > at) pieces = [];
    if (data.length === 0) return data;
    pieces.push(data);
    at = offset + data.length;
  }
  // What came meanwhile may have pushed the first of them out of the window.
  return Buffer.concat(pieces);
}
