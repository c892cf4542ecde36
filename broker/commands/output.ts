// Both outputs of one command on the broker's side: in memory while they are small, in files when they grow.
import type { Logger } from '../../shared/logger.ts';
import { newOutput, type OutputLog, openOutput, Wake } from '../../shared/output.ts';

export const streams = ['stdout', 'stderr'] as const;
export type Stream = (typeof streams)[number];

/** What a record keeps of each stream. */
const tailBytes = 1024 * 1024;
/** Below this a stream has no file: most commands say little. */
const memoryBytes = 64 * 1024;
const readBytes = 256 * 1024;

/** Where outputs lie. */
export interface Disk {
  /** The data directory: names below it are synced with the files. */
  root: string;
  /** Whether so many bytes more leave enough to everybody else. */
  hasRoomFor(bytes: number): Promise<boolean>;
  log: Logger;
}

/** Both streams of a command; `changed` wakes their readers. */
export class Output {
  readonly stdout: OutputLog;
  readonly stderr: OutputLog;
  readonly changed: Wake;
  readonly #disk: Disk;
  #told = false;

  constructor({ stdout, stderr }: Record<Stream, OutputLog>, changed: Wake, disk: Disk) {
    this.stdout = stdout;
    this.stderr = stderr;
    this.changed = changed;
    this.#disk = disk;
  }

  /**
   * Takes bytes that lie at `offset`; what was taken already is left out. Never rejects: what the disk does not take, or
   * must not, is a gap.
   */
  async keep(stream: Stream, offset: number, data: Buffer): Promise<void> {
    this.#told = true;
    const output = this[stream];
    if (offset > output.end) await output.skip(offset);
    const fresh = data.subarray(Math.max(0, output.end - offset));
    if (fresh.length === 0) return;
    const inMemory = output.size === 0 && output.end - output.start + fresh.length <= memoryBytes;
    if (!inMemory && !(await this.#disk.hasRoomFor(fresh.length)))
      return output.skip(output.end + fresh.length);
    await output.append(fresh).catch((error: unknown) => {
      this.#disk.log.error({ err: error }, 'output of a command could not be kept');
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

  /** Nothing has come or is on its way: there is nothing to be read, nor to be given back. */
  get silent(): boolean {
    return !this.#told && this.stdout.end === 0 && this.stderr.end === 0;
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
   * Closes the files and has them survive a power cut; reading goes on. A stream that cannot be synced loses its files,
   * for a record must not promise them. Never rejects.
   */
  async sync(): Promise<void> {
    for (const stream of streams) {
      await this[stream].sync(this.#disk.root).catch(async (error: unknown) => {
        this.#disk.log.error({ err: error, stream }, 'the output of a command could not be synced to disk');
        await this[stream].remove().catch(() => {});
      });
    }
  }
}

/** Of a command that is new; `pathOf`: the directory of a stream. */
export function freshOutput(pathOf: (stream: Stream) => string, disk: Disk): Output {
  const changed = new Wake();
  const fresh = (stream: Stream): OutputLog => newOutput(pathOf(stream), { changed, memoryBytes });
  return new Output({ stdout: fresh('stdout'), stderr: fresh('stderr') }, changed, disk);
}

/** What the disk has of one; more may come. */
export async function reopenOutput(pathOf: (stream: Stream) => string, disk: Disk): Promise<Output> {
  const changed = new Wake();
  const reopen = (stream: Stream) => openOutput(pathOf(stream), { changed, memoryBytes });
  return new Output({ stdout: await reopen('stdout'), stderr: await reopen('stderr') }, changed, disk);
}

/** Of one that has ended: what the disk has, or where that is nothing, the end that its record keeps. */
export async function endedOutput(
  command: Record<Stream, Buffer> & Record<`${Stream}_bytes`, number> & { kept_bytes: number },
  pathOf: (stream: Stream) => string,
  disk: Disk,
): Promise<Output> {
  const changed = new Wake();
  const ended = async (stream: Stream): Promise<OutputLog> => {
    const bytes = command[`${stream}_bytes`];
    const file = command.kept_bytes > 0 ? await openOutput(pathOf(stream), { changed }) : undefined;
    if (file && file.end > file.start) {
      // After a power cut it may be shorter than what was told: readers find a gap there.
      await file.skip(bytes);
      return file;
    }
    const tail = command[stream];
    const kept = newOutput('', { changed, memoryBytes: Number.POSITIVE_INFINITY });
    await kept.skip(bytes - tail.length);
    if (tail.length > 0) await kept.append(tail);
    return kept;
  };
  return new Output({ stdout: await ended('stdout'), stderr: await ended('stderr') }, changed, disk);
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
