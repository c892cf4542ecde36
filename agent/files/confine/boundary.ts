// Decides which files a request may use: unprotected files inside the roots. Compares inodes, not paths, because a file
// can have several paths.
import { readlinkSync } from 'node:fs';
import { access, realpath, stat } from 'node:fs/promises';
import { posix } from 'node:path';
import { AppError, fromErrno } from '../../../shared/errors.ts';
import { type BigIntStats, type Confined, identityOf } from './confined-fs.ts';
import { showsProcess } from './kernel-file-systems.ts';
import { type Bytes, bytes, fault, fromText } from './parse-request-path.ts';
import { lineageOf, type ProtectedInode, ProtectedInodes } from './protected-inodes.ts';

/** The place of a file: an open directory and a name in it. Without a name, the place is the directory itself. */
export interface Location {
  at: Confined;
  name?: Bytes;
}

/** Facts that decide whether a name in a directory may be used. */
export interface Survey {
  name: Bytes | undefined;
  /** Inodes of the directory and of all directories above it, from the directory upwards. */
  chain: string[];
  roots: (string | undefined)[];
  /** True if the name lies in the /proc directory of one of the agent's own processes. */
  ownProcess: boolean;
}

/** True if a name is protected. `parent`: device and inode of its directory. `stats`: stats of the file, if any. */
export type IsProtected = (parent: string, name: Bytes, stats: BigIntStats | undefined) => boolean;

/** Device and inode of a path, with symlinks followed. */
const identify = async (path: Bytes): Promise<string> =>
  identityOf(await stat(bytes(path), { bigint: true }));
const identifyIfThere = (path: Bytes): Promise<string | undefined> => identify(path).catch(() => undefined);

/** Inodes of an open directory and of all directories above it, from the directory upwards. */
export async function ancestry(at: Confined): Promise<string[]> {
  // Only the number of directories in this path is used, because a rename may change their names at any time. The
  // synchronous call does not block: the kernel answers from memory, without the disk.
  const levels = readlinkSync(at, 'latin1').split('/').length;
  return Promise.all(Array.from({ length: levels }, (_, up) => identify(at + '/..'.repeat(up))));
}

async function canonical(root: string): Promise<Bytes> {
  try {
    const path = await realpath(root, 'latin1');
    if (!(await stat(bytes(path))).isDirectory()) throw new AppError('not_a_directory', 'is not a directory');
    return path;
  } catch (error) {
    const { code, details, message } = fromErrno(error, 'cannot be opened');
    throw new AppError(code, `root ${root}: ${message}; create it or choose another`, details, {
      cause: error,
    });
  }
}

const within = (path: Bytes, root: Bytes): boolean =>
  root === '/' || path === root || path.startsWith(`${root}/`);

export class Boundary {
  readonly #roots: Bytes[];
  readonly #spelled: Bytes[];
  readonly #protected: ProtectedInodes;
  readonly #processes: () => number[];
  /** True if the whole disk is allowed, except protected paths. */
  readonly unconfined: boolean;

  private constructor(roots: Bytes[], spelled: Bytes[], inodes: ProtectedInodes, processes: () => number[]) {
    // A root inside another root is dropped, because the outer root covers it. The inner root would also be unsafe: a
    // program that may write in the outer root could replace the inner one by a symlink to any directory.
    this.#roots = roots.filter((root) => !roots.some((other) => other !== root && within(root, other)));
    this.#spelled = spelled;
    this.#protected = inodes;
    this.#processes = processes;
    this.unconfined = roots.includes('/');
  }

  /**
   * Opens the roots. Fails if one is missing, so that a misspelled root is noticed at the start. `processes`:
   * pids of the agent's own processes.
   */
  static async open(
    roots: string[],
    forbidden: string[],
    processes: () => number[] = () => [process.pid],
  ): Promise<Boundary> {
    for (const path of [...roots, ...forbidden])
      if (!posix.isAbsolute(path)) throw new AppError('invalid_path', `${path}: must be an absolute path`);
    await access('/proc/self/fd').catch(() => {
      throw new AppError(
        'not_supported',
        '/proc is not mounted; mount it, because the agent needs it to serve files',
      );
    });
    const real = await Promise.all(roots.map(canonical));
    const spelled = [
      ...real,
      ...roots.map((root) => fromText(posix.normalize(root)).replace(/(?<=.)\/$/, '')),
    ];
    const inodes = new ProtectedInodes([...new Set(forbidden.map(fromText))]);
    await inodes.refresh();
    return new Boundary(real, spelled, inodes, processes);
  }

  /**
   * True if the path, compared as text, lies inside a root. The result only decides which error is thrown. It never
   * allows access.
   */
  covers(path: Bytes): boolean {
    return this.#spelled.some((root) => within(path, root));
  }

  async survey({ at, name }: Location): Promise<Survey> {
    const [chain, roots, ownProcess] = await Promise.all([
      ancestry(at),
      this.unconfined ? [] : Promise.all(this.#roots.map(identifyIfThere)),
      showsProcess(at, name, this.#processes()),
      this.#protected.refresh(name),
    ]);
    return { name, chain, roots, ownProcess };
  }

  /** Throws permission_denied unless the name may be used. `stats` describes its file, if one exists. */
  judge(survey: Survey, stats: BigIntStats | undefined, path: Bytes): void {
    const { chain, roots } = survey;
    const inside = (root: string | undefined): boolean =>
      root !== undefined &&
      (chain.includes(root) || (stats?.isDirectory() === true && root === identityOf(stats)));
    if (!this.unconfined && !roots.some(inside)) throw this.outside(path);
    this.assertFree(survey, stats, path);
  }

  /**
   * Throws if the file is protected. A symlink that is followed gets no other check, because the symlink itself may lie
   * outside the roots.
   */
  assertFree(survey: Survey, stats: BigIntStats | undefined, path: Bytes): void {
    if (survey.ownProcess || this.#isProtected(survey, stats)) throw ownFile(path);
  }

  /** Returns a function that checks many names in a row. It reads the protected inodes again at most once a second. */
  async protection(): Promise<IsProtected> {
    await this.#protected.refresh();
    return (parent, name, stats) => {
      if (this.#protected.stale) void this.#protected.refresh();
      return this.#isProtected({ name, chain: [parent] }, stats);
    };
  }

  #isProtected(place: Pick<Survey, 'chain' | 'name'>, stats: BigIntStats | undefined): boolean {
    const self = stats && identityOf(stats);
    if (this.#protected.all().some((one) => isBehind(one, place, self))) return true;
    // A regular file with several hard links: one of them may lie in a protected directory.
    return !!self && stats.isFile() && stats.nlink > 1n && this.#protected.isInside(self);
  }

  /**
   * Throws permission_denied for a directory that must stay: it is "/", the home, a root or a protected path, or it
   * contains one of them. Called before a file is removed, moved or replaced.
   */
  async assertRemovable(stats: BigIntStats, home: Bytes, path: Bytes): Promise<void> {
    // Only a directory can contain protected files. The caller has already checked the file itself.
    if (stats.isFile()) return;
    const self = identityOf(stats);
    const roots = [...new Set([...this.#roots, ...this.#spelled])];
    const reasons: [reason: string, paths: Bytes[]][] = [
      ['is the root directory of the machine', ['/']],
      ["is, or contains, the home directory of the agent's user", [home]],
      ['is, or contains, one of the directories of --root', roots],
      ["is, or contains, one of the agent's own files", this.#protected.paths],
    ];
    for (const [reason, paths] of reasons)
      if ((await lineageOf(paths)).has(self))
        throw fault('permission_denied', path, `cannot be removed, moved or replaced: it ${reason}`);
  }

  outside(path: Bytes): AppError {
    return fault('permission_denied', path, 'is outside the directories that the agent serves (--root)');
  }
}

export const ownFile = (path: Bytes): AppError =>
  fault('permission_denied', path, 'is not served: it belongs to the agent itself');

function isBehind(
  inode: ProtectedInode,
  { chain, name }: Pick<Survey, 'chain' | 'name'>,
  self: string | undefined,
): boolean {
  // True if the file itself or a directory above it is protected. Inodes are compared, so that a hard link or bind
  // mount of a protected path is found too.
  if (inode.self !== undefined && (inode.self === self || chain.includes(inode.self))) return true;
  return name !== undefined && inode.name === name && inode.parent === chain[0];
}
