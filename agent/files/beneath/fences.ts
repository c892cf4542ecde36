// The places that the agent keeps to itself, as they lie on the disk: looked at once in a while, not at each call, and
// never waited for for long, for one of them may be on a disk that hangs.
import { type BigIntStats, lstatSync, readdirSync } from 'node:fs';
import { lstat, realpath, stat } from 'node:fs/promises';
import { posix } from 'node:path';
import { after, monotonic } from '../../../shared/clock.ts';
import { type Bytes, bytes } from './path.ts';

/** Device and inode: what something is, whatever it is called. */
export const identityOf = (stats: BigIntStats): string => `${stats.dev}:${stats.ino}`;

/** A forbidden path: what it is, and the name that nothing else may take. */
export interface Fence {
  self: string | undefined;
  parent: string | undefined;
  name: Bytes;
  /** All but its last step is there. */
  whole: boolean;
}

/** How long what was seen is believed; a name stays forbidden all the while. */
const trustMs = 1_000;
/** Time that a disk has to answer; then what was seen before counts. */
const patienceMs = 1_000;

interface Known {
  fence: Fence;
  directory: boolean;
  lineage: (string | undefined)[];
}

export class Fences {
  readonly #paths: Bytes[];
  readonly #known = new Map<Bytes, Known>();
  readonly #waiting = new Map<Bytes, Promise<void>>();
  #lookedAt = Number.NEGATIVE_INFINITY;
  #inside = new Set<string>();
  #insideAt = Number.NEGATIVE_INFINITY;

  constructor(paths: Bytes[]) {
    this.#paths = paths;
  }

  /**
   * What was seen last is of the last second, as far as the disks answer; of this moment where more of a path may be
   * there by now than was, and `name` may be what it still lacks.
   */
  async refresh(name?: Bytes): Promise<void> {
    if (monotonic() - this.#lookedAt < trustMs) {
      const lacking = name === undefined ? [] : this.#paths.filter((path) => this.#lacks(path, name));
      if (lacking.length > 0) await this.#lookInTime(lacking);
      return;
    }
    this.#lookedAt = monotonic();
    await this.#lookInTime(this.#paths);
  }

  /** The same for whatever name may come by. */
  async refreshAll(): Promise<void> {
    await this.refresh();
    const lacking = this.#paths.filter((path) => !this.#isWhole(path));
    if (lacking.length > 0) await this.#lookInTime(lacking);
  }

  #lacks(path: Bytes, name: Bytes): boolean {
    return !this.#isWhole(path) && path.split('/').includes(name);
  }

  #isWhole(path: Bytes): boolean {
    return this.#known.get(path)?.fence.whole === true;
  }

  async #lookInTime(paths: Bytes[]): Promise<void> {
    const { promise: tooLong, resolve } = Promise.withResolvers<void>();
    const cancel = after(patienceMs, resolve);
    await Promise.race([this.#look(paths), tooLong]).finally(cancel);
  }

  all(): Fence[] {
    return [...this.#known.values()].map(({ fence }) => fence);
  }

  /** The places themselves and all above them, as they are spelled and as they really lie. */
  lineage(): (string | undefined)[] {
    return [...this.#known.values()].flatMap(({ lineage }) => lineage);
  }

  /** All that lies in them, however deep. */
  inside(): Set<string> {
    if (monotonic() - this.#insideAt < trustMs) return this.#inside;
    this.#insideAt = monotonic();
    // What is a directory has just answered.
    const directories = [...this.#known].filter(([, { directory }]) => directory);
    this.#inside = new Set(directories.flatMap(([path]) => [...insideOf(path)]));
    return this.#inside;
  }

  async #look(paths: Bytes[]): Promise<void> {
    const seen = new Seen();
    // Begun again each time, a look would leave one more thread with the disk that hangs.
    await Promise.all(paths.map((path) => this.#waiting.get(path) ?? this.#lookAt(path, seen)));
  }

  #lookAt(path: Bytes, seen: Seen): Promise<void> {
    const looking = seen.known(path).then((known) => {
      this.#known.set(path, known);
      this.#waiting.delete(path);
    });
    this.#waiting.set(path, looking);
    return looking;
  }
}

/** What a path hangs on: itself and all above it, as it is spelled and as it really lies, as far as it is there. */
export function lineageOf(path: Bytes): Promise<(string | undefined)[]> {
  return new Seen().lineage(path);
}

/** One look around: many paths have their beginnings in common. Nothing here rejects. */
class Seen {
  readonly #stats = new Map<string, Promise<BigIntStats | undefined>>();

  async known(path: Bytes): Promise<Known> {
    const [self, fence, lineage] = [
      await this.#stat(path),
      await this.#fence(path),
      await this.lineage(path),
    ];
    return { fence, directory: self?.isDirectory() ?? false, lineage };
  }

  async lineage(path: Bytes): Promise<(string | undefined)[]> {
    const ways = new Set([...prefixes(path), ...prefixes(await realOf(path))]);
    const found = await Promise.all(
      [...ways].map((way) => this.#once(`l${way}`, () => lstat(bytes(way), big))),
    );
    return found.map((stats) => stats && identityOf(stats));
  }

  async #fence(path: Bytes): Promise<Fence> {
    const above = posix.dirname(path);
    const [self, parent] = [await this.#stat(path), await this.#stat(above)];
    // Where more than the last step is missing, the first missing one must not be made either.
    if (!parent && above !== path) return { ...(await this.#fence(above)), whole: false };
    return {
      self: self && identityOf(self),
      parent: parent && identityOf(parent),
      name: posix.basename(path),
      whole: true,
    };
  }

  #stat(path: Bytes): Promise<BigIntStats | undefined> {
    return this.#once(`s${path}`, () => stat(bytes(path), big));
  }

  #once(key: string, look: () => Promise<BigIntStats>): Promise<BigIntStats | undefined> {
    const seen = this.#stats.get(key) ?? look().catch(() => undefined);
    this.#stats.set(key, seen);
    return seen;
  }
}

const big = { bigint: true } as const;

function prefixes(path: Bytes): Bytes[] {
  const above = posix.dirname(path);
  return above === path ? [path] : [path, ...prefixes(above)];
}

async function realOf(path: Bytes): Promise<Bytes> {
  const real = await realpath(bytes(path), 'latin1').catch(() => undefined);
  return real ?? (path === '/' ? path : realOf(posix.dirname(path)));
}

/** Asked for only when a file with several names comes by. */
function* insideOf(path: Bytes): Generator<string> {
  try {
    for (const entry of readdirSync(bytes(path), { withFileTypes: true, encoding: 'latin1' })) {
      const below = `${path}/${entry.name}`;
      if (entry.isDirectory()) yield* insideOf(below);
      else yield identityOf(lstatSync(bytes(below), big));
    }
  } catch {
    // It has gone meanwhile.
  }
}
