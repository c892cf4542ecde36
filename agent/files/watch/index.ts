// Watches a file, a directory, or a directory tree. An event of the kernel only names the file that changed.
// Its state is read when the client reads, so a slow client may miss intermediate steps but never the final
// state.
import type { FileChange } from '../../../proto/types/farhand/agent/v1/FileChange.ts';
import { sleep } from '../../../shared/clock.ts';
import type { Quota } from '../../../shared/quota.ts';
import type { IsProtected } from '../confine/boundary.ts';
import { type BigIntStats, type Confined, child, identityOf, lookAt } from '../confine/fs.ts';
import { type Bytes, bytes } from '../confine/request-path.ts';
import type { Confinement, PathEntry } from '../confine/resolve.ts';
import type { Operation } from '../operation-handler.ts';
import { type Folder, type Kind, Watched } from './watched-directories.ts';

/** Most changed names that wait for the client. More are reported as an overflow. */
const mostWaiting = 10_000;
/** Most changes in a message. */
const batchSize = 256;
/** Milliseconds to wait before changes are read, so that the steps of one change are reported once. */
const settling = 20;

export const watchFiles: Operation<'watchFiles'> = async function* (disk, request, { path }, signal) {
  await using entry = await disk.reading.entry(path);
  const recursive = request.recursive && entry.present.stats.isDirectory();
  using watch = new Watch(disk.reading, entry, recursive, disk.watches);
  let first = true;
  for await (const changes of watch.batches(signal)) {
    yield first ? { changes, path: bytes(path) } : { changes };
    first = false;
  }
};

/**
 * The overflow functions of all watches. The kernel has one queue for all, and Node does not report its
 * overflow.
 */
const overflows = new Set<() => void>();

const join = (path: Bytes, name: Bytes): Bytes => (path === '' ? name : `${path}/${name}`);

class Watch implements Disposable {
  readonly #confinement: Confinement;
  readonly #entry: PathEntry;
  readonly #recursive: boolean;
  /** The watched name in its directory, if the request names a file. */
  readonly #only: Bytes | undefined;
  readonly #start: Confined;
  readonly #watched: Watched;
  /** Changed names, by the path of their directory. */
  #waiting = new Map<Bytes, Set<Bytes>>();
  #count = 0;
  #overflown = false;
  #wake: () => void = () => undefined;
  readonly #overflow = (): void => {
    this.#overflown = true;
    this.#wake();
  };

  constructor(confinement: Confinement, entry: PathEntry, recursive: boolean, quota: Quota) {
    this.#confinement = confinement;
    this.#entry = entry;
    this.#recursive = recursive;
    const directory = entry.found?.stats.isDirectory() ? entry.found.at : undefined;
    this.#only = directory === undefined ? entry.name : undefined;
    this.#start = directory ?? entry.directory;
    this.#watched = new Watched(this.#start, this.#only, quota, (folder, name) => this.#mark(folder, name));
    overflows.add(this.#overflow);
  }

  [Symbol.dispose](): void {
    overflows.delete(this.#overflow);
    this.#watched[Symbol.dispose]();
  }

  /** Yields an empty batch once all directories are watched, then the changes. */
  async *batches(signal: AbortSignal): AsyncGenerator<FileChange[], void, void> {
    signal.addEventListener('abort', () => this.#wake(), { once: true });
    const isProtected = await this.#confinement.boundary.protection();
    for await (const _ of this.#enter('', isProtected));
    yield [];
    for (;;) {
      await this.#marked(signal);
      await sleep(settling, signal);
      signal.throwIfAborted();
      // The directory may have been moved out of the roots.
      const { boundary } = this.#confinement;
      boundary.judge(await boundary.survey({ at: this.#start }), undefined, this.#entry.path);
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
    const names = this.#waiting.get(folder) ?? new Set();
    if (!names.has(name) && !this.#overflown) {
      this.#waiting.set(folder, names.add(name));
      this.#count += 1;
      // So many changes at once may overflow the kernel's queue, which loses changes of any watch.
      if (this.#count > mostWaiting) for (const overflow of overflows) overflow();
    }
    this.#wake();
  }

  #take(): Map<Bytes, Set<Bytes>> {
    const waiting = this.#waiting;
    this.#waiting = new Map();
    this.#count = 0;
    return waiting;
  }

  #marked(signal: AbortSignal): Promise<void> {
    return new Promise((resolve) => {
      this.#wake = resolve;
      if (this.#count > 0 || this.#overflown || signal.aborted) resolve();
    });
  }

  /** True once the watched directory was renamed or removed. */
  async #gone(): Promise<boolean> {
    const { name, at, found } = this.#entry;
    if (this.#only !== undefined || !found || name === '' || name === '.') return false;
    const now = await lookAt(at).catch(() => undefined);
    return !now || identityOf(now) !== identityOf(found.stats);
  }

  async *#changes(): AsyncGenerator<FileChange, void, void> {
    if (await this.#gone()) {
      yield* this.#leave('', 'directory');
      return;
    }
    const isProtected = await this.#confinement.boundary.protection();
    if (this.#overflown) {
      this.#take();
      this.#overflown = false;
      this.#watched[Symbol.dispose]();
      for await (const _ of this.#enter('', isProtected));
      return yield this.#change('OVERFLOW', '', 'directory');
    }
    for (const [path, names] of this.#take()) {
      const folder = this.#watched.get(path);
      using pinned = folder && (await this.#watched.pin(path));
      if (!folder || !pinned) continue;
      for (const name of names) {
        if (name === '.') continue;
        const stats = await lookAt(child(pinned.at, name));
        if (!isProtected(folder.self, name, stats ?? folder.stats))
          yield* this.#look(path, folder, name, stats, isProtected);
      }
    }
  }

  /** Yields the changes of one name, and of a new directory's content. */
  async *#look(
    path: Bytes,
    folder: Folder,
    name: Bytes,
    stats: BigIntStats | undefined,
    isProtected: IsProtected,
  ): AsyncGenerator<FileChange, void, void> {
    const below = join(path, name);
    const now: Kind | undefined = stats && (stats.isDirectory() ? 'directory' : 'file');
    const before = folder.names.get(name);
    const inside = this.#watched.get(below);
    const replaced = inside && stats && inside.self !== identityOf(stats);
    if (before && (before !== now || replaced)) {
      yield* this.#leave(below, before);
      this.#watched.forget(folder, name);
    }
    if (!now) return;
    yield this.#change(folder.names.has(name) ? 'CHANGED' : 'ADDED', below, now);
    this.#watched.know(folder, name, now);
    if (now === 'directory' && this.#recursive && !this.#watched.get(below))
      yield* this.#enter(below, isProtected);
  }

  /** Watches a directory, and in a recursive watch those below it. Yields their entries as added. */
  async *#enter(start: Bytes, isProtected: IsProtected): AsyncGenerator<FileChange, void, void> {
    const open = [start];
    for (let path = open.pop(); path !== undefined; path = open.pop()) {
      const folder = await this.#watched.add(path, isProtected);
      if (!folder) continue;
      for (const [name, kind] of folder.names) {
        if (isProtected(folder.self, name, folder.stats)) continue;
        const below = join(path, name);
        yield this.#change('ADDED', below, kind);
        if (kind === 'directory' && this.#recursive) open.push(below);
      }
    }
  }

  /** Yields a name and all known names below it as removed, the innermost first. */
  *#leave(path: Bytes, kind: Kind): Generator<FileChange> {
    const folder = this.#watched.get(path);
    for (const [name, inside] of folder?.names ?? []) yield* this.#leave(join(path, name), inside);
    this.#watched.drop(path);
    yield this.#change('REMOVED', path, kind);
  }

  #change(kind: 'ADDED' | 'CHANGED' | 'REMOVED' | 'OVERFLOW', path: Bytes, type: Kind): FileChange {
    const whole = this.#only !== undefined || path === '';
    const prefix = this.#entry.path === '/' ? '/' : `${this.#entry.path}/`;
    return {
      kind: `FILE_CHANGE_KIND_${kind}`,
      path: bytes(whole ? this.#entry.path : prefix + path),
      type: type === 'directory' ? 'FILE_TYPE_DIRECTORY' : 'FILE_TYPE_FILE',
    };
  }
}
