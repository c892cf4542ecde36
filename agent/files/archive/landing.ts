// Lands the entries of an archive on the ground: each complete and durable under a temporary name first, then in
// its place in one step. Small files are finished while the next ones are read, many at once.
import { type BigIntStats, constants } from 'node:fs';
import {
  type FileHandle,
  link,
  lutimes,
  mkdir,
  open,
  readlink,
  rename,
  rmdir,
  symlink,
  unlink,
} from 'node:fs/promises';
import { posix } from 'node:path';
import { AppError, errnoOf, fromErrno } from '../../../shared/errors.ts';
import type { Logger } from '../../../shared/logger.ts';
import { letGo, pathOf } from '../descent.ts';
import { lookAt } from '../draft.ts';
import { type Bytes, bytes, pathOnly, shown } from '../path.ts';
import { type Temporary, temporaryName } from '../temporary.ts';
import { type Ground, type Plot, setTimes } from './ground.ts';
import { demandInside, pathOfEntry } from './names.ts';
import { entryFault, type TarEntry } from './reader.ts';

const { O_CREAT, O_DIRECTORY, O_EXCL, O_NOCTTY, O_NOFOLLOW, O_WRONLY } = constants;
/** A file up to this size is held in memory until it is on the disk. */
const smallBytes = 256 * 1024;
/** Small files on their way to the disk at once. */
const mostUnderway = 16;
/** Bytes after which the disk is set to work, so that the last fsync of a large file does not take minutes. */
const flushBytes = 64 * 1024 * 1024;

/** A directory of temporary files, from where they can be renamed to anywhere on the same mount. */
interface Stage {
  handle: FileHandle;
  at: Bytes;
  plot: Plot;
  name: Bytes;
  recorded: Bytes | undefined;
}

export interface LandingOptions {
  ground: Ground;
  /** Absent where the whole ground is temporary. */
  temporary?: Temporary | undefined;
  overwrite: boolean;
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
  readonly #stages = new Map<string, Stage>();
  /** Temporary names in use. */
  readonly #live = new Set<Bytes>();
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
    for (const at of this.#live) await unlink(bytes(at)).catch(() => undefined);
    this.#live.clear();
    for (const [mount, stage] of this.#stages) {
      await this.#clear(stage);
      this.#stages.delete(mount);
    }
  }

  async #directory({ mode, mtimeNs }: TarEntry, path: Bytes): Promise<void> {
    const { ground } = this.#options;
    await ground.directory(path);
    ground.describe(path, { mode: mode & 0o777, mtimeNs });
  }

  async #one(entry: TarEntry, path: Bytes): Promise<void> {
    if (path === '') throw entryFault('invalid_path', entry.name, 'names the directory itself');
    // Before a directory is made for it.
    if (entry.kind === 'symlink') demandInside(path, entry.target ?? '');
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
    const stage = await this.#stageOf(plot);
    this.files += 1;
    this.bytes += entry.size;
    if (entry.size > smallBytes) {
      // Before its bytes are read for nothing.
      await this.#demandRoom(arrival);
      return this.#write(arrival, stage, entry.body);
    }
    const pieces: Buffer[] = [];
    for await (const piece of entry.body) pieces.push(piece);
    while (this.#underway.size >= mostUnderway) await Promise.race(this.#underway.values());
    plot.users += 1;
    const work = asEntry(path, () => this.#write(arrival, stage, pieces))
      .catch((reason: unknown) => {
        this.#failure ??= { reason };
      })
      .finally(() => {
        plot.users -= 1;
        this.#underway.delete(path);
      });
    this.#underway.set(path, work);
  }

  async #write(arrival: Arrival, stage: Stage, pieces: AsyncIterable<Buffer> | Buffer[]): Promise<void> {
    const { mode, mtimeNs } = arrival.entry;
    const at = this.#temporaryAt(stage);
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
    const at = this.#temporaryAt(await this.#stageOf(plot));
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
      if (errnoOf(error) === 'ENOENT') throw refuse();
      if (!['EXDEV', 'EMLINK'].includes(errnoOf(error) ?? '')) throw error;
      throw entryFault('not_supported', path, 'is a hard link that this file system cannot make');
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
    const to = bytes(`${plot.at}/${name}`);
    if (this.#options.overwrite) {
      await this.#demandRoom(arrival);
      await rename(bytes(at), to);
    } else {
      this.#options.ground.demandFree(plot, name, undefined, path);
      await link(bytes(at), to).catch((error: unknown) => this.#untaken(arrival, error));
      await unlink(bytes(at));
    }
    this.#live.delete(at);
  }

  async #untaken(arrival: Arrival, error: unknown): Promise<never> {
    if (errnoOf(error) === 'EEXIST') await this.#demandRoom(arrival);
    if (!['EPERM', 'EOPNOTSUPP'].includes(errnoOf(error) ?? '')) throw error;
    const reason = 'this file system has no hard links, which are needed to never overwrite';
    throw entryFault('not_supported', arrival.path, reason);
  }

  /** Waits for what is on its way to this name, to one above it, or failed anywhere. */
  async #quiet(path: Bytes): Promise<void> {
    for (let name = path; name !== ''; name = parentOf(name)) await this.#underway.get(name);
    if (this.#failure) throw this.#failure.reason;
  }

  #temporaryAt({ at }: Stage): Bytes {
    this.#names += 1;
    const temporary = `${at}/${this.#names}`;
    this.#live.add(temporary);
    return temporary;
  }

  async #stageOf(plot: Plot): Promise<Stage> {
    const known = this.#stages.get(plot.mount);
    if (known) return known;
    const stage = await this.#makeStage(plot);
    this.#stages.set(plot.mount, stage);
    return stage;
  }

  async #makeStage(plot: Plot): Promise<Stage> {
    const { temporary } = this.#options;
    const name = temporaryName();
    const recorded = temporary && `${await readlink(plot.at, 'latin1')}/${name}`;
    if (recorded !== undefined) await temporary?.add(recorded);
    try {
      const at = bytes(`${plot.at}/${name}`);
      await mkdir(at, 0o700);
      const handle = await open(at, pathOnly | O_DIRECTORY | O_NOFOLLOW);
      plot.users += 1;
      return { handle, at: pathOf(handle), plot, name, recorded };
    } catch (error) {
      if (recorded !== undefined) await temporary?.drop(recorded);
      throw error;
    }
  }

  async #clear({ handle, plot, name, recorded }: Stage): Promise<void> {
    try {
      await rmdir(bytes(`${plot.at}/${name}`)).catch(ignoreMissing);
      if (recorded !== undefined) await this.#options.temporary?.drop(recorded);
    } catch (error) {
      // It stays in the journal, so the next start tries again.
      this.#options.log.warn(
        { err: error, path: shown(recorded ?? name) },
        'a temporary directory stays behind',
      );
    } finally {
      plot.users -= 1;
      letGo(handle);
    }
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
