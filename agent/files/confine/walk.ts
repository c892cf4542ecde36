// Walks all that lies below an open directory, however deep or wide, and never through a symlink: every directory is
// entered by its name in the pinned one above it, so nothing that is swapped meanwhile can lead elsewhere.
import { posix } from 'node:path';
import { errnoOf, fromErrno } from '../../../shared/errors.ts';
import type { Boundary, Kept } from './boundary.ts';
import { Descent } from './descent.ts';
import type { BigIntStats, Confined, Named, Pinned } from './fs.ts';
import * as fs from './fs.ts';
import { type Bytes, fault, shown } from './path.ts';

/** Names looked at at once, ahead of the reader. */
const batchSize = 64;
/** Large directories that are read piece by piece, each within another; those further in are read at once. */
const mostPending = 32;

/** One thing on the way. Its handles are open until the next step is asked for. */
export interface Step {
  /** The open directory it lies in. */
  parent: Confined;
  name: Bytes;
  /** For calls that do not follow symlinks. */
  at: Confined;
  /** From the start, without a slash before it. */
  path: Bytes;
  /**
   * Of the name itself. Those of a directory are of the very one that is entered; others were taken a moment ago,
   * so whoever opens it does so without following symlinks and looks again.
   */
  stats: BigIntStats;
  /** A directory whose content has been gone through. */
  left: boolean;
}

export interface WalkOptions {
  /** Of the start, for messages. */
  path: Bytes;
  /** Ends the walk between two steps. */
  signal: AbortSignal;
  /** Names of each directory in the order of their bytes; else as the file system has them. */
  sorted?: boolean;
  /** When a directory is told: before what is in it (unless told), after it, or both times. */
  directories?: 'before' | 'after' | 'both';
  /** To enter what is mounted below the start is file_busy. */
  oneMount?: boolean;
  /** Hears of what cannot be read or must not be, absolute, and is left out; without it such fails the walk. */
  skip?: (path: Bytes, error: unknown) => void;
  /** Asked before a directory is read, which is pinned as `inside`; false leaves out what is in it. */
  enter?: (step: Step, inside: Confined) => boolean | Promise<boolean>;
}

interface Level {
  /** Those still to come, last first. */
  names: Bytes[];
  /** Where more of them come from. */
  pending?: AsyncGenerator<Named[], void, void> | undefined;
  /** Those looked at ahead, last first. */
  looked: Look[];
  /** Path of the directory from the start, with a slash at its end unless it is the start. */
  prefix: Bytes;
  self: string;
  /** What it was entered by; the start has none. */
  step?: Step;
}

type Look = { name: Bytes } & ({ stats: BigIntStats } | { error: unknown });

/** Everything below an open directory, without itself, and without what is forbidden. */
export async function* walk(
  start: Confined,
  boundary: Boundary | undefined,
  options: WalkOptions,
): AsyncGenerator<Step, void, void> {
  using walker = new Walker(start, boundary, options);
  const { directories = 'before' } = options;
  for await (const step of walker.steps()) {
    const wanted = !step.stats.isDirectory() || directories === (step.left ? 'after' : 'before');
    if (wanted || directories === 'both') yield step;
  }
}

class Walker implements Disposable {
  readonly #boundary: Boundary | undefined;
  readonly #options: WalkOptions;
  readonly #start: Confined;
  readonly #descent: Descent;
  readonly #levels: Level[] = [];
  readonly #mount: string | undefined;
  #kept: Kept = () => false;

  constructor(start: Confined, boundary: Boundary | undefined, options: WalkOptions) {
    this.#start = start;
    this.#boundary = boundary;
    this.#options = options;
    this.#descent = new Descent(start, options.path);
    this.#mount = options.oneMount ? fs.mountOf(start) : undefined;
  }

  [Symbol.dispose](): void {
    this.#descent[Symbol.dispose]();
    for (const { pending } of this.#levels) pending?.return().catch(() => undefined);
  }

  /** Directories come twice: as they are entered, and as they are left. */
  async *steps(): AsyncGenerator<Step, void, void> {
    this.#kept = (await this.#boundary?.kept()) ?? this.#kept;
    const self = await fs.identify(this.#start);
    this.#levels.push({ ...(await this.#read('')), looked: [], prefix: '', self });
    for (let level = this.#levels.at(-1); level; level = this.#levels.at(-1)) {
      this.#options.signal.throwIfAborted();
      const look = await this.#next(level);
      if (!look) {
        const step = await this.#leave(level);
        if (step) yield step;
        continue;
      }
      const step = await this.#stepOf(level, look);
      if (!step) continue;
      yield step;
      if (step.stats.isDirectory()) await this.#open(level, step);
    }
  }

  async #next(level: Level): Promise<Look | undefined> {
    if (level.looked.length === 0) {
      if (level.names.length === 0) await this.#readOn(level);
      const batch = level.names.splice(-batchSize);
      level.looked = await Promise.all(batch.map((name) => look(this.#descent.at, name)));
    }
    return level.looked.pop();
  }

  async #leave(level: Level): Promise<Step | undefined> {
    if (level.step) await this.#descent.leave();
    this.#levels.pop();
    if (!level.step) return undefined;
    const parent = this.#descent.at;
    return { ...level.step, parent, at: fs.child(parent, level.step.name), left: true };
  }

  /** What is told of a name; a directory has been entered by then. Undefined where nothing is to be told. */
  async #stepOf(level: Level, look: Look): Promise<Step | undefined> {
    const path = level.prefix + look.name;
    try {
      if ('error' in look) throw look.error;
      const parent = this.#descent.at;
      const at = fs.child(parent, look.name);
      const stats = look.stats.isDirectory() ? await this.#enter(level, look.name, at) : look.stats;
      this.#assertFree(level, look.name, stats);
      return { parent, name: look.name, at, path, stats, left: false };
    } catch (error) {
      // Gone meanwhile.
      if (errnoOf(error) !== 'ENOENT') this.#fail(path, error);
      return undefined;
    }
  }

  /** Enters a directory; what is none any more is described as what it is now. */
  async #enter(level: Level, name: Bytes, at: Confined): Promise<BigIntStats> {
    const pinned = await fs.pin(at);
    let entered = false;
    try {
      const stats = await pinned.stat();
      this.#assertFree(level, name, stats);
      if (stats.isDirectory()) {
        this.#assertMount(pinned, level.prefix + name);
        this.#descent.enter(pinned, stats);
        entered = true;
      }
      return stats;
    } finally {
      if (!entered) pinned[Symbol.dispose]();
    }
  }

  async #open({ prefix }: Level, step: Step): Promise<void> {
    const inside = this.#descent.at;
    const wanted = (await this.#options.enter?.(step, inside)) ?? true;
    const read = wanted ? await this.#read(step.path) : { names: [] };
    const self = fs.identityOf(step.stats);
    this.#levels.push({ ...read, looked: [], prefix: `${prefix}${step.name}/`, self, step });
  }

  async #read(path: Bytes): Promise<Pick<Level, 'names' | 'pending'>> {
    const { at } = this.#descent;
    try {
      if (this.#options.sorted) return { names: (await fs.sortedNames(at)).reverse() };
      const pending = fs.namesIn(at);
      const names = await nextNames(pending);
      if (this.#levels.filter((level) => level.pending).length < mostPending) return { names, pending };
      for await (const more of pending) names.push(...more.map(({ name }) => name));
      return { names };
    } catch (error) {
      this.#fail(path, error);
      return { names: [] };
    }
  }

  async #readOn(level: Level): Promise<void> {
    try {
      if (level.pending) level.names = await nextNames(level.pending);
      if (level.names.length === 0) level.pending = undefined;
    } catch (error) {
      level.pending = undefined;
      this.#fail(level.prefix.replace(/\/$/, ''), error);
    }
  }

  #assertFree(level: Level, name: Bytes, stats: BigIntStats): void {
    if (!this.#kept(level.self, name, stats)) return;
    throw fault('permission_denied', this.#absolute(level.prefix + name), 'the agent keeps this to itself');
  }

  #assertMount({ at }: Pinned, path: Bytes): void {
    if (this.#mount === undefined || fs.mountOf(at) === this.#mount) return;
    throw fault('file_busy', this.#absolute(path), 'another file system is mounted here');
  }

  #absolute(path: Bytes): Bytes {
    return posix.join(this.#options.path, path);
  }

  #fail(path: Bytes, error: unknown): void {
    const absolute = this.#absolute(path);
    if (!this.#options.skip) throw fromErrno(error, shown(absolute));
    this.#options.skip(absolute, error);
  }
}

const look = (parent: Confined, name: Bytes): Promise<Look> =>
  fs.lstat(fs.child(parent, name)).then(
    (stats) => ({ name, stats }),
    (error: unknown) => ({ name, error }),
  );

/** None where there are no more. */
async function nextNames(pending: AsyncGenerator<Named[], void, void>): Promise<Bytes[]> {
  const { value } = await pending.next();
  return value?.map(({ name }) => name) ?? [];
}
