// Moves a file, symlink or directory: one rename, or between file systems a whole copy that is renamed into place
// before the source goes.
import { chmod, rename } from 'node:fs/promises';
import { errnoOf, fromErrno } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import type { AgentMethods } from '../../shared/rpc.ts';
import { failingAs } from './abort.ts';
import { ancestry, identify, identityOf } from './beneath/boundary.ts';
import { letGo, pathOf, pin } from './beneath/descent.ts';
import type { Beneath, Entry } from './beneath/index.ts';
import { type Bytes, bytes, demandFolder, fault, shown, type Target, targetOf } from './beneath/path.ts';
import { lookAt } from './draft/index.ts';
import { demandPlace, type Placing, place, syncDirectory } from './draft/place.ts';
import { SideRoom } from './draft/sideroom.ts';
import type { Temporary } from './draft/temporary.ts';
import type { AskPeople } from './people.ts';
import { demandFound } from './remove.ts';
import { entryOf } from './stat.ts';
import { drop } from './tree/clear.ts';
import { duplicate } from './tree/duplicate.ts';

export interface Moving {
  beneath: Beneath;
  /** Where a copy may come from, which is more. */
  reading: Beneath;
  temporary: Temporary;
  people: AskPeople;
  home: Bytes;
  log: Logger;
}

/** What is on its way, and where to. */
export interface Transfer {
  source: Target;
  destination: Target;
  from: Entry;
  to: Entry;
  found: NonNullable<Entry['found']>;
  overwrite: boolean;
  signal: AbortSignal;
}

export function openMover(moving: Moving): AgentMethods['moveFile'] {
  const { beneath, people, home } = moving;
  return (request, { signal }) => {
    const [source, destination] = [targetOf(request.source, home), targetOf(request.destination, home)];
    return failingAs(source.path, signal, async () => {
      const from = await beneath.name(source.path);
      try {
        const found = demandFound(from, source.path);
        await beneath.boundary.demandLoose(found.stats, home, source.path);
        const to = await beneath.name(destination.path);
        try {
          const { overwrite } = request;
          const transfer = { source, destination, from, to, found, overwrite, signal };
          if (!(await isSame(transfer))) await move(moving, transfer);
          const { path } = destination;
          const stats = (await lookAt(to.at)) ?? found.stats;
          return { entry: await entryOf(beneath, to, { path, stats, people: await people() }) };
        } finally {
          to.close();
        }
      } finally {
        from.close();
      }
    });
  };
}

async function isSame({ from, to }: Transfer): Promise<boolean> {
  if (from.name !== to.name) return false;
  return (await identify(from.directory)) === (await identify(to.directory));
}

/** Refuses what can never be, before anything is touched. */
export async function demandTransfer(
  { beneath, home }: Pick<Moving, 'beneath' | 'home'>,
  { source, destination, found, to, overwrite }: Transfer,
): Promise<void> {
  const directory = found.stats.isDirectory();
  demandFolder(source, found.stats);
  demandFolder(destination, found.stats);
  if (directory && (await ancestry(to.directory)).includes(identityOf(found.stats)))
    throw fault('invalid_path', destination.path, `lies in ${shown(source.path)} itself`);
  demandPlace(to.found?.stats, { directory, overwrite, path: destination.path });
  if (to.found) await beneath.boundary.demandLoose(to.found.stats, home, destination.path);
}

async function move(moving: Moving, transfer: Transfer): Promise<void> {
  const { from, to, signal, destination } = transfer;
  await demandTransfer(moving, transfer);
  signal.throwIfAborted();
  try {
    await place(placing(transfer, from.at));
    await dropTwin(transfer);
  } catch (error) {
    if (errnoOf(error) !== 'EXDEV') throw fromErrno(error, shown(destination.path));
    await moveAcross(moving, transfer);
  }
  await syncDirectory(to.directory);
  await syncDirectory(from.directory);
}

/** Where both names are hard links of one file, rename does nothing. Names that differ only by case may be one name. */
async function dropTwin({ from, to, found }: Transfer): Promise<void> {
  const { stats } = found;
  if (stats.isDirectory() || !to.found || identityOf(to.found.stats) !== identityOf(stats)) return;
  const [old, now] = [from, to].map(({ name }) => shown(name).toLowerCase());
  const sameDirectory = (await identify(from.directory)) === (await identify(to.directory));
  if (old !== now || !sameDirectory) await drop(from.at, false);
}

/** Gives what is at `from` the name of the destination. */
const placing = ({ to, found, overwrite, destination }: Transfer, from: Bytes): Placing => ({
  from,
  to: to.at,
  directory: found.stats.isDirectory(),
  overwrite,
  path: destination.path,
});

async function moveAcross({ beneath, temporary, log }: Moving, transfer: Transfer): Promise<void> {
  const { from, to, found, source, signal } = transfer;
  const arriving = await SideRoom.open(to.directory, temporary, log);
  try {
    // Also shows whether the source may leave, before anything is copied.
    const leaving = await SideRoom.open(from.directory, temporary, log);
    try {
      const what = { parent: from.directory, name: from.name, at: from.at, stats: found.stats };
      const { boundary } = beneath;
      await duplicate(what, arriving.content, { boundary, path: source.path, signal, moves: true });
      const arrived = await arrive(transfer, arriving.content);
      await leave(transfer, leaving.content).catch(async (error: unknown) => {
        // The source stays, so what has just arrived must not, unless something has gone for it.
        if (!to.found && (await identityAt(to.at)) === arrived)
          await rename(bytes(to.at), bytes(arriving.content));
        throw error;
      });
    } finally {
      await leaving.end();
    }
  } finally {
    await arriving.end();
  }
}

/** Gives a finished copy the name of the destination, as far as that is still allowed; tells what it is. */
export async function arrive(transfer: Transfer, content: Bytes): Promise<string> {
  const { to, signal, destination } = transfer;
  await to.recheck(await lookAt(to.at));
  const handle = await pin(content);
  try {
    const stats = await handle.stat({ bigint: true });
    const mode = Number(stats.mode) & 0o7777;
    // Who may not write in a directory may not move it elsewhere, not even its owner.
    const closed = stats.isDirectory() && (mode & 0o200) === 0;
    if (closed) await chmod(pathOf(handle), mode | 0o200);
    signal.throwIfAborted();
    await place(placing(transfer, content)).catch((error: unknown) => {
      throw fromErrno(error, shown(destination.path));
    });
    if (closed) await chmod(pathOf(handle), mode);
    await syncDirectory(to.directory);
    return identityOf(stats);
  } finally {
    letGo(handle);
  }
}

/** The source leaves its place in one step, too: until then it is untouched, afterwards its removal is only tidying. */
async function leave(transfer: Transfer, away: Bytes): Promise<void> {
  const { from, found, source } = transfer;
  await rename(bytes(from.at), bytes(away));
  if ((await identityAt(away)) === identityOf(found.stats)) return;
  const directory = (await lookAt(away))?.isDirectory() === true;
  await place({ from: away, to: from.at, directory, overwrite: false, path: source.path });
  throw fault('conflict', source.path, 'was replaced while it was moved, try again');
}

async function identityAt(at: Bytes): Promise<string | undefined> {
  const stats = await lookAt(at);
  return stats && identityOf(stats);
}
