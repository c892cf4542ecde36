// The spawner, a small process of its own that starts programs for the agent: a start blocks until the kernel has read
// the program, perhaps from a disk that hangs, and a fork costs by the size of the process that forks.
import { spawn } from 'node:child_process';
import { closeSync, constants, mkdirSync, openSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { flushCompileCache } from 'node:module';
import { constants as os } from 'node:os';
import { join } from 'node:path';
import type { SpawnReport, SpawnRequest } from './messages.ts';
import { loadPosixSpawn } from './posix-spawn.ts';

/** The cgroup of this process, where it may make others; undefined elsewhere. */
const cgroup = joinCgroup(process.argv[2]);

const posix = loadPosixSpawn();

/** Ids of what posix_spawn has started, by pid. */
const running = new Map<number, string>();

/** Of flags in proc_pid_fdinfo(5). */
const closeOnExec = 0o2000000;

function report(message: SpawnReport): void {
  // It fails once the agent is gone.
  process.send?.(message, undefined, undefined, (error) => {
    if (error) process.exit();
  });
}

function start(request: SpawnRequest): void {
  const { id } = request;
  try {
    withFiles(request, (files) => {
      // Where posix_spawnp(3) looks for the program.
      process.env.PATH = request.env.PATH ?? '/usr/bin:/bin';
      const pid = posix?.spawn(request, files);
      if (pid === undefined) return startByNode(request, files);
      running.set(pid, id);
      report({ id, pid, start: startTime(pid) });
    });
  } catch (error) {
    reportFailure(id, error);
  }
}

/** A program that posix_spawn cannot start: Node forks, and can change the user. */
function startByNode({ id, file, args, cwd, env, ids }: SpawnRequest, files: number[]): void {
  const child = spawn(file, args, { cwd, env, stdio: files, detached: true, ...ids });
  child.once('error', (error) => reportFailure(id, error));
  if (child.pid === undefined) return;
  report({ id, pid: child.pid, start: startTime(child.pid) });
  // Node reports a death by a real-time signal as an exit with 0.
  child.once('exit', (code, signal) =>
    report({ id, code: signal ? 128 + os.signals[signal] : (code ?? 0), signal: signal ?? '' }),
  );
}

/** Signals come together: one call may stand for several ends. */
function reportEnded(): void {
  for (const [pid, id] of running) {
    const exited = posix?.wait(pid);
    if (!exited) continue;
    running.delete(pid);
    report({ id, ...exited });
  }
}

function reportFailure(id: string, error: unknown): void {
  report({ id, errno: error instanceof Error && 'code' in error ? String(error.code) : 'unknown' });
}

/** Each file is opened for this program alone: a lock on an open file is shared by all that have it. */
function withFiles({ id, stdin, stdout, stderr }: SpawnRequest, use: (files: number[]) => void): void {
  const files: number[] = [];
  try {
    files.push(openSync(stdin ?? '/dev/null', constants.O_RDONLY));
    for (const path of [stdout, stderr]) files.push(openOutput(path));
    enterCgroup(id);
    use(files);
  } finally {
    if (cgroup) moveInto(cgroup);
    for (const fd of files) closeSync(fd);
  }
}

/** Fails once the agent no longer reads, so that nothing starts after its death; a plain open would wait for ever. */
function openOutput(path: string): number {
  const probe = openSync(path, constants.O_WRONLY | constants.O_NONBLOCK);
  try {
    return openSync(path, constants.O_WRONLY);
  } finally {
    closeSync(probe);
  }
}

function joinCgroup(directory: string | undefined): string | undefined {
  try {
    if (directory) writeFileSync(join(directory, 'cgroup.procs'), '0');
    return directory;
  } catch {
    return undefined;
  }
}

/** What is forked next is born in a cgroup of its own. */
function enterCgroup(id: string): void {
  if (!cgroup) return;
  const own = join(cgroup, id);
  try {
    mkdirSync(own, { recursive: true });
    writeFileSync(join(own, 'cgroup.type'), 'threaded');
    moveInto(own);
  } catch {
    // The kill of its tree looks for the mark, too.
  }
}

/**
 * Moves this one thread, the one that forks ("threaded mode", cgroups(7)). That takes microseconds: to move a process takes
 * the kernel a grace period, 3 to 12 ms in which nothing on the machine forks (measured).
 */
function moveInto(directory: string): void {
  writeFileSync(join(directory, 'cgroup.threads'), '0');
}

/** The process exists until its exit was reported. */
function startTime(pid: number): string {
  try {
    const text = readFileSync(`/proc/${pid}/stat`, 'latin1');
    return text.slice(text.lastIndexOf(')') + 2).split(' ')[19] ?? '';
  } catch {
    return '';
  }
}

/**
 * Node opens everything close-on-exec, so what is not was inherited: terminals of the agent or files of the process that
 * started it. Every program would inherit it, too.
 */
function closeInherited(): void {
  for (const fd of readdirSync('/proc/self/fd').map(Number)) {
    try {
      const info = readFileSync(`/proc/self/fdinfo/${fd}`, 'latin1');
      const flags = Number.parseInt(/^flags:\s+(\d+)/m.exec(info)?.[1] ?? '', 8);
      if (fd > 2 && (flags & closeOnExec) === 0) closeSync(fd);
    } catch {
      // The descriptor of the listing itself, closed by now.
    }
  }
}

/** A unit may protect the agent from the out-of-memory killer, but not its commands. */
function resetOomScore(): void {
  const file = '/proc/self/oom_score_adj';
  try {
    if (Number(readFileSync(file, 'latin1')) < 0) writeFileSync(file, '0');
  } catch {
    // A kernel without it.
  }
}

closeInherited();
resetOomScore();
// The agent decides when this ends, not a signal to everything in a unit or a terminal.
for (const signal of ['SIGTERM', 'SIGINT', 'SIGHUP'] as const) process.on(signal, () => {});
process.once('disconnect', () => process.exit());
process.on('SIGCHLD', reportEnded);
// The agent alone has the other end of the channel.
process.on('message', (message) => start(message as SpawnRequest));
process.title = 'farhand-spawner';
report({ ready: true });
// It does so by itself at its end, but this one is killed.
flushCompileCache();
