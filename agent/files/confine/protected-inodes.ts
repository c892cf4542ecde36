// Protected paths: where the agent's own files lie on the disk now, looked at at most once a second.
import { type BigIntStats, lstatSync, readdirSync, stat } from 'node:fs';
import { lstat, realpath } from 'node:fs/promises';
import { posix } from 'node:path';
import { monotonic } from '../../../shared/clock.ts';
import { identityOf } from './fs.ts';
import { type Bytes, bytes } from './request-path.ts';

/** A protected path: its inode, and the name that nothing else may take. */
export interface ProtectedInode {
  self: string | undefined;
  directory: boolean;
  /** Where more than the last step is missing: of the first missing one, which must not be made either. */
  parent: string | undefined;
  name: Bytes;
  /** All but its last step is there. */
  whole: boolean;
}

/** How long a look is trusted; names stay protected all the while. */
const trustMs = 1_000;

export class ProtectedInodes {
  readonly #paths: Bytes[];
  readonly #known = new Map<Bytes, ProtectedInode>();
  #lookedAt = Number.NEGATIVE_INFINITY;
  #inside = new Set<string>();
  #insideAt = Number.NEGATIVE_INFINITY;

  constructor(paths: Bytes[]) {
    this.#paths = paths;
  }

  get stale(): boolean {
    return monotonic() - this.#lookedAt >= trustMs;
  }

  /**
   * Never rejects. All paths are looked at again after a second; at once those that did not exist as a whole, where `name`
   * may be a missing step of theirs. Without a name: all of those.
   */
  async refresh(name?: Bytes): Promise<void> {
    const { stale } = this;
    if (stale) this.#lookedAt = monotonic();
    const mayHaveGrown = (path: Bytes): boolean =>
      !this.#known.get(path)?.whole && (name === undefined || path.split('/').includes(name));
    const paths = stale ? this.#paths : this.#paths.filter(mayHaveGrown);
    // Many lie in the same directories, and most of these are missing.
    const seen: Seen = new Map();
    await Promise.all(paths.map(async (path) => this.#known.set(path, await inodeOf(path, seen))));
  }

  all(): ProtectedInode[] {
    return [...this.#known.values()];
  }

  /** The paths themselves and all above them. */
  lineage(): Promise<Set<string>> {
    return lineageOf(this.#paths);
  }

  /** All that lies in them, however deep. */
  inside(): Set<string> {
    if (monotonic() - this.#insideAt < trustMs) return this.#inside;
    this.#insideAt = monotonic();
    const directories = [...this.#known].filter(([, { directory }]) => directory);
    this.#inside = new Set(directories.flatMap(([path]) => [...insideOf(path)]));
    return this.#inside;
  }
}

type Seen = Map<Bytes, Promise<BigIntStats | undefined>>;

/** Never rejects. */
async function inodeOf(path: Bytes, seen: Seen): Promise<ProtectedInode> {
  const look = (at: Bytes): Promise<BigIntStats | undefined> => {
    const looking = seen.get(at) ?? statOf(at);
    seen.set(at, looking);
    return looking;
  };
  const above = posix.dirname(path);
  const parent = await look(above);
  if (!parent && above !== path) return { ...(await inodeOf(above, seen)), whole: false };
  const self = await look(path);
  return {
    self: self && identityOf(self),
    directory: self?.isDirectory() ?? false,
    parent: parent && identityOf(parent),
    name: posix.basename(path),
    whole: true,
  };
}

/** Undefined where it is missing. The callback form costs half of what the promise form does. */
function statOf(path: Bytes): Promise<BigIntStats | undefined> {
  return new Promise((resolve) => {
    stat(bytes(path), { bigint: true }, (_error, stats) => resolve(stats));
  });
}

/** Paths and all above them, as they are spelled and as they really lie, as far as they are there. Never rejects. */
export async function lineageOf(paths: Bytes[]): Promise<Set<string>> {
  const real = new Map<Bytes, Promise<Bytes>>();
  const realOf = (path: Bytes): Promise<Bytes> => {
    const finding =
      real.get(path) ??
      realpath(bytes(path), 'latin1').catch(() => (path === '/' ? path : realOf(posix.dirname(path))));
    real.set(path, finding);
    return finding;
  };
  const ends = [...paths, ...(await Promise.all(paths.map(realOf)))];
  const ways = new Set(ends.flatMap(prefixes));
  const found = await Promise.all(
    [...ways].map((way) => lstat(bytes(way), { bigint: true }).catch(() => undefined)),
  );
  return new Set(found.flatMap((stats) => (stats ? [identityOf(stats)] : [])));
}

function prefixes(path: Bytes): Bytes[] {
  const above = posix.dirname(path);
  return above === path ? [path] : [path, ...prefixes(above)];
}

/** Asked for only when a file with several names comes by. */
function* insideOf(path: Bytes): Generator<string> {
  try {
    for (const entry of readdirSync(bytes(path), { withFileTypes: true, encoding: 'latin1' })) {
      const below = `${path}/${entry.name}`;
      if (entry.isDirectory()) yield* insideOf(below);
      else yield identityOf(lstatSync(bytes(below), { bigint: true }));
    }
  } catch {
    // It has gone meanwhile.
  }
}
