// The spawner: a small separate process that starts programs for the agent. It is separate because a start can block on
// a hung disk, and small because a fork takes longer in a large process.
import { spawn } from 'node:child_process';
import { closeSync, constants, openSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { flushCompileCache } from 'node:module';
import { constants as os } from 'node:os';
import { join } from 'node:path';
import { statNow } from '../proc-pid-stat.ts';
import type { SpawnReport, SpawnRequest } from './messages.ts';
import { loadPosixSpawn } from './posix-spawn.ts';

/** The directory of the spawner's cgroup, which contains one cgroup per command; undefined if the spawner has none. */
const cgroup = joinCgroup(process.argv[2]);

const posix = loadPosixSpawn();

/** Pid of the agent. When the agent has ended, the spawner has another parent. */
const agentPid = process.ppid;

/** Ids of the commands and terminals whose processes posix_spawn has started, by pid. */
const running = new Map<number, string>();

/** The close-on-exec bit of `flags` in proc_pid_fdinfo(5). */
const closeOnExec = 0o2000000;

function report(message: SpawnReport): void {
  // Sending fails only if the agent has ended.
  process.send?.(message, undefined, undefined, (error) => {
    if (error) process.exit();
  });
}

function start(request: SpawnRequest): void {
  const { id } = request;
  // This request may have waited until after the agent's death. Its terminal may then belong to another program.
  if (process.ppid !== agentPid) process.exit();
  try {
    withFiles(request, (files) => {
      // posix_spawnp(3) searches for the program in this PATH.
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

/**
 * Starts a program with Node's spawn, for a machine or request that posix_spawn cannot serve. Reports the error if this
 * fails too.
 */
function startByNode({ id, file, args, cwd, env }: SpawnRequest, files: number[]): void {
  const child = spawn(file, args, { cwd, env, stdio: files, detached: true });
  child.once('error', (error) => reportFailure(id, error));
  if (child.pid === undefined) return;
  report({ id, pid: child.pid, start: startTime(child.pid) });
  // Known limitation: if a real-time signal ends the child, Node reports an exit with code 0.
  child.once('exit', (code, signal) =>
    report({ id, code: signal ? 128 + os.signals[signal] : (code ?? 0), signal: signal ?? '' }),
  );
}

/** Reports all ended children, because one SIGCHLD may stand for the exits of several children. */
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

/** Opens stdin, stdout and stderr anew for each program. Programs that share an open file would share its locks. */
function withFiles(
  { cgroup: own, stdin, stdout, stderr }: SpawnRequest,
  use: (files: number[]) => void,
): void {
  const files: number[] = [];
  try {
    files.push(openSync(stdin ?? '/dev/null', constants.O_RDONLY));
    for (const path of [stdout, stderr]) files.push(openOutput(path));
    if (cgroup && own) moveInto(join(cgroup, own));
    use(files);
  } finally {
    if (cgroup) moveInto(cgroup);
    for (const fd of files) closeSync(fd);
  }
}

/**
 * Opens an output pipe. Fails if the agent no longer reads from it, so that no program starts after the agent's death.
 */
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

/** Moves this thread into a cgroup ("threaded mode", cgroups(7)). A child of the thread begins in the same cgroup. */
function moveInto(directory: string): void {
  try {
    // Moving the whole process would block all forks on the machine for 3 to 12 ms (measured).
    writeFileSync(join(directory, 'cgroup.threads'), '0');
  } catch {
    // Without a cgroup, a kill finds the process by the marker variable in its environment.
  }
}

/**
 * Returns the start time of a child in clock ticks since boot; empty if unreadable. The pid still belongs to the child,
 * even if the child has ended: the kernel does not reuse the pid, because the spawner has not read the child's exit
 * status yet.
 */
const startTime = (pid: number): string => statNow(pid)?.start ?? '';

/**
 * Closes inherited files, such as the agent's terminals, which every program would inherit too. Node opens files
 * close-on-exec, so a file without that flag was inherited.
 */
function closeInherited(): void {
  for (const fd of readdirSync('/proc/self/fd').map(Number)) {
    try {
      const info = readFileSync(`/proc/self/fdinfo/${fd}`, 'latin1');
      const flags = Number.parseInt(/^flags:\s+(\d+)/m.exec(info)?.[1] ?? '', 8);
      if (fd > 2 && (flags & closeOnExec) === 0) closeSync(fd);
    } catch {
      // ENOENT: the list contains the descriptor of the listing itself, which is closed by now.
    }
  }
}

/** Undoes the agent's protection from the out-of-memory killer, so that commands do not inherit it. */
function resetOomScore(): void {
  const file = '/proc/self/oom_score_adj';
  try {
    if (Number(readFileSync(file, 'latin1')) < 0) writeFileSync(file, '0');
  } catch {
    // A kernel without oom_score_adj has not protected the agent either.
  }
}

closeInherited();
resetOomScore();
// These signals may be sent to all processes of a unit or terminal. Only the agent ends a spawner, so they are ignored.
for (const signal of ['SIGTERM', 'SIGINT', 'SIGHUP'] as const) process.on(signal, () => {});
process.once('disconnect', () => process.exit());
process.on('SIGCHLD', reportEnded);
// Messages are not checked, because only the agent can send over this channel.
process.on('message', (message) => start(message as SpawnRequest));
process.title = 'farhand-spawner';
report({ ready: true });
// Node writes its compile cache only at a normal exit, but a spawner is killed.
flushCompileCache();
