// The spawner, a program of its own: who starts a program waits until the kernel has it, be it from a disk that hangs,
// and the agent has more to do. A bare Node gets it as text, for a loader would double its memory: nothing outside the
// function exists there.
import type { Koffi } from '../../libc.ts';

/** A command to start. */
export interface SpawnRequest {
  id: string;
  file: string;
  args: string[];
  cwd: string;
  env: Record<string, string>;
  ids: { uid: number; gid: number } | undefined;
  /** Names of what become its first three files; without the first it has no input. */
  stdin: string | undefined;
  stdout: string;
  stderr: string;
}

/** Nothing was asked for a while. */
export interface Rest {
  rest: true;
}

/** How a process ended: with a code, or by a signal (its number), the other one is 0. */
export interface Exited {
  code: number;
  signal: number;
}

/** First that it is ready, then what became of each request: started or not, and its exit. */
export type SpawnReport =
  /** Empty, or why it starts everything the slow way. */
  | { ready: true; slow: string }
  /** `start`: see proc(5); with the pid it names one process for ever. */
  | { id: string; pid: number; start: string }
  | { id: string; errno: string }
  | ({ id: string } & Exited);

/** What koffi makes of a function of libc; pointers are buffers, strings or arrays of these, or of one number. */
type Libc = (...args: (number | string | Buffer | number[] | (string | null)[])[]) => number;

/** Starts one, with these as its first three files. Throws why not, or tells fail() and has no pid. */
type Starter = (request: SpawnRequest, files: number[], exited: (how: Exited) => void) => number | undefined;

/** `addon`: the name of koffi. `from`: the file for which that is resolved. Those make of `unmapper` what is done at rest. */
export function program(
  addon: string,
  from: string,
  unmapper: (addon: string, from: string) => () => void,
): void {
  const { spawn } = process.getBuiltinModule('node:child_process');
  const { accessSync, closeSync, constants, openSync, readdirSync } = process.getBuiltinModule('node:fs');
  const { readFileSync, readlinkSync, statSync, writeFileSync } = process.getBuiltinModule('node:fs');
  const { createRequire } = process.getBuiltinModule('node:module');
  const { signals } = process.getBuiltinModule('node:os').constants;
  const { getSystemErrorName } = process.getBuiltinModule('node:util');
  const requests: SpawnRequest[] = [];

  function report(one: SpawnReport): void {
    // It ends with its channel; a report that goes nowhere is no error.
    process.send?.(one, undefined, undefined, () => {});
  }

  /** By posix_spawn(3): the child shares our memory until it is the program, so nothing is copied. */
  function posixStarter(): Starter {
    const execute = openLibc();
    return ({ file, args, cwd, env }, files, exited) => {
      const envp = Object.entries(env).map(([name, value]) => `${name}=${value}`);
      // As Node says it; C would take what is before it for the whole.
      if ([file, cwd, ...args, ...envp].some((text) => text.includes('\0')))
        throw named('ERR_INVALID_ARG_VALUE');
      // Not every libc can have the child do it, and nobody else here needs a directory.
      process.chdir(cwd);
      try {
        const path = placeOf(file, env);
        let started = execute(path, [file, ...args], envp, files, exited);
        // As execvp(3): what names no interpreter is for the shell.
        if (started === 'ENOEXEC')
          started = execute('/bin/sh', ['/bin/sh', '--', path, ...args], envp, files, exited);
        if (typeof started === 'string') throw named(started);
        return started;
      } finally {
        process.chdir('/');
      }
    };
  }

  /** Starts with what libc has, and tells the ends of what it started; answers the pid, or the name of an error. */
  function openLibc() {
    // An addon has no types here.
    const koffi = createRequire(from)(addon) as Koffi<Libc>;
    const libc = koffi.load(null);
    const func = (declaration: string): Libc => libc.func(declaration);
    const posixSpawn = func(
      'int posix_spawn(_Out_ int *pid, str path, void *actions, void *attributes, str *argv, str *envp)',
    );
    const initActions = func('int posix_spawn_file_actions_init(void *actions)');
    const addDup2 = func('int posix_spawn_file_actions_adddup2(void *actions, int from, int to)');
    const destroyActions = func('int posix_spawn_file_actions_destroy(void *actions)');
    const waitpid = func('int waitpid(int pid, _Out_ int *status, int options)');
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
    const running = new Map<number, (how: Exited) => void>();

    function reap(pid: number, exited: (how: Exited) => void): void {
      const told = [0];
      if (waitpid(pid, told, noHang) !== pid) return;
      const [status = 0] = told;
      const signal = status & 0x7f;
      // It was stopped, which we are told of what is traced.
      if (signal === 0x7f) return;
      running.delete(pid);
      exited({ code: (status >> 8) & 0xff, signal });
    }
    // One signal may stand for many ends.
    process.on('SIGCHLD', () => {
      for (const [pid, exited] of running) reap(pid, exited);
    });

    return (
      path: string,
      argv: string[],
      envp: string[],
      files: number[],
      exited: (how: Exited) => void,
    ): number | string => {
      const pid = [0];
      let errno = initActions(actions);
      if (errno !== 0) return getSystemErrorName(-errno);
      for (const [to, file] of files.entries()) errno ||= addDup2(actions, file, to);
      errno ||= posixSpawn(pid, path, actions, attributes, [...argv, null], [...envp, null]);
      destroyActions(actions);
      if (errno !== 0) return getSystemErrorName(-errno);
      const [started = 0] = pid;
      running.set(started, exited);
      return started;
    };
  }

  /** As execvp(3), by the PATH that it will have itself; throws where it is nowhere. */
  function placeOf(file: string, { PATH = '/bin:/usr/bin' }: SpawnRequest['env']): string {
    if (file.includes('/')) return file;
    let refused = 'ENOENT';
    for (const place of PATH.split(':')) {
      const path = `${place || '.'}/${file}`;
      try {
        const found = statSync(path, { throwIfNoEntry: false });
        if (!found) continue;
        refused = 'EACCES';
        accessSync(path, constants.X_OK);
        if (found.isFile()) return path;
      } catch (error) {
        // What cannot be looked at is no reason not to look elsewhere.
        if (error instanceof Error && 'code' in error && error.code === 'EACCES') refused = 'EACCES';
      }
    }
    throw named(refused);
  }

  function named(code: string): Error {
    return Object.assign(new Error(code), { code });
  }

  /** By Node: a fork, which copies all our page tables first, but can become another user. */
  const forkStarter: Starter = ({ id, file, args, cwd, env, ids }, files, exited) => {
    const child = spawn(file, args, { cwd, env, stdio: files, detached: true, ...ids });
    // Node takes a death by a signal for real time for an exit with 0.
    child.once('exit', (code, name) => exited({ code: code ?? 0, signal: name ? signals[name] : 0 }));
    child.once('error', (error) => fail(id, error));
    return child.pid;
  };

  /** Fails when the agent no longer reads; a plain open would wait for it for ever. */
  function openOutput(path: string): number {
    const probe = openSync(path, constants.O_WRONLY | constants.O_NONBLOCK);
    try {
      return openSync(path, constants.O_WRONLY);
    } finally {
      closeSync(probe);
    }
  }

  /** Empty where it cannot be told: by then the process runs, which must be told all the same. */
  function startOf(pid: number): string {
    try {
      const text = readFileSync(`/proc/${pid}/stat`, 'latin1');
      return text.slice(text.lastIndexOf(')') + 2).split(' ')[19] ?? '';
    } catch {
      return '';
    }
  }

  function start(request: SpawnRequest): void {
    const { id, stdin, stdout, stderr } = request;
    const opened: number[] = [];
    const open = (fd: number): number => {
      opened.push(fd);
      return fd;
    };
    try {
      const outputs = [open(openOutput(stdout)), open(openOutput(stderr))];
      // Each its own: whoever has one open file can lock it for all who have the same.
      const input = open(openSync(stdin ?? '/dev/null', constants.O_RDONLY));
      const starter = request.ids ? forkStarter : usual;
      const pid = starter(request, [input, ...outputs], (how) => report({ id, ...how }));
      if (pid !== undefined) report({ id, pid, start: startOf(pid) });
    } catch (error) {
      fail(id, error);
    } finally {
      for (const fd of opened) closeSync(fd);
    }
  }

  function fail(id: string, error: unknown): void {
    const errno = error instanceof Error && 'code' in error ? String(error.code) : 'unknown';
    report({ id, errno });
  }

  /** One a turn, so that exits are told between many starts. */
  function next(): void {
    const request = requests[0];
    if (!request) return;
    start(request);
    requests.shift();
    setImmediate(next);
  }

  /** Terminals that the agent had open: they are not close-on-exec, and every command would have them, too. */
  function closeTerminals(): void {
    for (const fd of readdirSync('/proc/self/fd').map(Number)) {
      try {
        if (fd > 2 && /^\/dev\/(ptmx|pts\/)/.test(readlinkSync(`/proc/self/fd/${fd}`))) closeSync(fd);
      } catch {
        // The listing's own, closed by now.
      }
    }
  }

  /** A unit may shield the agent from the kernel's search for memory, but not what people run. */
  function leaveShield(): void {
    const file = '/proc/self/oom_score_adj';
    try {
      if (Number(readFileSync(file, 'latin1')) < 0) writeFileSync(file, '0');
    } catch {
      // A kernel without it.
    }
  }

  let usual = forkStarter;
  let slow = '';
  try {
    usual = posixStarter();
  } catch (error) {
    slow = error instanceof Error ? error.message : String(error);
  }
  const unmap = unmapper(addon, from);
  closeTerminals();
  leaveShield();
  // The agent decides when this ends, not who signals everything in a unit or a terminal.
  for (const signal of ['SIGTERM', 'SIGINT', 'SIGHUP'] as const) process.on(signal, () => {});
  process.on('disconnect', () => process.exit());
  process.on('message', (message) => {
    // Only the agent has the other end of the channel.
    const asked = message as SpawnRequest | Rest;
    if ('rest' in asked) return unmap();
    requests.push(asked);
    if (requests.length === 1) next();
  });
  process.title = 'farhand-spawner';
  report({ ready: true, slow });
}
