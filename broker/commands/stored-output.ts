// Stores the broker's copy of the output of commands: small output in memory, larger output in files.
import { readdir, rm, statfs } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import type { Logger } from '../../shared/logger.ts';
import { OutputLog, openOutput } from '../../shared/output-log.ts';
import { Wake } from '../../shared/wait-for-change.ts';

export const streams = ['stdout', 'stderr'] as const;
export type Stream = (typeof streams)[number];

/** The record of an ended command has at most this many bytes of each stream: the last ones. */
const tailBytes = 1024 * 1024;
/** Output of at most this many bytes is stored in memory and not in a file, because most commands print little. */
const memoryBytes = 64 * 1024;
const readBytes = 256 * 1024;

/** Both output streams of a command; `changed` wakes readers and requests that wait for the command's start or end. */
export class Output {
  readonly stdout: OutputLog;
  readonly stderr: OutputLog;
  readonly changed: Wake;
  /** True once the broker is stopping, or another broker owns the machine. Readers must not wait for more output. */
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
   * Appends bytes that begin at `offset`, except those that the stream already has. Never rejects: bytes that
   * cannot be stored become a gap.
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
      this.#disk.log.error({ err: error }, 'output of a command could not be written to disk and is lost');
    });
  }

  /**
   * Returns the end of a stream: at most `most` bytes, all of them after the last gap in the output. Never rejects: the
   * result is empty if the bytes cannot be read.
   */
  async tail(stream: Stream, most = tailBytes): Promise<Buffer> {
    try {
      return await tailOf(this[stream], most);
    } catch (error) {
      this.#disk.log.error(
        { err: error, stream },
        'output of a command could not be read: the answer is sent without it',
      );
      return Buffer.alloc(0);
    }
  }

  /** True while no output has been reported. There is then nothing to read or close. */
  get silent(): boolean {
    return !this.#reported && this.stdout.end === 0 && this.stderr.end === 0;
  }

  /** Returns the start and end offsets of both streams, and the number of their bytes in files. */
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

  /** Returns the output fields for the record of an ended command. Never rejects. */
  async final() {
    if (this.silent) return this.extent();
    const tails = { stdout: await this.tail('stdout'), stderr: await this.tail('stderr') };
    // The agent deletes its copy once the record is on disk, so the broker's files must survive a power cut.
    for (const stream of streams) {
      await this[stream].sync(this.#disk.root).catch(async (error: unknown) => {
        this.#disk.log.error(
          { err: error, stream },
          'an output file of a command could not be synced to disk and is deleted; only the last MiB of this output stays, in the database',
        );
        // A power cut may destroy an unsynced file. The file is removed, so that the command's record does not refer to
        // it.
        await this[stream].remove().catch(() => {});
      });
    }
    const extent = this.extent();
    // If a stream has no file, its first stored byte is the first byte of the tail in the record.
    for (const stream of streams)
      if (this[stream].size === 0) extent[`${stream}_start`] = this[stream].end - tails[stream].length;
    return { ...tails, ...extent };
  }

  /** From now on, append() does not wait for slow readers. Call this when the command must end or the broker stops. */
  release(): void {
    for (const stream of streams) this[stream].release();
  }

  /** Wakes all waiting readers and requests. Call it when the broker stops or another broker owns the machine. */
  stop(): void {
    this.stopped = true;
    this.release();
    this.changed.wake();
  }

  async close(): Promise<void> {
    await Promise.all(streams.map((stream) => this[stream].close()));
  }
}

/**
 * Disk space that command output leaves free for history and state: the smaller of `reserveBytes` and the share
 * `reserveShare` of the disk.
 */
const reserveBytes = 256 * 1024 * 1024;
const reserveShare = 0.1;
/** Bytes of output after which free space is checked again. */
const checkEveryBytes = 1024 * 1024;

/** Output fields in the record of a command that has ended. */
type Ended = Record<Stream, Buffer> & Record<`${Stream}_bytes`, number> & { id: string; kept_bytes: number };

/** The directory of all output. Each command that needs files has a directory in it. */
export class OutputDirectory {
  /** The data directory. A sync of an output file also syncs the directories on the path from here to the file. */
  readonly root: string;
  readonly log: Logger;
  readonly #directory: string;
  /** Resolves after all removals by drop(). The machine may come back at once, so reopen() waits for them. */
  #removed: Promise<void> = Promise.resolve();
  #unchecked = checkEveryBytes;
  #hasSpace = true;

  constructor(directory: string, log: Logger) {
    this.root = dirname(directory);
    this.log = log;
    this.#directory = directory;
  }

  /** Creates the output of a new command. */
  fresh(id: string): Output {
    const changed = new Wake();
    const fresh = (stream: Stream) => new OutputLog(this.#pathOf(id, stream), { changed, memoryBytes });
    return new Output({ stdout: fresh('stdout'), stderr: fresh('stderr') }, changed, this);
  }

  /**
   * Opens the output of a command that had not ended when an earlier broker process stopped. More output may
   * come.
   */
  async reopen(id: string): Promise<Output> {
    await this.#removed;
    const changed = new Wake();
    const reopen = (stream: Stream) => openOutput(this.#pathOf(id, stream), { changed, memoryBytes });
    return new Output({ stdout: await reopen('stdout'), stderr: await reopen('stderr') }, changed, this);
  }

  /** Opens the output of an ended command: its files, or the tail in its record when it has no files. */
  async ofEnded(command: Ended): Promise<Output> {
    const changed = new Wake();
    const ended = async (stream: Stream): Promise<OutputLog> => {
      const bytes = command[`${stream}_bytes`];
      const path = this.#pathOf(command.id, stream);
      const file = command.kept_bytes > 0 ? await openOutput(path, { changed }) : undefined;
      if (file && file.end > file.start) {
        // After a power cut the file may be shorter than the record says. Readers get a gap for the missing
        // bytes.
        await file.skip(bytes);
        return file;
      }
      const tail = command[stream];
      const tailOnly = new OutputLog('', { changed, memoryBytes: Number.POSITIVE_INFINITY });
      await tailOnly.skip(bytes - tail.length);
      if (tail.length > 0) await tailOnly.append(tail);
      return tailOnly;
    };
    return new Output({ stdout: await ended('stdout'), stderr: await ended('stderr') }, changed, this);
  }

  remove(ids: readonly string[]): void {
    for (const id of ids) void this.#remove(id);
  }

  /** Closes the output of a command whose machine another broker owns now, and removes its files. Never rejects. */
  drop(id: string, output: Output): Promise<void> {
    const before = this.#removed;
    this.#removed = this.#remove(id, output.close()).then(() => before);
    return this.#removed;
  }

  async #remove(id: string, closed?: Promise<void>): Promise<void> {
    try {
      await closed;
      await rm(join(this.#directory, id), { recursive: true, force: true });
    } catch (error) {
      this.log.warn(
        { err: error, command_id: id },
        'the output files of a command could not be removed; the broker removes them when it next starts',
      );
    }
  }

  /**
   * Removes the files of all commands except these. Call it when the broker starts, because an earlier process may have
   * deleted a record without its files.
   */
  async removeAllBut(ids: ReadonlySet<string>): Promise<void> {
    for (const id of await this.ids())
      if (!ids.has(id)) await rm(join(this.#directory, id), { recursive: true, force: true });
  }

  /** The ids of the commands that have files. */
  ids(): Promise<string[]> {
    // The directory exists only if some output was written to a file.
    return readdir(this.#directory).catch(() => []);
  }

  /**
   * True unless the disk is nearly full: a runaway command must not fill it. The calls add up `bytes`. The free space
   * is checked again each time this sum reaches `checkEveryBytes`; while the disk is nearly full, at every call.
   */
  async hasSpaceFor(bytes: number): Promise<boolean> {
    this.#unchecked += bytes;
    if (this.#hasSpace && this.#unchecked < checkEveryBytes) return true;
    this.#unchecked = 0;
    const before = this.#hasSpace;
    const space = await statfs(this.root).catch(() => undefined);
    this.#hasSpace =
      !space ||
      space.bavail * space.bsize > Math.min(reserveBytes, reserveShare * space.blocks * space.bsize);
    if (before && !this.#hasSpace) {
      const { root } = this;
      this.log.error(
        { root },
        'the disk is nearly full: output of commands is not stored until space is free',
      );
    }
    return this.#hasSpace;
  }

  #pathOf(id: string, stream: Stream): string {
    return join(this.#directory, id, stream);
  }
}

/** Returns the last bytes of a log, `most` of them or fewer, without a gap between them. */
async function tailOf(log: OutputLog, most: number): Promise<Buffer> {
  let pieces: Buffer[] = [];
  const { end } = log;
  for (let at = Math.max(log.start, end - most); at < end; ) {
    const { offset, data } = await log.read(at, Math.min(readBytes, end - at));
    // Bytes between `at` and `offset` are no longer stored, so the result begins after them.
    if (offset > at) pieces = [];
    if (data.length === 0) return data;
    pieces.push(data);
    at = offset + data.length;
  }
  return Buffer.concat(pieces);
}
