// Walks all that lies below an open directory, however deep or wide, and never through a symlink: every directory is
// entered by its name in the pinned one above it, so nothing that is swapped meanwhile can lead elsewhere.
import { posix } from 'node:path';
import { errnoOf, fromErrno } from '../../../shared/errors.ts';
import type { Boundary, IsProtected } from './boundary.ts';
import * as fs from './fs.ts';
import { type Bytes, fault, toText } from './request-path.ts';

/** Names of a sorted directory looked at at once, ahead of the reader. */
const batchSize = 64;

/** One thing on the way. Its handles are open until the next step is asked for. */
export interface Step {
  /** The open directory it lies in. */
  parent: fs.Confined;
  name: Bytes;
  /** For calls that do not follow symlinks. */
  at: fs.Confined;
  /** From the start, without a slash before it. */
  path: Bytes;
  /**
   * Of the name itself. Those of a directory are of the very one that is entered; others were taken a moment ago,
   * so open it without following symlinks and check again.
   */
  stats: fs.BigIntStats;
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
  /** A mount below the start fails with file_busy. */
  oneMount?: boolean;
  /** Called with each absolute path that is left out because it is unreadable or protected; by default such a path fails the walk. */
  skip?: (path: Bytes, error: unknown) => void;
  /** Asked before a directory is read, which is pinned as `inside`; false leaves out its content. */
  enter?: (step: Step, inside: fs.Confined) => boolean | Promise<boolean>;
}

interface Level {
  /** The open directory. */
  at: fs.Confined;
  self: string;
  /** Its path from the start, with a slash at its end unless it is the start. */
  prefix: Bytes;
  /** Names still to come. */
  batches: AsyncGenerator<Bytes[], void, void>;
  /** Looked at ahead, last first. */
  looked: Look[];
  /** The step that entered it; the start has none. */
  entered?: Entered;
}

interface Entered {
  step: Step;
  inside: fs.Pinned;
}

type Look = { name: Bytes } & ({ stats: fs.BigIntStats } | { error: unknown });

/**
 * Everything below an open directory, without itself, and without what is forbidden. Directories come twice: as they are
 * entered, and once their content has been gone through.
 */
export async function* walk(
  start: fs.Confined,
  boundary: Boundary | undefined,
  options: WalkOptions,
): AsyncGenerator<Step, void, void> {
  using walker = new Walker(start, boundary, options);
  yield* walker.steps();
}

class Walker implements Disposable {
  readonly #boundary: Boundary | undefined;
  readonly #options: WalkOptions;
  readonly #start: fs.Confined;
  readonly #levels: Level[] = [];
  readonly #mount: string | undefined;
  #isProtected: IsProtected = () => false;

  constructor(start: fs.Confined, boundary: Boundary | undefined, options: WalkOptions) {
    this.#start = start;
    this.#boundary = boundary;
    this.#options = options;
    this.#mount = options.oneMount ? fs.mountOf(start) : undefined;
  }

  [Symbol.dispose](): void {
    for (const { batches, entered } of this.#levels) {
      batches.return().catch(() => undefined);
      entered?.inside[Symbol.dispose]();
    }
  }

  async *steps(): AsyncGenerator<Step, void, void> {
    this.#isProtected = (await this.#boundary?.protection()) ?? this.#isProtected;
    let level: Level | undefined = this.#push(this.#start, await fs.identify(this.#start), '');
    for (; level; level = this.#levels.at(-1)) {
      this.#options.signal.throwIfAborted();
      const look = await this.#next(level);
      if (look) yield* this.#visit(level, look);
      else {
        this.#levels.pop();
        level.entered?.inside[Symbol.dispose]();
        if (level.entered) yield { ...level.entered.step, left: true };
      }
    }
  }

  #push(at: fs.Confined, self: string, prefix: Bytes, entered?: Entered): Level {
    const batches = batchesOf(at, this.#options.sorted ?? false);
    const level: Level = { at, self, prefix, batches, looked: [], ...(entered && { entered }) };
    this.#levels.push(level);
    return level;
  }

  async #next(level: Level): Promise<Look | undefined> {
    if (level.looked.length === 0) {
      const names = await this.#namesIn(level);
      level.looked = await Promise.all(names.reverse().map((name) => look(level.at, name)));
    }
    return level.looked.pop();
  }

  async #namesIn({ batches, prefix }: Level): Promise<Bytes[]> {
    try {
      return (await batches.next()).value ?? [];
    } catch (error) {
      this.#fail(prefix.replace(/\/$/, ''), error);
      return [];
    }
  }

  /** One name; if it is a directory, the next ones are those in it. */
  async *#visit(level: Level, look: Look): AsyncGenerator<Step, void, void> {
    const path = level.prefix + look.name;
    const found = await this.#open(level, look, path).catch((error: unknown) => {
      if (errnoOf(error) !== 'ENOENT') this.#fail(path, error);
    });
    if (!found) return;
    const { stats, inside } = found;
    const at = fs.child(level.at, look.name);
    const step: Step = { parent: level.at, name: look.name, at, path, stats, left: false };
    const below = inside && this.#push(inside.at, fs.identityOf(stats), `${path}/`, { step, inside });
    yield step;
    if (below && !((await this.#options.enter?.(step, below.at)) ?? true)) below.batches = batchesOf();
  }

  /** Current stats of a name; a directory comes pinned. */
  async #open(level: Level, look: Look, path: Bytes): Promise<{ stats: fs.BigIntStats; inside?: fs.Pinned }> {
    if ('error' in look) throw look.error;
    if (!look.stats.isDirectory()) {
      this.#assertFree(level, look.name, look.stats);
      return look;
    }
    const inside = await fs.pin(fs.child(level.at, look.name));
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
    throw fault('permission_denied', this.#absolute(level.prefix + name), 'the agent keeps this to itself');
  }

  #assertMount({ at }: fs.Pinned, path: Bytes): void {
    if (this.#mount === undefined || fs.mountOf(at) === this.#mount) return;
    throw fault('file_busy', this.#absolute(path), 'another file system is mounted here');
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

/** Names in a directory, those of a batch looked at at once; none of none. */
async function* batchesOf(at?: fs.Confined, sorted = false): AsyncGenerator<Bytes[], void, void> {
  if (at === undefined) return;
  if (!sorted) {
    for await (const batch of fs.namesIn(at)) yield batch.map(({ name }) => name);
    return;
  }
  const names = await fs.sortedNames(at);
  for (let from = 0; from < names.length; from += batchSize) yield names.slice(from, from + batchSize);
}
