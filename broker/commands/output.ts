// Output of commands on the broker: in memory while it is small, in files when it grows, dropped when it is too much.
import { mkdir, readdir, rm } from 'node:fs/promises';
import { join } from 'node:path';
import type { Logger } from '../../shared/logger.ts';
import { newOutput, type OutputLog, openOutput, Wake } from '../../shared/output.ts';
import type { History } from '../history.ts';
import type { Command, Records } from './records.ts';

/** Both streams of a command; `changed` wakes their readers. */
export interface Output {
  stdout: OutputLog;
  stderr: OutputLog;
  changed: Wake;
}
export const streams = ['stdout', 'stderr'] as const;
export type Stream = (typeof streams)[number];

export interface Outputs {
  /** Of a command that is new. */
  fresh(id: string): Output;
  /** Of one that an earlier broker had begun to follow. */
  reopen(id: string): Promise<Output>;
  /** Of one that has ended: its files, or what its record keeps. */
  of(command: Command): Promise<Output>;
  /** A command has ended with so many bytes in files: where that is too much in all, the oldest go. */
  ended(bytes: number): void;
  /** These commands are no longer known. */
  forget(ids: readonly string[]): void;
}

/** What a record keeps of each stream. */
const tailBytes = 1024 * 1024;
/** Below this a stream has no file: most commands say little. */
const memoryBytes = 64 * 1024;
const readBytes = 256 * 1024;
/** Commands whose files go in one step. */
const dropStep = 100;

/** Opens the room in a directory of its own. `keepBytes`: what files of ended commands may take in all. */
export async function openOutputs(
  directory: string,
  rooms: { history: History; records: Records; log: Logger },
  keepBytes: number,
): Promise<Outputs> {
  const { history, records, log } = rooms;
  await mkdir(directory, { recursive: true, mode: 0o700 });
  await removeStrangers(directory, records);
  let total = records.keptBytes();
  let dropping = false;

  function removeFiles(ids: readonly string[]): void {
    for (const id of ids) {
      rm(join(directory, id), { recursive: true, force: true }).catch((error: unknown) => {
        log.warn({ err: error, command_id: id }, 'the output of a command could not be removed');
      });
    }
  }

  async function drop(): Promise<void> {
    while (total > keepBytes) {
      const oldest = records.kept(dropStep);
      if (oldest.length === 0) break;
      const going: string[] = [];
      let freed = 0;
      for (const { id, kept_bytes } of oldest) {
        if (total - freed <= keepBytes) break;
        going.push(id);
        freed += kept_bytes;
      }
      await history.write(() => {
        for (const id of going) records.dropped(id);
        total -= freed;
      });
      removeFiles(going);
    }
  }

  function place(id: string, stream: Stream): string {
    return join(directory, id, stream);
  }

  return {
    fresh(id) {
      const changed = new Wake();
      const options = { changed, memoryBytes };
      return {
        stdout: newOutput(place(id, 'stdout'), options),
        stderr: newOutput(place(id, 'stderr'), options),
        changed,
      };
    },
    async reopen(id) {
      const changed = new Wake();
      const options = { changed, memoryBytes };
      const [stdout, stderr] = await Promise.all([
        openOutput(place(id, 'stdout'), options),
        openOutput(place(id, 'stderr'), options),
      ]);
      return { stdout, stderr, changed };
    },
    async of(command) {
      const changed = new Wake();
      const [stdout, stderr] = await Promise.all(
        streams.map((stream) => ended(command, stream, place(command.id, stream), changed)),
      );
      // One for each of the two.
      return { stdout, stderr, changed } as Output;
    },
    ended(bytes) {
      total += bytes;
      if (total <= keepBytes || dropping) return;
      dropping = true;
      drop()
        .catch((error: unknown) => log.error({ err: error }, 'old output could not be dropped'))
        .finally(() => {
          dropping = false;
        });
    },
    forget(ids) {
      // Their rows have gone, and with them what they counted.
      total = records.keptBytes();
      removeFiles(ids);
    },
  };
}

/** Files of commands that went while no broker ran. */
async function removeStrangers(directory: string, records: Records): Promise<void> {
  for (const id of await readdir(directory)) {
    const command = records.find(id);
    const known = command && (command.finished_at === null || command.kept_bytes > 0);
    if (!known) await rm(join(directory, id), { recursive: true, force: true });
  }
}

async function ended(command: Command, stream: Stream, path: string, changed: Wake): Promise<OutputLog> {
  const bytes = command[`${stream}_bytes`];
  const tail = command[stream];
  const file = command.kept_bytes > 0 ? await openOutput(path, { changed }) : undefined;
  if (file && file.end > file.start) {
    // After a power cut it may be shorter than what was told: readers find a gap there.
    await file.skip(bytes);
    return file;
  }
  const log = newOutput(path, { changed, memoryBytes: Number.POSITIVE_INFINITY });
  await log.skip(bytes - tail.length);
  if (tail.length > 0) await log.append(tail);
  return log;
}

/** The last bytes of a log that lie together, at most `most`. */
export async function tailOf(log: OutputLog, most = tailBytes): Promise<Buffer> {
  let pieces: Buffer[] = [];
  const { end } = log;
  for (let at = Math.max(log.start, end - most); at < end; ) {
    const { offset, data } = await log.read(at, Math.min(readBytes, end - at));
    if (offset > at) pieces = [];
    if (data.length === 0) break;
    pieces.push(data);
    at = offset + data.length;
  }
  // What came meanwhile may have pushed the first of them out of the window.
  return Buffer.concat(pieces);
}
