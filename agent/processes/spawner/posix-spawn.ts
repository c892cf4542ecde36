// Starts programs with posix_spawn(3), called through the addon koffi. With 32 commands at the same time, Node's spawn
// is half as fast, because it copies the page tables of its process.
import { createRequire } from 'node:module';
import { decodeStatus } from './exit-status.ts';
import type { Exited, SpawnRequest } from './messages.ts';

type Call = (...args: (number | string | Buffer | number[] | (string | null)[])[]) => number;

interface Koffi {
  load(library: null): { func(declaration: string): Call };
}

/** Size of the buffers for structs of libc, which are far smaller (336 and 80 bytes in glibc). */
const structBytes = 4096;
const untouched = 0xa5;

/** Flags of <spawn.h>, the same in glibc and musl. */
const setSigDefault = 0x04;
const setSigMask = 0x08;
const setSession = 0x80;
/** WNOHANG of <sys/wait.h>. */
const noHang = 1;

/** Loads posix_spawn. Returns undefined if this machine has no koffi addon, or libc lacks a function. */
export function loadPosixSpawn(): ReturnType<typeof loadLibc> | undefined {
  try {
    return loadLibc(createRequire(import.meta.url)(`@koromix/koffi-linux-${process.arch}`) as Koffi);
  } catch {
    return undefined;
  }
}

function loadLibc(koffi: Koffi) {
  const libc = koffi.load(null);
  const func = (declaration: string): Call => libc.func(declaration);
  const spawnp = func(
    'int posix_spawnp(_Out_ int *pid, str file, void *actions, void *attributes, str *argv, str *envp)',
  );
  const initActions = func('int posix_spawn_file_actions_init(void *actions)');
  const addDup2 = func('int posix_spawn_file_actions_adddup2(void *actions, int from, int to)');
  const addChdir = func('int posix_spawn_file_actions_addchdir_np(void *actions, str path)');
  const destroyActions = func('int posix_spawn_file_actions_destroy(void *actions)');
  const waitpid = func('int waitpid(int pid, _Out_ int *status, int options)');
  const actions = struct();
  const attributes = attributesOf(func);

  /**
   * Starts a program in a new session and returns its pid. Returns undefined if posix_spawn cannot start the program.
   * The caller must then use Node's spawn, which also reports the error.
   */
  function spawn({ file, args, cwd, env }: SpawnRequest, files: readonly number[]): number | undefined {
    const argv = [file, ...args];
    const envp = Object.entries(env).map(([name, value]) => `${name}=${value}`);
    // C would cut a text at a NUL byte. Node's spawn refuses such a text with an error.
    if ([cwd, ...argv, ...envp].some((text) => text.includes('\0'))) return undefined;
    const pid = [0];
    if (initActions(actions) !== 0) return undefined;
    assertUntouched(actions);
    let errno = addChdir(actions, cwd);
    for (const [to, from] of files.entries()) errno ||= addDup2(actions, from, to);
    // posix_spawnp(3) searches for the program in the PATH of this process.
    errno ||= spawnp(pid, file, actions, attributes, [...argv, null], [...envp, null]);
    destroyActions(actions);
    return errno === 0 ? pid[0] : undefined;
  }

  /** Returns how the child has ended, at the first call after its end. Any other call returns undefined. */
  function wait(pid: number): Exited | undefined {
    const status = [0];
    if (waitpid(pid, status, noHang) !== pid) return undefined;
    return decodeStatus(status[0] ?? 0);
  }

  return { spawn, wait };
}

/**
 * Returns attributes with which a child leads a new session, has the default handler of every signal, and blocks no
 * signal. Node's spawn with `detached` does the same.
 */
function attributesOf(func: (declaration: string) => Call): Buffer {
  const attributes = struct();
  const noSignals = Buffer.alloc(structBytes);
  // All bits are set directly. sigfillset(3) would omit the signals that the C library uses itself (two in glibc), and
  // the child would ignore these signals.
  const allSignals = Buffer.alloc(structBytes, 0xff);
  const failed = [
    func('int posix_spawnattr_init(void *attributes)')(attributes),
    func('int posix_spawnattr_setsigdefault(void *attributes, void *set)')(attributes, allSignals),
    func('int posix_spawnattr_setsigmask(void *attributes, void *set)')(attributes, noSignals),
    func('int posix_spawnattr_setflags(void *attributes, short flags)')(
      attributes,
      setSigDefault | setSigMask | setSession,
    ),
  ].some((result) => result !== 0);
  if (failed) throw new Error('posix_spawn of this libc cannot set the session or the signals of a child');
  assertUntouched(attributes);
  return attributes;
}

const struct = (): Buffer => Buffer.alloc(structBytes, untouched);

function assertUntouched(one: Buffer): void {
  if (one.subarray(structBytes / 2).some((byte) => byte !== untouched))
    throw new Error('a struct of this libc is larger than its buffer');
}
