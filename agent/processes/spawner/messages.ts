// The messages between agent and spawner, over Node's channel between parent and child.

/** A program to start. */
export interface SpawnRequest {
  id: string;
  file: string;
  args: string[];
  cwd: string;
  env: Record<string, string>;
  ids: { uid: number; gid: number } | undefined;
  /** Paths of its first three files; without the first it has no input. */
  stdin: string | undefined;
  stdout: string;
  stderr: string;
}

/** How a process ended: `code` is 128 and its number after a signal, as shells have it; else `signal` is empty. */
export interface Exited {
  code: number;
  signal: string;
}

/** First that the spawner is ready, then what became of each request: started or not, and its exit. */
export type SpawnReport =
  | { ready: true }
  /** `start`: see proc(5); pid and start name one process for ever. Empty where it could not be read. */
  | { id: string; pid: number; start: string }
  | { id: string; errno: string }
  | ({ id: string } & Exited);
