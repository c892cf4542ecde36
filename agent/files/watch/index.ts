// Tells what changes in a directory, below it, or to a file. Events only say where to look: what is told is what is
// there when it is the reader's turn, so a slow reader misses steps in between and never the outcome.
import type { BigIntStats } from 'node:fs';
import { readFile } from 'node:fs/promises';
import type { FileChange } from '../../../proto/types/farhand/agent/v1/FileChange.ts';
import { sleep } from '../../../shared/clock.ts';
import { fromErrno } from '../../../shared/errors.ts';
import type { AgentMethods } from '../../../shared/rpc.ts';
import { unlessAborted, untilAborted } from '../abort.ts';
import { identityOf, type Kept } from '../beneath/boundary.ts';
import { letGo, pathOf } from '../beneath/descent.ts';
import type { Beneath, Entry } from '../beneath/index.ts';
import { type Bytes, bytes, fault, shown, targetOf } from '../beneath/path.ts';
import { lookAt } from '../draft/index.ts';
import { Budget, type Folder, type Kind, Watched } from './watched.ts';

/** Names waiting for the reader; more are told as an overflow. */
const mostWaiting = 10_000;
/** Changes of a message. */
const batchSize = 256;
/** Milliseconds in which steps of one change, such as a rename over a file, become one. */
const settling = 20;
/** The kernel's default for events that wait to be read, should it not tell. */
const usualQueue = 16_384;

/** The kernel's queue is one for all watches of the process, and where it overflows Node does not tell. */
interface Queue {
  /** Called when so many events came in one go that others may have been lost, of whatever watch. */
  readonly overflows: Set<() => void>;
  /** Counts an event. */
  count(): void;
}

export function openWatcher(
  beneath: Beneath,
  home: Bytes,
  budget = new Budget(),
): AgentMethods['watchFiles'] {
  let queue: Promise<Queue> | undefined;
  return async function* watchFiles(request, { signal }) {
    const { path } = targetOf(request.path, home);
    let entry: Entry | undefined;
    try {
      entry = await unlessAborted(signal, beneath.entry(path), (late) => late.close());
      if (!entry.found) throw fault('file_not_found', path, 'no such file');
      queue ??= openQueue();
      const watch = new Watch(beneath, entry, path, request.recursive, await queue, budget);
      // From here on it is closed when the watch has come to rest.
      entry = undefined;
      const batches = untilAborted(signal, watch.batches(signal), () => watch.close());
      let first = true;
      for await (const changes of batches) {
        yield first ? { changes, path: bytes(path) } : { changes };
        first = false;
      }
    } catch (error) {
      throw signal.aborted ? signal.reason : fromErrno(error, shown(path));
    } finally {
      entry?.close();
    }
  };
}

async function openQueue(): Promise<Queue> {
  const text = await readFile('/proc/sys/fs/inotify/max_queued_events', 'utf8').catch(() => '');
  // Events of closed watches are not counted here, so half of it is suspicious.
  const most = Math.floor((Number.parseInt(text, 10) || usualQueue) / 2);
  const overflows = new Set<() => void>();
  let burst = 0;
  const count = (): void => {
    burst += 1;
    // All that was queued is handed out before the loop turns.
    if (burst === 1) setImmediate(() => (burst = 0));
    if (burst === most) for (const overflow of overflows) overflow();
  };
  return { overflows, count };
}

const join = (path: Bytes, name: Bytes): Bytes => (path === '' ? name : `${path}/${name}`);

class Watch {
  readonly #beneath: Beneath;
  readonly #entry: Entry;
  readonly #path: Bytes;
  readonly #recursive: boolean;
  readonly #queue: Queue;
  /** The one name that is asked about, where it is no directory. */
  readonly #only: Bytes | undefined;
  readonly #start: Bytes;
  readonly #watched: Watched;
  /** Names to look at, by the path of their directory. */
  #waiting = new Map<Bytes, Set<Bytes>>();
  #count = 0;
  #overflown = false;
  #wake: () => void = () => undefined;
  readonly #overflow = (): void => {
    this.#overflown = true;
    this.#wake();
  };

  /** Owns the entry from here on. */
  constructor(beneath: Beneath, entry: Entry, path: Bytes, recursive: boolean, queue: Queue, budget: Budget) {
    this.#beneath = beneath;
    this.#entry = entry;
    this.#path = path;
    this.#queue = queue;
    const directory = entry.found?.stats.isDirectory() ? entry.found.at : undefined;
    this.#only = directory === undefined ? entry.name : undefined;
    this.#recursive = recursive && directory !== undefined;
    this.#start = directory ?? entry.directory;
    queue.overflows.add(this.#overflow);
    this.#watched = new Watched(this.#start, this.#only, budget, (folder, name) => this.#mark(folder, name));
  }

  close(): void {
    this.#queue.overflows.delete(this.#overflow);
    this.#watched.close();
    this.#entry.close();
  }

  /** An empty batch first, when nothing will be missed any more. */
  async *batches(signal: AbortSignal): AsyncGenerator<FileChange[], void, void> {
    signal.addEventListener('abort', () => this.#wake(), { once: true });
    await this.#begin();
    yield [];
    for (;;) {
      await this.#marked(signal);
      await sleep(settling, signal);
      signal.throwIfAborted();
      await this.#judge();
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

  async #begin(): Promise<void> {
    const kept = await this.#beneath.boundary.kept();
    for await (const _ of this.#enter('', kept));
  }

  #mark(folder: Bytes, name: Bytes): void {
    this.#queue.count();
    if (this.#count >= mostWaiting) this.#overflown = true;
    if (this.#only === undefined || name === this.#only || name === '.') {
      const names = this.#waiting.get(folder) ?? new Set();
      if (!names.has(name) && !this.#overflown) {
        this.#waiting.set(folder, names.add(name));
        this.#count += 1;
      }
    }
    if (this.#count > 0 || this.#overflown) this.#wake();
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

  /** The directory may have been moved to where nobody may look. */
  async #judge(): Promise<void> {
    const { boundary } = this.#beneath;
    boundary.judge(await boundary.survey({ at: this.#start }), undefined, this.#path);
  }

  /** A directory that no longer has its name is no longer what is watched. */
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
    const kept = await this.#beneath.boundary.kept();
    if (this.#overflown) {
      this.#take();
      this.#overflown = false;
      this.#watched.close();
      for await (const _ of this.#enter('', kept));
      return yield this.#change('OVERFLOW', '', 'directory');
    }
    for (const [path, names] of this.#take()) {
      const folder = this.#watched.get(path);
      const handle = folder && (await this.#watched.pin(path));
      if (!folder || !handle) continue;
      try {
        for (const name of names) {
          if (name === '.') continue;
          const stats = await lookAt(`${pathOf(handle)}/${name}`);
          if (!kept(folder.self, name, stats ?? folder.stats))
            yield* this.#look(path, folder, name, stats, kept);
        }
      } finally {
        letGo(handle);
      }
    }
  }

  /** What has become of one name. */
  async *#look(
    path: Bytes,
    folder: Folder,
    name: Bytes,
    stats: BigIntStats | undefined,
    kept: Kept,
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
    if (now === 'directory' && this.#recursive && !this.#watched.get(below)) yield* this.#enter(below, kept);
  }

  /** Watches a directory and those below it; what is in it is new. */
  async *#enter(start: Bytes, kept: Kept): AsyncGenerator<FileChange, void, void> {
    const open = [start];
    for (let path = open.pop(); path !== undefined; path = open.pop()) {
      const folder = await this.#watched.add(path, kept);
      if (!folder) continue;
      for (const [name, kind] of folder.names) {
        if (kept(folder.self, name, folder.stats)) continue;
        const below = join(path, name);
        yield this.#change('ADDED', below, kind);
        if (kind === 'directory' && this.#recursive) open.push(below);
      }
    }
  }

  /** All that was known to be there, the innermost first. */
  *#leave(path: Bytes, kind: Kind): Generator<FileChange> {
    const folder = this.#watched.get(path);
    for (const [name, inside] of folder?.names ?? []) yield* this.#leave(join(path, name), inside);
    this.#watched.drop(path);
    yield this.#change('REMOVED', path, kind);
  }

  #change(kind: 'ADDED' | 'CHANGED' | 'REMOVED' | 'OVERFLOW', path: Bytes, type: Kind): FileChange {
    const whole = this.#only !== undefined || path === '';
    const prefix = this.#path === '/' ? '/' : `${this.#path}/`;
    return {
      kind: `FILE_CHANGE_KIND_${kind}`,
      path: bytes(whole ? this.#path : prefix + path),
      type: type === 'directory' ? 'FILE_TYPE_DIRECTORY' : 'FILE_TYPE_FILE',
    };
  }
}
