// Walks everything below an open directory. Never follows a symlink, even if directories are renamed during the walk.
import { posix } from 'node:path';
import { fromErrno, isErrno } from '../../../shared/errors.ts';
import { type Boundary, type IsProtected, ownFile } from './boundary.ts';
import * as fs from './confined-fs.ts';
import { type Bytes, fault, toText } from './parse-request-path.ts';

/** Number of names whose stats are read together, before the caller asks for these names. */
const batchSize = 64;

/** One entry of the walk. Its handles stay open until the caller asks for the next step. */
export interface Step {
  parent: fs.Confined;
  name: Bytes;
  /** Confined path of the entry, for calls that do not follow symlinks. */
  at: fs.Confined;
  /** Path relative to the start, without a leading slash. */
  path: Bytes;
  /**
   * Stats of the entry, as by lstat. They may be outdated, except those of a directory. To open a file, use O_NOFOLLOW
   * and check the opened file again.
   */
  stats: fs.BigIntStats;
  /** True in the second step of a directory: the walk yields each directory before its content, and again after it. */
  left: boolean;
}

export interface WalkOptions {
  /** Path of the start, for messages. */
  path: Bytes;
  /** Ends the walk between two steps. */
  signal: AbortSignal;
  /** If true, the walk fails with file_busy at a mount below the start. */
  oneMount?: boolean;
  /** If it returns true for a name, the walk leaves out the name and everything below. */
  leaveOut?: (name: Bytes) => boolean;
  /**
   * Called with the absolute path of each unreadable or protected file, which the walk then leaves out. Without `skip`
   * such a file fails the walk.
   */
  skip?: (path: Bytes, error: unknown) => void;
  /**
   * Called before a directory is read; `inside` is the open directory. If it returns false, the walk leaves out the
   * content.
   */
  enter?: (step: Step, inside: fs.Confined) => boolean | Promise<boolean>;
}

interface Level {
  inside: fs.Pinned;
  self: string;
  /** Path of the directory relative to the start, with a slash at its end; empty for the start. */
  prefix: Bytes;
  /** Names whose stats have not been read yet, in reverse order; undefined until the directory has been read. */
  names?: Bytes[];
  /** Names whose stats have been read, but which have not been visited yet, in reverse order. */
  looked: Look[];
  /** The step that entered this directory; undefined for the start. */
  step: Step | undefined;
}

type Look = { name: Bytes } & ({ stats: fs.BigIntStats } | { error: unknown });

/**
 * Yields everything below an open directory in bytewise order, except protected paths. A directory comes before its
 * content, and again afterwards with `left` set.
 */
export function walk(
  start: fs.Confined,
  boundary: Boundary | undefined,
  options: WalkOptions,
): AsyncGenerator<Step, void, void> {
  return new Walker(start, boundary, options).steps();
}

class Walker {
  readonly #boundary: Boundary | undefined;
  readonly #options: WalkOptions;
  readonly #start: fs.Confined;
  readonly #levels: Level[] = [];
  #mount: string | undefined;
  #isProtected: IsProtected = () => false;

  constructor(start: fs.Confined, boundary: Boundary | undefined, options: WalkOptions) {
    this.#start = start;
    this.#boundary = boundary;
    this.#options = options;
  }

  async *steps(): AsyncGenerator<Step, void, void> {
    this.#mount = this.#options.oneMount ? fs.mountOf(this.#start) : undefined;
    this.#isProtected = (await this.#boundary?.protection()) ?? this.#isProtected;
    const self = await fs.identify(this.#start);
    const start = await fs.pin(this.#start, fs.pathOnly | fs.O_DIRECTORY);
    let level: Level | undefined = this.#push(start, self, '');
    try {
      for (; level; level = this.#levels.at(-1)) {
        this.#options.signal.throwIfAborted();
        const look = await this.#next(level);
        if (look) yield* this.#visit(level, look);
        else {
          this.#levels.pop();
          level.inside[Symbol.dispose]();
          if (level.step) yield { ...level.step, left: true };
        }
      }
    } finally {
      for (const { inside } of this.#levels) inside[Symbol.dispose]();
    }
  }

  #push(inside: fs.Pinned, self: string, prefix: Bytes, step?: Step): Level {
    const level: Level = { inside, self, prefix, looked: [], step };
    this.#levels.push(level);
    return level;
  }

  async #next(level: Level): Promise<Look | undefined> {
    level.names ??= await this.#namesIn(level);
    if (level.looked.length === 0)
      level.looked = await Promise.all(
        level.names.splice(-batchSize).map((name) => look(level.inside.at, name)),
      );
    return level.looked.pop();
  }

  /**
   * Reads all names of a directory before the first of them is visited. The caller may remove visited names, and some
   * file systems would then leave out other names that have not been read yet.
   */
  async #namesIn({ inside, prefix }: Level): Promise<Bytes[]> {
    try {
      const names = (await fs.sortedNames(inside.at)).reverse();
      const { leaveOut } = this.#options;
      return leaveOut ? names.filter((name) => !leaveOut(name)) : names;
    } catch (error) {
      this.#fail(prefix.replace(/\/$/, ''), error);
      return [];
    }
  }

  /** Yields the step of one name. After a directory the walk continues with its content. */
  async *#visit(level: Level, look: Look): AsyncGenerator<Step, void, void> {
    const path = level.prefix + look.name;
    const found = await this.#open(level, look, path).catch((error: unknown) => {
      if (!isErrno(error, 'ENOENT')) this.#fail(path, error);
    });
    if (!found) return;
    const { stats, inside } = found;
    const parent = level.inside.at;
    const at = fs.child(parent, look.name);
    const step: Step = { parent, name: look.name, at, path, stats, left: false };
    const below = inside && this.#push(inside, fs.identityOf(stats), `${path}/`, step);
    yield step;
    if (below && !((await this.#options.enter?.(step, below.inside.at)) ?? true)) below.names = [];
  }

  /** Returns the stats of a name. If it is a directory, opens it and reads its stats again. */
  async #open(level: Level, look: Look, path: Bytes): Promise<{ stats: fs.BigIntStats; inside?: fs.Pinned }> {
    if ('error' in look) throw look.error;
    if (!look.stats.isDirectory()) {
      this.#assertFree(level, look.name, look.stats);
      return look;
    }
    const inside = await fs.pin(fs.child(level.inside.at, look.name));
    try {
      const stats = await inside.stat();
      this.#assertFree(level, look.name, stats);
      if (stats.isDirectory()) {
        this.#assertMount(inside, path);
        return { stats, inside };
      }
      inside[Symbol.dispose]();
      return { stats };
    } catch (error) {
      inside[Symbol.dispose]();
      throw error;
    }
  }

  #assertFree(level: Level, name: Bytes, stats: fs.BigIntStats): void {
    if (!this.#isProtected(level.self, name, stats)) return;
    throw ownFile(this.#absolute(level.prefix + name));
  }

  #assertMount({ at }: fs.Pinned, path: Bytes): void {
    if (this.#mount === undefined || fs.mountOf(at) === this.#mount) return;
    throw fault('file_busy', this.#absolute(path), 'another file system is mounted here; unmount it first');
  }

  #absolute(path: Bytes): Bytes {
    return posix.join(this.#options.path, path);
  }

  #fail(path: Bytes, error: unknown): void {
    const absolute = this.#absolute(path);
    if (!this.#options.skip) throw fromErrno(error, toText(absolute));
    this.#options.skip(absolute, error);
  }
}

const look = (parent: fs.Confined, name: Bytes): Promise<Look> =>
  fs.lstat(fs.child(parent, name)).then(
    (stats) => ({ name, stats }),
    (error: unknown) => ({ name, error }),
  );
