// The spawner, a program of its own: who starts a program waits until the kernel has it, be it from a disk that hangs,
// and the agent has more to do. It does nothing else, so it waits in the kernel itself and not in Node's loop: a command
// passes through here twice. A bare Node gets it as text, for a loader would double its memory: nothing outside the
// function exists there.
import type { Promised } from '../promises.ts';
import type { Exited, Kernel } from './kernel.ts';

/** A command to start. */
export interface SpawnRequest {
  id: string;
  /** To be on the disk before that. */
  promised?: Promised | undefined;
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

/** First that it is ready, then what became of each request: started or not, and its exit. */
export type SpawnReport =
  /** `slow`: empty, or why it starts everything the slow way; `writes`: it can keep promises. */
  | { ready: true; slow: string; writes: boolean }
  /** `start`: see proc(5); with the pid it names one process for ever. */
  | { id: string; pid: number; start: string }
  | { id: string; errno: string }
  /** What was promised could not be written, and it did not start. */
  | { id: string; unkept: string }
  | ({ id: string } & Exited);

/** One way to start processes. */
interface Way {
  /** Fails when the agent no longer reads; a plain open would wait for it for ever. */
  openOutput(path: string): number;
  /** Starts one, with these as its first three files. Throws why not, or tells fail() and has no pid. */
  start(request: SpawnRequest, files: number[]): number | undefined;
  /** Its end is told from now on. */
  started(id: string, pid: number): void;
  /** Takes what is asked for until the agent goes. */
  serve(): void;
}

/** What it is given at its start. */
export interface Given {
  /** The name of koffi, and the file for which that is resolved. */
  addon: string;
  from: string;
  /** It can start as other users. */
  forking: boolean;
  /** The file of what it promises. */
  promises?: string | undefined;
}

/**
 * Lines of JSON: requests come on its first file, reports go to the second. `unmapper` makes what is done at rest,
 * `openKernel` throws where there is none.
 */
export function program(
  { addon, from, forking, promises }: Given,
  unmapper: (addon: string, from: string) => () => void,
  openKernel: (addon: string, from: string) => Kernel,
): void {
  const { spawn } = process.getBuiltinModule('node:child_process');
  const { accessSync, closeSync, constants, openSync, readdirSync } = process.getBuiltinModule('node:fs');
  const { readFileSync, readlinkSync, readSync, statSync } = process.getBuiltinModule('node:fs');
  const { writeFileSync, writeSync } = process.getBuiltinModule('node:fs');
  const { signals } = process.getBuiltinModule('node:os').constants;
  const { StringDecoder } = process.getBuiltinModule('node:string_decoder');
  const requests: SpawnRequest[] = [];
  const decoder = new StringDecoder();
  let partial = '';

  function report(one: SpawnReport): void {
    try {
      writeSync(1, `${JSON.stringify(one)}\n`);
    } catch {
      // The agent is gone.
      process.exit();
    }
  }

  /** Of what the agent sends; nothing is its end. */
  function take(bytes: Buffer): void {
    if (bytes.length === 0) process.exit();
    const lines = (partial + decoder.write(bytes)).split('\n');
    partial = lines.pop() ?? '';
    for (const line of lines) {
      // Only the agent has the other end.
      const asked = JSON.parse(line) as SpawnRequest | Rest;
      if ('rest' in asked) unmap();
      else requests.push(asked);
    }
  }

  /** By posix_spawn(3): the child shares our memory until it is the program, so nothing is copied. */
  function posixWay(): Way {
    const kernel = openKernel(addon, from);
    /** By what the kernel says their end with. */
    const watched = new Map<number, { id: string; pid: number }>();
    /** Where the kernel cannot say it they are looked at now and then. */
    const unwatched = new Set<{ id: string; pid: number }>();
    const lookMs = 100;

    function execute({ file, args, cwd, env }: SpawnRequest, files: number[]): number {
      const envp = Object.entries(env).map(([name, value]) => `${name}=${value}`);
      // As Node says it; C would take what is before it for the whole.
      if ([file, cwd, ...args, ...envp].some((text) => text.includes('\0')))
        throw named('ERR_INVALID_ARG_VALUE');
      // Not every libc can have the child do it, and nobody else here needs a directory.
      process.chdir(cwd);
      try {
        const path = placeOf(file, env);
        let started = kernel.spawn(path, [file, ...args], envp, files);
        // As execvp(3): what names no interpreter is for the shell.
        if (started === 'ENOEXEC')
          started = kernel.spawn('/bin/sh', ['/bin/sh', '--', path, ...args], envp, files);
        if (typeof started === 'string') throw named(started);
        return started;
      } finally {
        process.chdir('/');
      }
    }

    function over({ id, pid }: { id: string; pid: number }): boolean {
      const how = kernel.exited(pid);
      if (how) report({ id, ...how });
      return how !== undefined;
    }

    function reap(pidfd: number): void {
      const one = watched.get(pidfd);
      if (!one) return;
      // It is dead, but whoever traces it is told first, and takes as long as that may be.
      if (!over(one)) unwatched.add(one);
      watched.delete(pidfd);
      closeSync(pidfd);
    }

    return {
      openOutput: kernel.openOutput,
      start: execute,
      started(id, pid) {
        const pidfd = kernel.watch(pid);
        if (pidfd === undefined) unwatched.add({ id, pid });
        else watched.set(pidfd, { id, pid });
      },
      serve() {
        const bytes = Buffer.alloc(65_536);
        for (;;) {
          // One start at a time, so that exits are told between many.
          for (const { fd, gone } of kernel.wait(
            requests.length > 0 ? 0 : unwatched.size > 0 ? lookMs : -1,
          )) {
            if (fd !== 0) reap(fd);
            // What a dead agent had asked for is not begun.
            else if (gone) process.exit();
            else take(bytes.subarray(0, readSync(0, bytes)));
          }
          for (const one of unwatched) if (over(one)) unwatched.delete(one);
          startNext();
        }
      },
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
  const forkingWay: Way = {
    openOutput(path) {
      const probe = openSync(path, constants.O_WRONLY | constants.O_NONBLOCK);
      try {
        return openSync(path, constants.O_WRONLY);
      } finally {
        closeSync(probe);
      }
    },
    start({ id, file, args, cwd, env, ids }, files) {
      const child = spawn(file, args, { cwd, env, stdio: files, detached: true, ...ids });
      // Node takes a death by a signal for real time for an exit with 0.
      child.once('exit', (code, name) => report({ id, code: code ?? 0, signal: name ? signals[name] : 0 }));
      child.once('error', (error) => fail(id, error));
      return child.pid;
    },
    started() {},
    serve() {
      process.stdin.on('data', (bytes: Buffer) => {
        const busy = requests.length > 0;
        take(bytes);
        if (!busy) setImmediate(next);
      });
      process.stdin.once('close', () => process.exit());
      // One a turn, so that exits are told between many.
      function next(): void {
        startNext();
        if (requests.length > 0) setImmediate(next);
      }
    },
  };

  /** Empty where it cannot be told: by then the process runs, which must be told all the same. */
  function startOf(pid: number): string {
    try {
      const text = readFileSync(`/proc/${pid}/stat`, 'latin1');
      return text.slice(text.lastIndexOf(')') + 2).split(' ')[19] ?? '';
    } catch {
      return '';
    }
  }

  function startNext(): void {
    const request = requests[0];
    if (!request) return;
    if (keep(request)) start(request);
    requests.shift();
  }

  function start(request: SpawnRequest): void {
    const { id } = request;
    try {
      const pid = startOpen(request);
      if (pid === undefined) return;
      report({ id, pid, start: startOf(pid) });
      way.started(id, pid);
    } catch (error) {
      fail(id, error);
    }
  }

  function startOpen(request: SpawnRequest): number | undefined {
    const opened: number[] = [];
    const open = (fd: number): number => {
      opened.push(fd);
      return fd;
    };
    try {
      const outputs = [open(way.openOutput(request.stdout)), open(way.openOutput(request.stderr))];
      // Each its own: whoever has one open file can lock it for all who have the same.
      const input = open(openSync(request.stdin ?? '/dev/null', constants.O_RDONLY));
      return way.start(request, [input, ...outputs]);
    } finally {
      for (const fd of opened) closeSync(fd);
    }
  }

  function fail(id: string, error: unknown): void {
    report({ id, errno: errnoOf(error) });
  }

  function errnoOf(error: unknown): string {
    return error instanceof Error && 'code' in error ? String(error.code) : 'unknown';
  }

  /** False, and told, where it cannot be. */
  function keep({ id, promised }: SpawnRequest): boolean {
    if (!promised) return true;
    const bytes = Buffer.from(promised.text);
    try {
      for (let done = 0; done < bytes.length; ) {
        done += writeSync(promisesFile, bytes, done, bytes.length - done, promised.at + done);
      }
      return true;
    } catch (error) {
      report({ id, unkept: errnoOf(error) });
      return false;
    }
  }

  /** What is written there is on the disk; -1 where that cannot be. */
  function openPromises(): number {
    try {
      return promises === undefined ? -1 : openSync(promises, constants.O_WRONLY | constants.O_DSYNC);
    } catch {
      return -1;
    }
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

  let way = forkingWay;
  let slow = '';
  try {
    if (!forking) way = posixWay();
  } catch (error) {
    slow = error instanceof Error ? error.message : String(error);
  }
  const unmap = unmapper(addon, from);
  closeTerminals();
  leaveShield();
  // The agent decides when this ends, not who signals everything in a unit or a terminal.
  for (const signal of ['SIGTERM', 'SIGINT', 'SIGHUP'] as const) process.on(signal, () => {});
  process.title = 'farhand-spawner';
  const promisesFile = openPromises();
  report({ ready: true, slow, writes: promisesFile >= 0 });
  way.serve();
}
