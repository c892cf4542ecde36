// Lands the entries of an archive on the ground: each complete and durable under a temporary name first, then in
// its place in one step. Small files are finished while the next ones are read, many at once.
import { type BigIntStats, constants } from 'node:fs';
import { type FileHandle, link, lutimes, open, rename, symlink, unlink } from 'node:fs/promises';
import { posix } from 'node:path';
import { AppError, errnoOf, fromErrno } from '../../../shared/errors.ts';
import type { Logger } from '../../../shared/logger.ts';
import {
  demandInside,
  demandTarget,
  entryFault,
  pathOfEntry,
  type TarEntry,
} from '../../../shared/tar/index.ts';
import { type Bytes, bytes, shown } from '../beneath/path.ts';
import { lookAt } from '../draft/index.ts';
import { linkAs } from '../draft/place.ts';
import { SideRoom } from '../draft/sideroom.ts';
import type { Temporary } from '../draft/temporary.ts';
import { type Ground, type Plot, setTimes } from './ground.ts';

const { O_CREAT, O_EXCL, O_NOCTTY, O_NOFOLLOW, O_WRONLY } = constants;
/** A file up to this size is held in memory until it is on the disk. */
const smallBytes = 256 * 1024;
/** Small files on their way to the disk at once. */
const mostUnderway = 16;
/** Bytes after which the disk is set to work, so that the last fsync of a large file does not take minutes. */
const flushBytes = 64 * 1024 * 1024;

export interface LandingOptions {
  ground: Ground;
  /** Where temporary files may lie that are renamed into the ground; else one is made on each mount. */
  room?: SideRoom | undefined;
  temporary: Temporary;
  overwrite: boolean;
  /** A copy of a whole directory: its symlinks stay as they are, wherever they lead, as nothing lands through one. */
  whole: boolean;
  log: Logger;
}

/** One entry, and where it goes. */
interface Arrival {
  entry: TarEntry;
  /** From the ground. */
  path: Bytes;
  plot: Plot;
  name: Bytes;
}

export class Landing {
  readonly #options: LandingOptions;
  /** For temporary files, by the mount on which they can be renamed. */
  readonly #rooms = new Map<string, { room: SideRoom; plot: Plot }>();
  readonly #underway = new Map<Bytes, Promise<void>>();
  #failure: { reason: unknown } | undefined;
  #names = 0;
  files = 0;
  bytes = 0;

  constructor(options: LandingOptions) {
    this.#options = options;
  }

  /** Small files may be on their way still when it resolves; a failure of theirs is thrown by a later call. */
  async land(entry: TarEntry): Promise<void> {
    const path = pathOfEntry(entry.name);
    await this.#quiet(path);
    await asEntry(path, () =>
      entry.kind === 'directory' ? this.#directory(entry, path) : this.#one(entry, path),
    );
  }

  /** Everything has landed when it resolves; the temporary names are gone. */
  async settle(): Promise<void> {
    await this.end();
    if (this.#failure) throw this.#failure.reason;
  }

  /** Leaves nothing temporary behind. */
  async end(): Promise<void> {
    await Promise.all(this.#underway.values());
    for (const { room, plot } of this.#rooms.values()) {
      await room.end();
      plot.users -= 1;
    }
    this.#rooms.clear();
  }

  async #directory({ mode, mtimeNs }: TarEntry, path: Bytes): Promise<void> {
    const { ground } = this.#options;
    await ground.directory(path);
    ground.describe(path, { mode: mode & 0o777, mtimeNs });
  }

  async #one(entry: TarEntry, path: Bytes): Promise<void> {
    if (path === '') throw entryFault('invalid_path', entry.name, 'names the directory itself');
    // Before a directory is made for it.
    const demandLink = this.#options.whole ? demandTarget : demandInside;
    if (entry.kind === 'symlink') demandLink(path, entry.target ?? '');
    if (entry.kind === 'link') pathOfEntry(entry.target ?? '');
    const plot = await this.#options.ground.directory(parentOf(path));
    const arrival: Arrival = { entry, path, plot, name: posix.basename(path) };
    plot.users += 1;
    try {
      if (entry.kind === 'file') await this.#file(arrival);
      else await this.#link(arrival);
    } finally {
      plot.users -= 1;
    }
  }

  async #file(arrival: Arrival): Promise<void> {
    const { entry, plot, path } = arrival;
    const at = await this.#temporaryFor(plot);
    this.files += 1;
    this.bytes += entry.size;
    if (entry.size > smallBytes) {
      // Before its bytes are read for nothing.
      await this.#demandRoom(arrival);
      return this.#write(arrival, at, entry.body);
    }
    const pieces: Buffer[] = [];
    for await (const piece of entry.body) pieces.push(piece);
    while (this.#underway.size >= mostUnderway) await Promise.race(this.#underway.values());
    plot.users += 1;
    const work = asEntry(path, () => this.#write(arrival, at, pieces))
      .catch((reason: unknown) => {
        this.#failure ??= { reason };
      })
      .finally(() => {
        plot.users -= 1;
        this.#underway.delete(path);
      });
    this.#underway.set(path, work);
  }

  async #write(arrival: Arrival, at: Bytes, pieces: AsyncIterable<Buffer> | Buffer[]): Promise<void> {
    const { mode, mtimeNs } = arrival.entry;
    const handle = await open(bytes(at), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_NOCTTY, 0o600);
    try {
      await writeAll(handle, pieces);
      // Setuid, setgid and sticky are not what an archive may hand out; the umask has no say.
      await handle.chmod(mode & 0o777);
      await setTimes(handle, mtimeNs);
      await handle.sync();
    } finally {
      await handle.close();
    }
    await this.#place(arrival, at);
  }

  async #link(arrival: Arrival): Promise<void> {
    const { entry, path, plot } = arrival;
    const at = await this.#temporaryFor(plot);
    if (entry.kind === 'link') await this.#hardLink(path, entry.target ?? '', at);
    else {
      await symlink(bytes(entry.target ?? ''), bytes(at));
      const seconds = Number(entry.mtimeNs) / 1e9;
      await lutimes(bytes(at), seconds, seconds);
    }
    await this.#place(arrival, at);
    // Renaming a file to another name of itself does nothing.
    await unlink(bytes(at)).catch(ignoreMissing);
  }

  /** To a regular file in the directory, which an archive has ahead of the link. */
  async #hardLink(path: Bytes, target: Bytes, at: Bytes): Promise<void> {
    const { ground } = this.#options;
    const inside = pathOfEntry(target);
    await this.#quiet(inside);
    const refuse = () => entryFault('invalid_path', path, 'is a hard link to what is no file in the archive');
    if (inside === '') throw refuse();
    const plot = await ground.directory(parentOf(inside), false).catch((error: unknown) => {
      throw errnoOf(error) === 'ENOENT' ? refuse() : error;
    });
    await link(bytes(`${plot.at}/${posix.basename(inside)}`), bytes(at)).catch((error: unknown) => {
      throw errnoOf(error) === 'ENOENT' ? refuse() : error;
    });
    // Judged by what the link has got, which nobody can swap any more.
    const got = await lookAt(at);
    if (!got?.isFile()) throw refuse();
    ground.demandFree(plot, posix.basename(inside), got, path);
  }

  async #demandRoom({ plot, name, path }: Arrival): Promise<void> {
    const present = await lookAt(`${plot.at}/${name}`);
    this.#options.ground.demandFree(plot, name, present, path);
    if (present) demandReplaceable(present, path, this.#options.overwrite);
  }

  async #place(arrival: Arrival, at: Bytes): Promise<void> {
    const { plot, name, path } = arrival;
    const to = `${plot.at}/${name}`;
    if (this.#options.overwrite) {
      await this.#demandRoom(arrival);
      await rename(bytes(at), bytes(to));
    } else {
      this.#options.ground.demandFree(plot, name, undefined, path);
      await linkAs(at, to, path).catch((error: unknown) => this.#taken(arrival, error));
      await unlink(bytes(at));
    }
  }

  async #taken(arrival: Arrival, error: unknown): Promise<never> {
    if (errnoOf(error) === 'EEXIST') await this.#demandRoom(arrival);
    throw error;
  }

  /** Waits for what is on its way to this name, to one above it, or failed anywhere. */
  async #quiet(path: Bytes): Promise<void> {
    for (let name = path; name !== ''; name = parentOf(name)) await this.#underway.get(name);
    if (this.#failure) throw this.#failure.reason;
  }

  /** A free name from where a file can be renamed into the directory. */
  async #temporaryFor(plot: Plot): Promise<Bytes> {
    const { room = await this.#roomFor(plot) } = this.#options;
    this.#names += 1;
    return `${room.content}-${this.#names}`;
  }

  async #roomFor(plot: Plot): Promise<SideRoom> {
    const known = this.#rooms.get(plot.mount);
    if (known) return known.room;
    const { temporary, log } = this.#options;
    plot.users += 1;
    const room = await SideRoom.open(plot.at, temporary, log);
    this.#rooms.set(plot.mount, { room, plot });
    return room;
  }
}

const parentOf = (path: Bytes): Bytes => path.slice(0, Math.max(0, path.lastIndexOf('/')));

/** Symlinks are replaced themselves. */
function demandReplaceable(present: BigIntStats, path: Bytes, overwrite: boolean): void {
  if (present.isDirectory()) throw entryFault('is_a_directory', path, 'a directory has this name');
  if (!overwrite) throw entryFault('already_exists', path, 'exists');
  if (!present.isFile() && !present.isSymbolicLink())
    throw entryFault('unsupported_file', path, 'something that is no regular file has this name');
}

/** Failures tell which entry they are about. */
async function asEntry(path: Bytes, work: () => Promise<void>): Promise<void> {
  try {
    await work();
  } catch (error) {
    if (error instanceof AppError || errnoOf(error) === undefined) throw error;
    const { code, message, details } = fromErrno(error, `entry ${shown(path)}`);
    throw new AppError(code, message, { ...details, entry: shown(path) }, { cause: error });
  }
}

async function writeAll(handle: FileHandle, pieces: AsyncIterable<Buffer> | Buffer[]): Promise<void> {
  let unflushed = 0;
  let flushing: Promise<unknown> = Promise.resolve();
  for await (const piece of pieces) {
    for (let at = 0; at < piece.length; ) at += (await handle.write(piece, at)).bytesWritten;
    unflushed += piece.length;
    if (unflushed < flushBytes) continue;
    unflushed = 0;
    await flushing;
    flushing = handle.datasync();
    // Its failure is thrown where it is awaited; until then nobody listens.
    flushing.catch(() => undefined);
  }
  await flushing;
}

function ignoreMissing(error: unknown): void {
  if (errnoOf(error) !== 'ENOENT') throw error;
}
