// Starts V8's garbage collection: for young objects after each 3 MiB of transferred data, for the whole heap when
// the process is idle.
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import { every } from './clock.ts';

type Collect = (options: { type: 'minor' | 'major'; flavor?: 'last-resort' }) => void;

/**
 * Transferred bytes between two collections of young objects. Measured limits:
 * - 2 MiB is too little: 32 stalled downloads took up to 40 MiB more in a broker. A buffer that waits for a slow reader
 *   during two collections counts as old, and V8 frees it late.
 * - 6 MiB is too much: a download took twice the CPU. An idle V8 marks its heap again after some 8 MiB of buffers, so
 *   young buffers must be collected well before that.
 */
const everyBytes = 3 * 1024 * 1024;
const lookMs = 5_000;
/** A process is idle if it was busy for at most this share of the time between checks, `idleChecks` times in a row. */
const idleShare = 0.03;
const idleChecks = 3;
/** The heap is collected only if resident memory has grown by this factor since the last collection. */
const worthwhile = 1.2;

let passed = 0;
let collect: Collect | undefined;

/**
 * Must be called with the size of each piece of transferred data: starts a collection of young objects after every
 * `everyBytes`. V8 counts the buffers of a transfer as old objects, although they are short-lived. So without these
 * collections V8 marks the whole heap repeatedly, which is half of the cost of a transfer (measured).
 */
export function countTransferred(bytes: number): void {
  passed += bytes;
  if (passed < everyBytes) return;
  passed = 0;
  collector()({ type: 'minor' });
}

/**
 * Collects the garbage of a start or a burst of work once the process is idle. V8 itself would free that
 * memory only when it needs more. `ms`: milliseconds between two checks. Runs until the returned function is
 * called.
 */
export function collectAtRest(ms: number = lookMs): () => void {
  // Repeated collections make V8 discard compiled bytecode. With this flag V8 retains it, so the next work
  // starts fast.
  setFlagsFromString('--no-flush-bytecode');
  let rested = 0;
  let seen = performance.eventLoopUtilization();
  // Smallest number of resident bytes since the last collection. The number right after a collection is too high,
  // because V8 returns memory to the system a moment later.
  let settled = 0;
  return every(ms, () => {
    const since = performance.eventLoopUtilization(seen);
    seen = performance.eventLoopUtilization();
    const resident = residentBytes();
    if (resident === undefined) return;
    settled = Math.min(settled, resident);
    rested = since.utilization > idleShare ? 0 : rested + 1;
    if (rested < idleChecks || resident < settled * worthwhile) return;
    rested = 0;
    collector()({ type: 'major', flavor: 'last-resort' });
    settled = Number.POSITIVE_INFINITY;
  });
}

/** Resident bytes of this process; undefined if it has no free file descriptor, which the query needs. */
export function residentBytes(): number | undefined {
  try {
    return process.memoryUsage.rss();
  } catch {
    return undefined;
  }
}

/**
 * Returns V8's own gc(), which is normally enabled by starting Node with `--expose-gc`. A flag that is set
 * later counts only for new contexts (nodejs/node#16595), so gc() is taken from a new context. This is
 * undocumented. If it fails, V8 collects by its own schedule: an idle broker then takes 43 MiB more, an idle
 * agent 17 MiB more, and a transfer has 0.6 of its throughput (measured). The documented
 * HeapProfiler.collectGarbage of node:inspector frees 9 MiB less, and cannot collect young objects alone.
 */
function collector(): Collect {
  if (collect) return collect;
  setFlagsFromString('--expose-gc');
  collect = (runInNewContext('globalThis.gc') as Collect | undefined) ?? (() => {});
  return collect;
}
