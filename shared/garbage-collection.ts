// Starts garbage collection: of young objects after 2 MiB of transferred frames, of the whole heap when idle.
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import { every } from './clock.ts';

type Collect = (options: { type: 'minor' | 'major'; flavor?: 'last-resort' }) => void;

/** After idling, V8 marks the heap again after some 8 MiB; each frame is in several buffers on its way. */
const everyBytes = 2 * 1024 * 1024;
const lookMs = 5_000;
/** A process is idle if it was busy for less than this share of the time, in `looks` checks in a row. */
const restful = 0.03;
const looks = 3;
/** The heap is collected only if resident memory has grown by this factor since the last collection. */
const worthwhile = 1.2;

let passed = 0;
let collect: Collect | undefined;

/**
 * Called with the size of every transferred frame. Buffers of frames are short-lived, but V8 counts them with
 * the old generation. Without these collections V8 marks the whole heap repeatedly: half of the cost of a
 * transfer (measured).
 */
export function countTransferred(bytes: number): void {
  passed += bytes;
  if (passed < everyBytes) return;
  passed = 0;
  collector()({ type: 'minor' });
}

/**
 * Collects garbage, such as that of a start or a burst of work, when the process was idle for three checks.
 * V8 itself frees that memory only when it needs more, which may be never. `ms`: milliseconds between two
 * checks. Runs until the returned function is called.
 */
export function collectAtRest(ms: number = lookMs): () => void {
  // Repeated collections make V8 discard bytecode as old; without this flag the next work starts slowly.
  setFlagsFromString('--no-flush-bytecode');
  let rested = 0;
  let seen = performance.eventLoopUtilization();
  // Least resident bytes since the last collection; the system gets freed memory back a moment after it.
  let settled = 0;
  return every(ms, () => {
    const since = performance.eventLoopUtilization(seen);
    seen = performance.eventLoopUtilization();
    const resident = residentBytes();
    if (resident === undefined) return;
    settled = Math.min(settled, resident);
    rested = since.utilization > restful ? 0 : rested + 1;
    if (rested < looks || resident < settled * worthwhile) return;
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
 * V8's own gc(), normally enabled by starting Node with `--expose-gc`; our programs cannot rely on such
 * flags. A flag set later counts for new contexts only (nodejs/node#16595), so gc() is taken from a new
 * context. That is undocumented: where it yields no function, V8 collects by its own schedule. In that case
 * an idle broker holds 43 MiB more, an idle agent 17 MiB more, and a transfer has 0.6 of its throughput
 * (measured). The documented HeapProfiler.collectGarbage of node:inspector frees 9 MiB less, and cannot
 * collect the young generation alone.
 */
function collector(): Collect {
  if (collect) return collect;
  setFlagsFromString('--expose-gc');
  collect = (runInNewContext('globalThis.gc') as Collect | undefined) ?? (() => {});
  return collect;
}
