// Decides which files a request may use: those inside the roots, without protected paths. Both are compared by
// device and inode, so that bind mounts, foreign mount namespaces and renames cannot lend a place another name.
import { readlinkSync } from 'node:fs';
import { access, realpath, stat } from 'node:fs/promises';
import { posix } from 'node:path';
import { AppError, fromErrno } from '../../../shared/errors.ts';
import { type BigIntStats, type Confined, identityOf } from './fs.ts';
import { showsProcess } from './kernel.ts';
import { lineageOf, type ProtectedInode, ProtectedInodes } from './protected-inodes.ts';
import { type Bytes, bytes, fault, fromText } from './request-path.ts';

/** Where something is or would be: an open directory, and a name in it unless the directory itself is meant. */
export interface Location {
  at: Confined;
  name?: Bytes;
}

/** The surroundings of a name, looked up while the name itself is opened. */
export interface Survey {
  name: Bytes | undefined;
  /** The directory and all above it, itself first. */
  chain: string[];
  roots: (string | undefined)[];
  protectedInodes: ProtectedInode[];
  /** It lies in the /proc directory of one of the agent's own processes. */
  ownProcess: boolean;
}

/** Whether a name in a directory, given by device and inode, is protected. */
export type IsProtected = (parent: string, name: Bytes, stats: BigIntStats) => boolean;

/** Device and inode behind a path, symlinks followed. */
const identify = async (path: Bytes): Promise<string> =>
  identityOf(await stat(bytes(path), { bigint: true }));
const identifyIfThere = (path: Bytes): Promise<string | undefined> => identify(path).catch(() => undefined);

/** A directory and all above it, itself first. ".." of an open directory is the truth, a path to it is hearsay. */
export async function ancestry(at: Confined): Promise<string[]> {
  // The kernel answers from memory, so this waits for no disk; only the depth is taken from it.
  const levels = readlinkSync(at, 'latin1').split('/').length;
  return Promise.all(Array.from({ length: levels }, (_, up) => identify(at + '/..'.repeat(up))));
}

function assertAbsolute(path: string): void {
  if (!posix.isAbsolute(path)) throw new AppError('invalid_path', `${path}: must be absolute`);
}

async function canonical(root: string): Promise<Bytes> {
  try {
    const path = await realpath(root, 'latin1');
    if (!(await stat(bytes(path))).isDirectory()) throw new AppError('not_a_directory', 'not a directory');
    return path;
  } catch (error) {
    const { code, details, message } = fromErrno(error, 'cannot be opened');
    throw new AppError(code, `root ${root}: ${message}; make it or name another`, details, { cause: error });
  }
}

const within = (path: Bytes, root: Bytes): boolean =>
  root === '/' || path === root || path.startsWith(`${root}/`);

export class Boundary {
  readonly #roots: Bytes[];
  readonly #spelled: Bytes[];
  readonly #protected: ProtectedInodes;
  readonly #processes: () => number[];
  /** The whole disk is allowed, apart from what is forbidden. */
  readonly unconfined: boolean;

  private constructor(roots: Bytes[], spelled: Bytes[], inodes: ProtectedInodes, processes: () => number[]) {
    // A root inside another adds nothing, and could be swapped by a request that may write in the outer one.
    this.#roots = roots.filter((root) => !roots.some((other) => other !== root && within(root, other)));
    this.#spelled = spelled;
    this.#protected = inodes;
    this.#processes = processes;
    this.unconfined = roots.includes('/');
  }

  /**
   * Fails where a root is missing: a lock that does not fit its door must be seen at once. `processes` are those of
   * the agent itself.
   */
  static async open(
    roots: string[],
    forbidden: string[],
    processes: () => number[] = () => [process.pid],
  ): Promise<Boundary> {
    for (const path of [...roots, ...forbidden]) assertAbsolute(path);
    await access('/proc/self/fd').catch(() => {
      throw new AppError('not_supported', 'files need Linux with /proc mounted');
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

  /** Whether the path alone, before any symlink, looks allowed. For choosing an error, never for letting in. */
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
    return { name, chain, roots, protectedInodes: this.#protected.all(), ownProcess };
  }

  /** Throws permission_denied unless a file of these stats (undefined: a new one) may be used there. */
  judge(survey: Survey, stats: BigIntStats | undefined, path: Bytes): void {
    const { chain, roots } = survey;
    const inside = (root: string | undefined): boolean =>
      root !== undefined &&
      (chain.includes(root) || (stats?.isDirectory() === true && root === identityOf(stats)));
    if (!this.unconfined && !roots.some(inside)) throw this.outside(path);
    this.assertFree(survey, stats, path);
  }

  /** The half of the check that also applies to a symlink on the way. */
  assertFree(survey: Survey, stats: BigIntStats | undefined, path: Bytes): void {
    const self = stats && identityOf(stats);
    const behind = survey.ownProcess || survey.protectedInodes.some((one) => isBehind(one, survey, self));
    if (!behind && !(stats && hasSeveralNames(stats) && this.#protected.inside().has(identityOf(stats))))
      return;
    throw fault('permission_denied', path, 'protected: it belongs to the agent');
  }

  /** The same for many names in a row, for as long as that takes. */
  async protection(): Promise<IsProtected> {
    await this.#protected.refresh();
    return (parent, name, stats) => {
      if (this.#protected.stale) void this.#protected.refresh();
      const self = identityOf(stats);
      if (this.#protected.all().some((one) => isBehind(one, { name, chain: [parent] }, self))) return true;
      return hasSeveralNames(stats) && this.#protected.inside().has(self);
    };
  }

  /**
   * Throws permission_denied where to remove, move or replace it would take along "/", the home, a root or
   * a protected path: because it is one of them, or lies above.
   */
  async assertRemovable(stats: BigIntStats, home: Bytes, path: Bytes): Promise<void> {
    // Nothing lies below a file, and access to the file itself has been checked.
    if (stats.isFile()) return;
    const self = identityOf(stats);
    const roots = [...new Set([...this.#roots, ...this.#spelled])];
    const reasons: [reason: string, lineage: Promise<Set<string>>][] = [
      ['the root of all files stays', lineageOf(['/'])],
      ["this is, or holds, the home directory of the agent's user", lineageOf([home])],
      ['this is, or holds, a root that this agent allows', lineageOf(roots)],
      ['this is, or holds, a protected path of the agent', this.#protected.lineage()],
    ];
    for (const [reason, lineage] of reasons)
      if ((await lineage).has(self)) throw fault('permission_denied', path, reason);
  }

  outside(path: Bytes): AppError {
    return fault('permission_denied', path, 'outside the roots that this agent allows');
  }
}

/** A file with several names may be one of a forbidden directory. */
const hasSeveralNames = (stats: BigIntStats): boolean => stats.isFile() && stats.nlink > 1n;

function isBehind(
  inode: ProtectedInode,
  { chain, name }: Pick<Survey, 'chain' | 'name'>,
  self: string | undefined,
): boolean {
  // Itself, also under another name: a hard link, or a bind mount.
  if (inode.self !== undefined && (inode.self === self || chain.includes(inode.self))) return true;
  return name !== undefined && inode.name === name && inode.parent === chain[0];
}
