// Starts programs by posix_spawn(3), through the addon of koffi: the child shares our memory until it is the program.
// Node's spawn copies the page tables of the whole process first, which halves the commands a second at 32 at once.
import { createRequire } from 'node:module';
import { constants } from 'node:os';
import type { Exited, SpawnRequest } from './messages.ts';

export interface PosixSpawn {
  /**
   * Looks for the program in our own PATH. Its pid, leader of a session of its own; undefined where Node's spawn must start
   * it or find the error.
   */
  spawn(request: SpawnRequest, files: readonly number[]): number | undefined;
  /** How that child has ended, once; undefined before. */
  wait(pid: number): Exited | undefined;
}

/** What koffi makes of a function of libc. */
type Call = (...args: (number | string | Buffer | number[] | (string | null)[])[]) => number;

interface Koffi {
  load(library: null): { func(declaration: string): Call };
}

/** Far more than the opaque structs of any libc take (336 and 80 bytes in glibc); the second half must stay untouched. */
const structBytes = 4096;
const untouched = 0xa5;

/** Of <spawn.h>, the same in glibc and musl. */
const setSigDefault = 0x04;
const setSigMask = 0x08;
const setSession = 0x80;
/** Of <sys/wait.h>. */
const noHang = 1;

/** Undefined without the addon, which does not exist for every machine, and where libc lacks a function. */
export function loadPosixSpawn(): PosixSpawn | undefined {
  try {
    return openLibc(createRequire(import.meta.url)(`@koromix/koffi-linux-${process.arch}`) as Koffi);
  } catch {
    return undefined;
  }
}

function openLibc(koffi: Koffi): PosixSpawn {
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

  function spawn({ file, args, cwd, env, ids }: SpawnRequest, files: readonly number[]): number | undefined {
    const argv = [file, ...args];
    const envp = Object.entries(env).map(([name, value]) => `${name}=${value}`);
    // Another user needs a fork. C would take a text with NUL for what is before it; Node's spawn refuses it.
    if (ids || [cwd, ...argv, ...envp].some((text) => text.includes('\0'))) return undefined;
    const pid = [0];
    if (initActions(actions) !== 0) return undefined;
    assertUntouched(actions);
    let errno = addChdir(actions, cwd);
    for (const [to, from] of files.entries()) errno ||= addDup2(actions, from, to);
    errno ||= spawnp(pid, file, actions, attributes, [...argv, null], [...envp, null]);
    destroyActions(actions);
    return errno === 0 ? pid[0] : undefined;
  }

  function wait(pid: number): Exited | undefined {
    const status = [0];
    if (waitpid(pid, status, noHang) !== pid) return undefined;
    const [word = 0] = status;
    const signal = word & 0x7f;
    // A child that is traced has stopped.
    if (signal === 0x7f) return undefined;
    return signal === 0
      ? { code: (word >> 8) & 0xff, signal: '' }
      : { code: 128 + signal, signal: signalName(signal) };
  }

  return { spawn, wait };
}

/** A session of its own, and no signal ignored or blocked, as Node's spawn does with `detached`. */
function attributesOf(func: (declaration: string) => Call): Buffer {
  const attributes = struct();
  const noSignals = Buffer.alloc(structBytes);
  // Not sigfillset(3): that leaves out the two signals of the C library itself, which the child would then ignore.
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
  if (failed) throw new Error('posix_spawn: no sessions or signals');
  assertUntouched(attributes);
  return attributes;
}

const struct = (): Buffer => Buffer.alloc(structBytes, untouched);

function assertUntouched(one: Buffer): void {
  if (one.subarray(structBytes / 2).some((byte) => byte !== untouched)) throw new Error('larger than known');
}

/** Of glibc: the C library keeps the two signals before it for itself. */
const firstRealTime = 34;

/** Node knows no names of real-time signals. */
function signalName(signal: number): string {
  const known = Object.entries(constants.signals).find(([, number]) => number === signal);
  if (known) return known[0];
  if (signal < firstRealTime) return `SIG${signal}`;
  return signal === firstRealTime ? 'SIGRTMIN' : `SIGRTMIN+${signal - firstRealTime}`;
}
