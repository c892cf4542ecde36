// Watches a file, a directory, or a directory tree. A slow client may miss intermediate states of a file, but never its
// final state.
import { posix } from 'node:path';
import type { FileChange } from '../../proto/types/farhand/agent/v1/FileChange.ts';
import { every, sleep } from '../../shared/clock.ts';
import { AppError, errnoOf, ignoring, isErrno } from '../../shared/errors.ts';
import { Quota } from '../../shared/quota.ts';
import { Wake } from '../../shared/wait-for-change.ts';
import type { Boundary, IsProtected } from './confine/boundary.ts';
import * as fs from './confine/confined-fs.ts';
import { isOnOrdinaryFileSystem } from './confine/kernel-file-systems.ts';
import { type Bytes, bytes } from './confine/parse-request-path.ts';
import type { PathEntry } from './confine/resolve-inside-roots.ts';
import type { Disk, Operation } from './handler-adapters.ts';

/** Maximum number of changed names that wait for the client. More are reported as an overflow. */
const mostWaiting = 10_000;
/** Maximum number of changes in one message to the client. */
const batchSize = 256;
/** Milliseconds to wait before changes are read, so that several events of one change are reported once. */
const settling = 20;
/** Milliseconds between two checks of the watched path: the kernel reports no removal of a directory that is open. */
const checkMs = 5_000;
/**
 * Number of quota units that each watched directory takes for its kernel watch. Each known name in the directory takes
 * one more unit.
 */
const folderNames = 15;

/**
 * Quota of names that all watches together have in memory. A directory watched twice counts twice. A watch that exceeds
 * the quota ends, and the other watches continue.
 */
export const watchQuota = (names = 300_000): Quota =>
  new Quota(
    names,
    'too many files are watched on this machine; watch a smaller directory or end other watches',
  );

/** Errors of a file system whose server or program has ended. */
const lost = ['EIO', 'ENOTCONN', 'ESTALE'];

type Kind = 'file' | 'directory';

interface Folder {
  self: string;
  watcher: fs.FSWatcher;
  /** Entries last found in the directory. */
  names: Map<Bytes, Kind>;
}

export const watchFiles: Operation<'watchFiles'> = async function* (disk, request, { path }, signal) {
  await using entry = await disk.reading.entry(path);
  const { stats } = request.may_be_missing && !entry.found ? {} : entry.present;
  const recursive = request.recursive && (stats?.isDirectory() ?? false);
  using watch = new Watch(disk, entry, recursive);
  let first = true;
  for await (const changes of watch.batches(signal)) {
    yield first ? { changes, path: bytes(path) } : { changes };
    first = false;
  }
};

/**
 * One function per watch, which reports an overflow (missed changes) to the client of the watch. countEvent() calls
 * all of them when the kernel's event queue may have overflowed, because Node does not report this.
 */
const overflows = new Set<() => void>();

/** Number of events of all watches in this turn of the event loop. */
let eventsOfTurn = 0;

/**
 * Counts an event. One turn reads the whole queue of the kernel, so after this number of events in one turn the queue
 * may have overflowed. All watches share the queue, so each of them may have missed a change.
 */
function countEvent(): void {
  if (eventsOfTurn === 0)
    setImmediate(() => {
      eventsOfTurn = 0;
    });
  eventsOfTurn += 1;
  if (eventsOfTurn === mostWaiting) for (const overflow of overflows) overflow();
}

class Watch implements Disposable {
  readonly #boundary: Boundary;
  readonly #isTemporary: (name: Bytes) => boolean;
  readonly #entry: PathEntry;
  readonly #recursive: boolean;
  /** The name of the watched file; undefined if a directory is watched. */
  readonly #only: Bytes | undefined;
  /** The requested directory, or the directory that contains the requested file. */
  readonly #start: fs.Confined;
  /** The kernel's path of `#start`. It changes if `#start`, or a directory above it, is renamed or removed. */
  #place: Bytes | undefined;
  readonly #cancelChecks: () => void;
  readonly #quota: Quota;
  /** The watched directories, by their path relative to `#start`. */
  readonly #folders = new Map<Bytes, Folder>();
  /** Changed names, by the path of their directory relative to `#start`. */
  #waiting = new Map<Bytes, Set<Bytes>>();
  #count = 0;
  #overflown = false;
  readonly #changed = new Wake();
  readonly #overflow = (): void => {
    this.#overflown = true;
    this.#changed.wake();
  };

  constructor({ reading, watches, journal }: Disk, entry: PathEntry, recursive: boolean) {
    this.#boundary = reading.boundary;
    this.#isTemporary = journal.isTemporary;
    this.#entry = entry;
    this.#recursive = recursive;
    const directory = entry.found?.stats.isDirectory() ? entry.found.at : undefined;
    this.#only = directory === undefined ? entry.name : undefined;
    this.#start = directory ?? entry.directory;
    this.#quota = watches;
    overflows.add(this.#overflow);
    this.#cancelChecks = every(checkMs, () => void this.#gone().then((gone) => gone && this.#mark('', '.')));
  }

  [Symbol.dispose](): void {
    overflows.delete(this.#overflow);
    this.#cancelChecks();
    this.#dropAll();
  }

  /** Yields an empty batch once all directories are watched. Then yields the changes. */
  async *batches(signal: AbortSignal): AsyncGenerator<FileChange[], void, void> {
    this.#place = await fs.readlink(this.#start);
    const isProtected = await this.#boundary.protection();
    for await (const _ of this.#enter('', isProtected));
    yield [];
    for (;;) {
      while (this.#count === 0 && !this.#overflown && !signal.aborted) await this.#changed.wait(signal);
      await sleep(settling, signal);
      signal.throwIfAborted();
      // Access is checked again, because the directory may have been moved out of the roots.
      this.#boundary.judge(await this.#boundary.survey({ at: this.#start }), undefined, this.#entry.path);
      let batch: FileChange[] = [];
      for await (const change of this.#changes()) {
        if (batch.push(change) < batchSize) continue;
        yield batch;
        batch = [];
      }
      if (batch.length > 0) yield batch;
      if (await this.#gone()) return;
    }
  }

  #mark(folder: Bytes, name: Bytes): void {
    if (this.#only !== undefined && name !== this.#only && name !== '.') return;
    if (this.#isTemporary(name)) return;
    const names = this.#waiting.get(folder) ?? new Set();
    if (!names.has(name) && !this.#overflown) {
      this.#waiting.set(folder, names.add(name));
      this.#count += 1;
      if (this.#count > mostWaiting) this.#overflow();
    }
    this.#changed.wake();
  }

  #take(): Map<Bytes, Set<Bytes>> {
    const waiting = this.#waiting;
    this.#waiting = new Map();
    this.#count = 0;
    return waiting;
  }

  /** True once the watched directory, or that of the watched file, has been renamed or removed. */
  async #gone(): Promise<boolean> {
    return (await fs.readlink(this.#start).catch(() => undefined)) !== this.#place;
  }

  async *#changes(): AsyncGenerator<FileChange, void, void> {
    if (await this.#gone()) {
      const file = this.#only === undefined ? undefined : this.#folders.get('')?.names;
      for (const [name, kind] of file ?? [['', 'directory'] as const]) yield* this.#leave(name, kind);
      return;
    }
    const isProtected = await this.#boundary.protection();
    if (this.#overflown) {
      this.#take();
      this.#overflown = false;
      this.#dropAll();
      for await (const _ of this.#enter('', isProtected));
      return yield this.#change('OVERFLOW', '', 'directory');
    }
    for (const [path, names] of this.#take()) {
      const folder = this.#folders.get(path);
      using pinned = folder && (await this.#pin(path));
      if (!folder || !pinned) continue;
      for (const name of names) {
        if (name === '.') continue;
        const stats = await fs.lookAt(fs.child(pinned.at, name));
        if (!isProtected(folder.self, name, stats)) yield* this.#look(path, folder, name, stats, isProtected);
      }
    }
  }

  /**
   * Yields what has changed at one entry of a watched directory. A recursive watch also yields all entries of a new
   * directory, as added.
   */
  async *#look(
    path: Bytes,
    folder: Folder,
    name: Bytes,
    stats: fs.BigIntStats | undefined,
    isProtected: IsProtected,
  ): AsyncGenerator<FileChange, void, void> {
    const below = posix.join(path, name);
    const now: Kind | undefined = stats && (stats.isDirectory() ? 'directory' : 'file');
    const before = folder.names.get(name);
    const inside = this.#folders.get(below);
    const replaced = inside && stats && inside.self !== fs.identityOf(stats);
    if (before && (before !== now || replaced)) {
      yield* this.#leave(below, before);
      if (folder.names.delete(name)) this.#quota.add(-1);
    }
    if (!now) return;
    yield this.#change(folder.names.has(name) ? 'CHANGED' : 'ADDED', below, now);
    this.#know(folder, name, now);
    if (now === 'directory' && this.#recursive && !this.#folders.get(below))
      yield* this.#enter(below, isProtected);
  }

  /** Watches a directory, and in a recursive watch the directories below it. Yields their entries as added. */
  async *#enter(start: Bytes, isProtected: IsProtected): AsyncGenerator<FileChange, void, void> {
    const open = [start];
    for (let path = open.pop(); path !== undefined; path = open.pop()) {
      const folder = await this.#add(path, isProtected);
      if (!folder) continue;
      for (const [name, kind] of folder.names) {
        if (isProtected(folder.self, name, undefined)) continue;
        const below = posix.join(path, name);
        yield this.#change('ADDED', below, kind);
        if (kind === 'directory' && this.#recursive) open.push(below);
      }
    }
  }

  /** Yields a name and all known names below it as removed, the innermost first. */
  *#leave(path: Bytes, kind: Kind): Generator<FileChange> {
    const folder = this.#folders.get(path);
    for (const [name, inside] of folder?.names ?? []) yield* this.#leave(posix.join(path, name), inside);
    this.#drop(path);
    yield this.#change('REMOVED', path, kind);
  }

  #change(kind: 'ADDED' | 'CHANGED' | 'REMOVED' | 'OVERFLOW', path: Bytes, type: Kind): FileChange {
    return {
      kind: `FILE_CHANGE_KIND_${kind}`,
      path: bytes(this.#only === undefined ? posix.join(this.#entry.path, path) : this.#entry.path),
      type: type === 'directory' ? 'FILE_TYPE_DIRECTORY' : 'FILE_TYPE_FILE',
    };
  }

  /**
   * Watches a directory and reads its entries. Returns undefined if the directory is gone, unreadable, protected, or
   * on a file system of the kernel.
   */
  async #add(path: Bytes, isProtected: IsProtected): Promise<Folder | undefined> {
    using pinned = await this.#open(path);
    if (!pinned) return undefined;
    try {
      const { at } = pinned;
      const stats = await pinned.stat();
      if (path !== '' && (isProtected('', '', stats) || !(await isOnOrdinaryFileSystem(at))))
        return undefined;
      this.#drop(path);
      // Watching begins before the entries are read, so that no change is missed.
      const watcher = this.#watch(path, at);
      const folder: Folder = { self: fs.identityOf(stats), watcher, names: new Map() };
      this.#folders.set(path, folder);
      for await (const batch of fs.namesIn(at)) {
        for (const { name, directory } of batch)
          if (!this.#isTemporary(name) && (this.#only === undefined || name === this.#only))
            this.#know(folder, name, directory ? 'directory' : 'file');
      }
      return folder;
    } catch (error) {
      this.#drop(path);
      if (path !== '' && isErrno(error, 'EACCES', 'ENOENT', ...lost)) return undefined;
      throw error;
    }
  }

  /** Opens a watched directory, which the caller closes. Returns undefined if its path leads elsewhere by now. */
  async #pin(path: Bytes): Promise<fs.Pinned | undefined> {
    const pinned = await this.#open(path);
    const stats = await pinned?.stat();
    if (stats && fs.identityOf(stats) === this.#folders.get(path)?.self) return pinned;
    pinned?.[Symbol.dispose]();
    return undefined;
  }

  #know(folder: Folder, name: Bytes, kind: Kind): void {
    if (!folder.names.has(name)) this.#quota.add(1);
    folder.names.set(name, kind);
  }

  #drop(path: Bytes): void {
    const folder = this.#folders.get(path);
    if (!folder) return;
    folder.watcher.close();
    this.#quota.add(-folderNames - folder.names.size);
    this.#folders.delete(path);
  }

  #dropAll(): void {
    for (const path of [...this.#folders.keys()]) this.#drop(path);
  }

  /**
   * Opens each directory of a path in its open parent, never through a symlink. Returns undefined if one of
   * these directories is gone or not accessible.
   */
  async #open(path: Bytes): Promise<fs.Pinned | undefined> {
    try {
      let pinned = await fs.pin(this.#start, fs.pathOnly | fs.O_DIRECTORY);
      for (const name of path === '' ? [] : path.split('/')) {
        using above = pinned;
        pinned = await fs.pin(fs.child(above.at, name), fs.pathOnly | fs.O_DIRECTORY | fs.O_NOFOLLOW);
      }
      return pinned;
    } catch (error) {
      return ignoring('ENOENT', 'ENOTDIR', 'ELOOP', 'EACCES', ...lost)(error);
    }
  }

  /**
   * Watches a directory through its open handle `at`, because its path may lead to another directory by now. The
   * library chokidar is not used, because it watches paths.
   */
  #watch(path: Bytes, at: fs.Confined): fs.FSWatcher {
    this.#quota.add(folderNames);
    try {
      const watcher = fs.watch(at);
      watcher.on('change', (_, name) => {
        countEvent();
        this.#mark(path, String(name));
      });
      watcher.on('error', () => this.#mark(path, '.'));
      return watcher;
    } catch (error) {
      this.#quota.add(-folderNames);
      throw exhausted(error);
    }
  }
}

function exhausted(error: unknown): unknown {
  const limits = { ENOSPC: 'fs.inotify.max_user_watches', EMFILE: 'fs.inotify.max_user_instances' };
  const limit = Object.entries(limits).find(([errno]) => errno === errnoOf(error))?.[1];
  if (limit === undefined) return error;
  const message = `the machine's limit ${limit} is used up; raise it with sysctl or watch fewer directories`;
  return new AppError('unavailable', message, { limit });
}
