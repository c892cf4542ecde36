// Reads /proc/PID/stat (proc(5)): the parent, group, session, start time and end of a process.
import { readFileSync } from 'node:fs';

/**
 * The pid and start time of a process, which identify it. The pid alone does not suffice, because the kernel reuses
 * pids.
 */
export interface Leader {
  pid: number;
  /** Start time in clock ticks since boot, field 22 of /proc/PID/stat (proc(5)). */
  start: string;
}

export interface Process extends Leader {
  parent: number;
  group: number;
  session: number;
  /** The foreground process group of its terminal; -1 without a terminal. */
  foreground: number;
  alive: boolean;
  /** How it has ended, as waitpid(2) returns it. 0 while it is alive, or if this program may not read it. */
  status: number;
}

/** The current state of one process; undefined if it is gone. */
export function statNow(pid: number): Process | undefined {
  try {
    return parseStat(readFileSync(`/proc/${pid}/stat`, 'latin1'));
  } catch {
    return undefined;
  }
}

/**
 * Parses the text of a file /proc/PID/stat. The program name may contain brackets, so fields are counted after the last
 * `)`.
 */
export function parseStat(text: string): Process | undefined {
  const fields = text.slice(text.lastIndexOf(')') + 2).split(' ');
  const [state = '', parent, group, session, , foreground] = fields;
  const start = fields[19];
  if (!start) return undefined;
  // A process whose main thread is a zombie is still alive if it has other threads.
  const alive = !/[ZXx]/.test(state) || Number(fields[17]) > 1;
  const pid = Number.parseInt(text, 10);
  const ids = { parent: Number(parent), group: Number(group), session: Number(session) };
  return { pid, ...ids, foreground: Number(foreground), start, alive, status: Number(fields[49]) };
}
