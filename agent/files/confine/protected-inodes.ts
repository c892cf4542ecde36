// Finds the inodes of the protected paths (the agent's own files). All are read from the disk at most once a second. In
// between, only paths whose parent directory was missing are read again.
import { type BigIntStats, lstatSync, readdirSync } from 'node:fs';
import { lstat, realpath, stat } from 'node:fs/promises';
import { posix } from 'node:path';
import { monotonic } from '../../../shared/clock.ts';
import { isErrno } from '../../../shared/errors.ts';
import { identityOf } from './confined-fs.ts';
import { type Bytes, bytes } from './parse-request-path.ts';

/** A protected path: its inode, and its name, which no other file may get. */
export interface ProtectedInode {
  self: string | undefined;
  directory: boolean;
  /** Inode of the directory in which `name` is reserved: the file API gives this name to no other file there. */
  parent: string | undefined;
  name: Bytes;
  /**
   * True if the directory of the protected path exists: `name` is then the last name of the path. False if this
   * directory is missing: `name` is then the name of the topmost missing directory.
   */
  whole: boolean;
}

/**
 * Milliseconds for which the inodes are used before they are read again. If a protected file is replaced in this time,
 * the inode of the new file is not known yet, but its name protects it.
 */
const trustMs = 1_000;

export class ProtectedInodes {
  readonly paths: Bytes[];
  readonly #known = new Map<Bytes, ProtectedInode>();
  #lookedAt = Number.NEGATIVE_INFINITY;
  #inside = new Set<string>();
  /** The first error that occurred when the files below the protected directories were last read. */
  #insideError: Error | undefined;
  #insideAt = Number.NEGATIVE_INFINITY;

  constructor(paths: Bytes[]) {
    this.paths = paths;
  }

  get stale(): boolean {
    return monotonic() - this.#lookedAt >= trustMs;
  }

  /**
   * Reads the inodes of all protected paths, at most once a second. In between, only paths whose parent
   * directory was missing are read. Never rejects.
   */
  async refresh(name?: Bytes): Promise<void> {
    const { stale } = this;
    if (stale) this.#lookedAt = monotonic();
    // True if the path must be read again: its parent directory was missing at the last read, but may exist by now. If
    // `name` is given, only paths that contain this name are read again.
    const mayHaveGrown = (path: Bytes): boolean =>
      !this.#known.get(path)?.whole && (name === undefined || path.split('/').includes(name));
    const paths = stale ? this.paths : this.paths.filter(mayHaveGrown);
    // Stats read in this refresh, shared because many protected paths lie in the same directories.
    const seen: Seen = new Map();
    await Promise.all(paths.map(async (path) => this.#known.set(path, await inodeOf(path, seen))));
  }

  all(): ProtectedInode[] {
    return [...this.#known.values()];
  }

  /**
   * True if a file with this inode lies below a protected directory. If a part of a protected directory could not be
   * read, throws the error instead of returning false, because the file may lie in that part.
   */
  isInside(inode: string): boolean {
    if (monotonic() - this.#insideAt >= trustMs) this.#readInside();
    if (this.#inside.has(inode)) return true;
    if (this.#insideError) throw this.#insideError;
    return false;
  }

  #readInside(): void {
    this.#insideAt = monotonic();
    this.#inside = new Set();
    this.#insideError = undefined;
    for (const [path, { directory }] of this.#known) if (directory) this.#readBelow(path);
  }

  #readBelow(path: Bytes): void {
    const options = { withFileTypes: true, encoding: 'latin1' } as const;
    for (const entry of this.#attempt(() => readdirSync(bytes(path), options)) ?? []) {
      const below = `${path}/${entry.name}`;
      if (entry.isDirectory()) this.#readBelow(below);
      else {
        const stats = this.#attempt(() => lstatSync(bytes(below), { bigint: true }));
        if (stats) this.#inside.add(identityOf(stats));
      }
    }
  }

  /**
   * Returns the result of `look`, or undefined if it fails. The error is stored in `#insideError`, unless the file was
   * removed meanwhile or is a directory that the agent may not list.
   */
  #attempt<T>(look: () => T): T | undefined {
    try {
      return look();
    } catch (error) {
      if (!isErrno(error, 'ENOENT', 'ENOTDIR', 'EACCES'))
        this.#insideError ??= error instanceof Error ? error : new Error(String(error));
      return undefined;
    }
  }
}

type Seen = Map<Bytes, Promise<BigIntStats | undefined>>;

/** Reads the inode of one protected path. Never rejects. */
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

/** Returns the stats of a path; undefined if it is missing. */
const statOf = (path: Bytes): Promise<BigIntStats | undefined> =>
  stat(bytes(path), { bigint: true }).catch(() => undefined);

/**
 * Inodes of paths and of all directories above them, both as spelled and with symlinks resolved. Never
 * rejects.
 */
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
