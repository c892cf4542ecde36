// Decodes the exit status of a process, as waitpid(2) returns it. Also reads that status from /proc.
import { readlinkSync } from 'node:fs';
import { constants } from 'node:os';
import { type Leader, statNow } from '../proc-pid-stat.ts';
import type { Exited } from './messages.ts';

/** Decodes a status of waitpid(2). Returns undefined for a process that a debugger has only stopped. */
export function decodeStatus(word: number): Exited | undefined {
  const signal = word & 0x7f;
  if (signal === 0x7f) return undefined;
  return signal === 0
    ? { code: (word >> 8) & 0xff, signal: '' }
    : { code: 128 + signal, signal: signalName(signal) };
}

/**
 * Returns how a process has ended, without waitpid(2), which only the parent can call. Works until the parent has
 * called it. Returns undefined if the process is alive or gone, or if this program has no permission to read its
 * status.
 */
export function readExit({ pid, start }: Leader): Exited | undefined {
  const process = statNow(pid);
  if (process?.start !== start || process.alive) return undefined;
  try {
    // The kernel protects this link like the status (namespaces(7), proc(5)). Without the permission, the link cannot be
    // read, and the status reads as 0.
    readlinkSync(`/proc/${pid}/ns/pid`);
    return decodeStatus(process.status);
  } catch {
    return undefined;
  }
}

/** Number of SIGRTMIN in glibc, which reserves the two signals before it. */
const firstRealTime = 34;

/** The name of a signal. Node has no names for real-time signals. */
function signalName(signal: number): string {
  const known = Object.entries(constants.signals).find(([, number]) => number === signal);
  if (known) return known[0];
  if (signal < firstRealTime) return `SIG${signal}`;
  return signal === firstRealTime ? 'SIGRTMIN' : `SIGRTMIN+${signal - firstRealTime}`;
}
