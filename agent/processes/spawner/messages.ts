// The messages between agent and spawner, over Node's channel between parent and child.

export interface SpawnRequest {
  id: string;
  file: string;
  args: string[];
  cwd: string;
  env: Record<string, string>;
  /** Name of the program's cgroup; undefined without cgroups. */
  cgroup: string | undefined;
  /** Paths of stdin, stdout and stderr. Without `stdin` the program reads /dev/null. */
  stdin: string | undefined;
  stdout: string;
  stderr: string;
}

/**
 * How a process ended. If a signal ended it, `code` is 128 plus the signal's number, as in shells. If no signal ended
 * it, `signal` is empty.
 */
export interface Exited {
  code: number;
  signal: string;
}

/**
 * Reports of the spawner. The first says that the spawner is ready. Then each request gets a report that its process
 * started or that the start failed. If the process started, a second report says how it ended.
 */
export type SpawnReport =
  | { ready: true }
  /** `start`: start time in clock ticks since boot (proc(5)), empty if unreadable. Pid and start identify a process. */
  | { id: string; pid: number; start: string }
  | { id: string; errno: string }
  | ({ id: string } & Exited);
