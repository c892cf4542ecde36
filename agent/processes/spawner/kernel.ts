// What the spawner has of libc and the kernel: processes that begin without a fork, and news of their ends.
import type { Koffi } from '../../libc.ts';

/** How a process ended: with a code, or by a signal (its number), the other one is 0. */
export interface Exited {
  code: number;
  signal: number;
}

export interface News {
  fd: number;
  /** The other end is gone, be there something left to read. */
  gone: boolean;
}

export interface Kernel {
  /**
   * Starts a program as the leader of a session, with these as its first files. By posix_spawn(3): the child shares our
   * memory until it is the program, so nothing is copied. The pid, or the name of an error.
   */
  spawn(path: string, argv: string[], envp: string[], files: number[]): number | string;
  /** Of a child that has ended, once. */
  exited(pid: number): Exited | undefined;
  /** Of a child: wait() names what this answers when that has ended. Undefined where there is no room for that. */
  watch(pid: number): number | undefined;
  /** Files with news, the standard input among them, when there are some, a signal came or `ms` have passed; -1: never. */
  wait(ms: number): News[];
  /** The end of a named pipe that writes; fails when nobody reads. */
  openOutput(path: string): number;
}

/** What koffi makes of a function of libc; pointers are buffers, strings or arrays of these, or of one number. */
type Call = (...args: (number | string | Buffer | number[] | (string | null)[])[]) => number;

/**
 * `addon`: the name of koffi. `from`: the file for which that is resolved. Throws where not all of it is there. The
 * spawner gets this as text: nothing outside the function exists there.
 */
export function openKernel(addon: string, from: string): Kernel {
  const { closeSync, constants, openSync } = process.getBuiltinModule('node:fs');
  const { createRequire } = process.getBuiltinModule('node:module');
  const { getSystemErrorName } = process.getBuiltinModule('node:util');
  // An addon has no types here.
  const koffi = createRequire(from)(addon) as Koffi<Call>;
  const libc = koffi.load(null);
  const func = (declaration: string): Call => libc.func(declaration);
  const posixSpawn = func(
    'int posix_spawn(_Out_ int *pid, str path, void *actions, void *attributes, str *argv, str *envp)',
  );
  const initActions = func('int posix_spawn_file_actions_init(void *actions)');
  const addDup2 = func('int posix_spawn_file_actions_adddup2(void *actions, int from, int to)');
  const destroyActions = func('int posix_spawn_file_actions_destroy(void *actions)');
  const waitpid = func('int waitpid(int pid, _Out_ int *status, int options)');
  const fcntl = func('int fcntl(int fd, int command, int value)');
  const epollWait = func('int epoll_wait(int epoll, void *events, int most, int ms)');
  const epollCtl = func('int epoll_ctl(int epoll, int what, int fd, void *event)');
  const syscall = func('long syscall(long number, int first, int second)');
  // As large as in any libc, with room to spare: 336 and 80 bytes in glibc and in musl.
  const attributes = Buffer.alloc(1024);
  const actions = Buffer.alloc(1024);
  const [noSignals, allSignals] = [Buffer.alloc(128), Buffer.alloc(128, 0xff)];
  const [setSigDefault, setSigMask, setSession, noHang] = [0x04, 0x08, 0x80, 1];
  func('int posix_spawnattr_init(void *attributes)')(attributes);
  func('int posix_spawnattr_setsigdefault(void *attributes, void *set)')(attributes, allSignals);
  func('int posix_spawnattr_setsigmask(void *attributes, void *set)')(attributes, noSignals);
  const setFlags = func('int posix_spawnattr_setflags(void *attributes, short flags)');
  if (setFlags(attributes, setSigDefault | setSigMask | setSession) !== 0) throw new Error('no sessions');

  // epoll_ctl(2): EPOLL_CTL_ADD, EPOLLIN, EPOLLHUP; the struct is packed on x86_64 alone, its data is the last 8 bytes.
  const [add, readable, hungUp, most, closeOnExec] = [1, 0x01, 0x10, 64, 0o2000000];
  const size = process.arch === 'x64' ? 12 : 16;
  const events = Buffer.alloc(most * size);
  const event = Buffer.alloc(size);
  const epoll = func('int epoll_create1(int flags)')(closeOnExec);
  // The same number everywhere; Linux before 5.3 does not have it.
  const pidfdOpen = 434;
  const own = syscall(pidfdOpen, process.pid, 0);
  if (own < 0) throw new Error('no pidfd_open');
  closeSync(own);
  if (!listen(0)) throw new Error('no epoll');

  function listen(fd: number): boolean {
    event.writeUInt32LE(readable);
    event.writeInt32LE(fd, size - 8);
    return epollCtl(epoll, add, fd, event) === 0;
  }

  return {
    spawn(path: string, argv: string[], envp: string[], files: number[]): number | string {
      const pid = [0];
      let errno = initActions(actions);
      if (errno !== 0) return getSystemErrorName(-errno);
      for (const [to, file] of files.entries()) errno ||= addDup2(actions, file, to);
      errno ||= posixSpawn(pid, path, actions, attributes, [...argv, null], [...envp, null]);
      destroyActions(actions);
      return errno === 0 ? (pid[0] ?? 0) : getSystemErrorName(-errno);
    },
    exited(pid: number): Exited | undefined {
      const told = [0];
      if (waitpid(pid, told, noHang) !== pid) return undefined;
      const [status = 0] = told;
      // It was stopped, which we are told of what is traced.
      if ((status & 0x7f) === 0x7f) return undefined;
      return { code: (status >> 8) & 0xff, signal: status & 0x7f };
    },
    watch(pid: number): number | undefined {
      const pidfd = syscall(pidfdOpen, pid, 0);
      if (pidfd < 0) return undefined;
      if (listen(pidfd)) return pidfd;
      closeSync(pidfd);
      return undefined;
    },
    wait(ms: number): News[] {
      const count = Math.max(0, epollWait(epoll, events, most, ms));
      return Array.from({ length: count }, (_, nth) => {
        const at = nth * size;
        return { fd: events.readInt32LE(at + size - 8), gone: (events.readUInt32LE(at) & hungUp) !== 0 };
      });
    },
    openOutput(path: string): number {
      const fd = openSync(path, constants.O_WRONLY | constants.O_NONBLOCK);
      const setFlagsOf = 4;
      if (fcntl(fd, setFlagsOf, constants.O_WRONLY) === 0) return fd;
      closeSync(fd);
      throw new Error('a pipe that does not wait');
    },
  };
}
