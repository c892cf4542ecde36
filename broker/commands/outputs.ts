// The output of commands on the broker's disk: where it lies, and what goes when it is too much.
import { readdir, rm, statfs } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import type { Logger } from '../../shared/logger.ts';
import type { History } from '../history.ts';
import { endedOutput, freshOutput, type Output, reopenOutput, type Stream } from './output.ts';
import type { Command, Records } from './records.ts';

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

/** Commands whose files go in one step. */
const dropStep = 100;

/** Opens the room in a directory of its own. `keepBytes`: what files of ended commands may take in all. */
export async function openOutputs(
  directory: string,
  rooms: { history: History; records: Records; log: Logger },
  keepBytes: number,
): Promise<Outputs> {
  const { history, records, log } = rooms;
  await removeStrangers(directory, records);
  let total = records.keptBytes();
  let dropping = false;
  const disk = { root: dirname(directory), hasRoomFor: watchRoom(directory, log), log };

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

  const placesOf =
    (id: string) =>
    (stream: Stream): string =>
      join(directory, id, stream);

  return {
    fresh: (id) => freshOutput(placesOf(id), disk),
    reopen: (id) => reopenOutput(placesOf(id), disk),
    of: (command) => endedOutput(command, placesOf(command.id), disk),
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
  const known = new Set(records.withFiles());
  // It is made with the first output that needs it.
  for (const id of await readdir(directory).catch(() => [])) {
    if (!known.has(id)) await rm(join(directory, id), { recursive: true, force: true });
  }
}

/** Free space that outputs leave to history and state, and the share of a small disk that is as good. */
const reserveBytes = 256 * 1024 * 1024;
const reserveShare = 0.1;
/** The disk is asked again after so many bytes. */
const askEveryBytes = 1024 * 1024;

/** A runaway command must not take the disk from everybody. */
function watchRoom(directory: string, log: Logger): (bytes: number) => Promise<boolean> {
  let since = askEveryBytes;
  let room = true;
  return async (bytes) => {
    since += bytes;
    if (since < askEveryBytes) return room;
    since = 0;
    const space = await statfs(dirname(directory)).catch(() => undefined);
    const before = room;
    const [free, all] = [
      (space?.bavail ?? 1) * (space?.bsize ?? 1),
      (space?.blocks ?? 0) * (space?.bsize ?? 0),
    ];
    room = free > Math.min(reserveBytes, reserveShare * all);
    if (before && !room)
      log.error({ directory }, 'the disk is nearly full: output of commands is not kept any more');
    return room;
  };
}
