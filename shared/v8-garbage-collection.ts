// Starts V8's garbage collection. Collects young objects after each 3 MiB of transferred data, and the whole heap when
// the process is idle.
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import { every } from './clock.ts';

type Collect = (options: { type: 'minor' | 'major'; flavor?: 'last-resort' }) => void;

/**
 * Transferred bytes between two collections of young objects. Measured with other values:
 * - 2 MiB: 32 stalled downloads took up to 40 MiB more in a broker, because unread buffers became old and were freed
 *   late.
 * - 6 MiB: a download took twice the CPU, because V8 marked its heap after some 8 MiB of buffers.
 */
const everyBytes = 3 * 1024 * 1024;
const lookMs = 5_000;
/**
 * A process counts as idle if it was busy for at most this share of the time since the previous check. Its heap is
 * collected only after `idleChecks` such checks in a row. A broker with 10,000 machines is too busy to count as idle.
 * This is intended: a collection would free a tenth of its memory, but stall all requests for 0.5 s (measured).
 */
const idleShare = 0.03;
const idleChecks = 3;
/** The heap is collected only if resident memory has grown by this factor since the last collection. */
const worthwhile = 1.2;

/** Minimum number of connections within `burstMs` milliseconds at which countConnection() sets its flag of V8. */
const burst = 100;
const burstMs = 1_000;

let passed = 0;
let collect: Collect | undefined;

/**
 * Counts transferred bytes, and collects young objects after each `everyBytes`. Without these collections V8 would mark
 * the heap repeatedly, which is half of the cost of a transfer (measured).
 */
export function countTransferred(bytes: number): void {
  passed += bytes;
  if (passed < everyBytes) return;
  passed = 0;
  collector()({ type: 'minor' });
}

/**
 * Collects the heap when the process is idle and its memory has grown. Checks every `ms` milliseconds, until the
 * returned function is called.
 */
export function collectAtRest(ms: number = lookMs): () => void {
  // V8 would discard compiled bytecode after repeated collections. This flag keeps the bytecode, so that the next work
  // starts fast.
  setFlagsFromString('--no-flush-bytecode');
  let rested = 0;
  let seen = performance.eventLoopUtilization();
  // Smallest number of resident bytes since the last collection. The number right after a collection would be too high,
  // because V8 returns the memory to the system a moment later.
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

let connections = 0;
let isBurst = false;
let stopCounting: (() => void) | undefined;

/**
 * Counts an accepted connection, and sets a flag of V8 while many arrive. Connections take memory outside the heap of
 * V8, for example for TLS and HTTP/2. Without the flag, V8 marks the heap after each further 64 MiB of this memory, in
 * steps of up to 10 ms at each connection. With the flag, the memory counts toward the limit of the heap instead. When
 * 10,000 agents linked again, the flag reduced (measured):
 * - the broker's CPU time from 18 s to 12 s
 * - the wait of other requests from 245 ms to 48 ms at p99
 * The flag is in the output of `node --v8-options`; V8 13 (Node 24) has it.
 */
export function countConnection(): void {
  if (!process.versions.v8.startsWith('13.')) return;
  connections += 1;
  stopCounting ??= every(burstMs, () => {
    const areMany = connections >= burst;
    connections = 0;
    if (areMany !== isBurst)
      setFlagsFromString(`--${areMany ? '' : 'no-'}external-memory-accounted-in-global-limit`);
    isBurst = areMany;
    if (isBurst) return;
    stopCounting?.();
    stopCounting = undefined;
  });
}

/** Returns the resident bytes of this process; undefined if it has no free file descriptor, which the query needs. */
export function residentBytes(): number | undefined {
  try {
    return process.memoryUsage.rss();
  } catch {
    return undefined;
  }
}

/**
 * Returns V8's own gc(), in an undocumented way. The documented HeapProfiler.collectGarbage of node:inspector frees 9
 * MiB less and cannot collect young objects alone.
 */
function collector(): Collect {
  if (collect) return collect;
  // A flag that is set after the start of Node takes effect only in new contexts (nodejs/node#16595).
  setFlagsFromString('--expose-gc');
  // Without gc(), an idle broker takes 43 MiB more memory, an idle agent takes 17 MiB more, and transfers have only 0.6
  // of their throughput (measured).
  collect = (runInNewContext('globalThis.gc') as Collect | undefined) ?? (() => {});
  return collect;
}
