// The spawner, a program of its own: a fork copies the page tables of who forks, and the agent is large.
// A bare Node gets it as text, for a loader would double its memory: nothing outside the function exists there.

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

/** First that it is ready, then what became of each request: started or not, and its exit. */
export type SpawnReport =
  | { ready: true }
  /** `start`: see proc(5); with the pid it names one process for ever. */
  | { id: string; pid: number; start: string }
  | { id: string; errno: string }
  | { id: string; code: number | null; signal: NodeJS.Signals | null };

export function program(): void {
  const { spawn } = process.getBuiltinModule('node:child_process');
  const { closeSync, constants, openSync, readdirSync, readFileSync, readlinkSync, writeFileSync } =
    process.getBuiltinModule('node:fs');
  const requests: SpawnRequest[] = [];

  function report(one: SpawnReport): void {
    // It ends with its channel; a report that goes nowhere is no error.
    process.send?.(one, undefined, undefined, () => {});
  }

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

  function start({ id, file, args, cwd, env, ids, stdin, stdout, stderr }: SpawnRequest): void {
    const opened: number[] = [];
    const open = (fd: number): number => {
      opened.push(fd);
      return fd;
    };
    try {
      const outputs = [open(openOutput(stdout)), open(openOutput(stderr))];
      const input = stdin === undefined ? 'ignore' : open(openSync(stdin, constants.O_RDONLY));
      const child = spawn(file, args, { cwd, env, stdio: [input, ...outputs], detached: true, ...ids });
      child.once('error', (error) => fail(id, error));
      child.once('exit', (code, signal) => report({ id, code, signal }));
      // Not reaped before this function is over.
      if (child.pid !== undefined) report({ id, pid: child.pid, start: startOf(child.pid) });
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

  closeTerminals();
  leaveShield();
  // The agent decides when this ends, not who signals everything in a unit or a terminal.
  for (const signal of ['SIGTERM', 'SIGINT', 'SIGHUP'] as const) process.on(signal, () => {});
  process.on('disconnect', () => process.exit());
  process.on('message', (message) => {
    // Only the agent has the other end of the channel.
    requests.push(message as SpawnRequest);
    if (requests.length === 1) next();
  });
  process.title = 'farhand-spawner';
  report({ ready: true });
}
