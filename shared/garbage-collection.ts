// Garbage collection: of the young generation after so many bytes of transferred frames, of everything when the process rests.
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import { every } from './clock.ts';

type Collect = (options: { type: 'minor' | 'major'; flavor?: 'last-resort' }) => void;

/** A heap that has idled is marked again after some 8 MiB; each frame is held in several buffers on its way. */
const everyBytes = 2 * 1024 * 1024;
const lookMs = 5_000;
/** A process rests that was busy for less than this part of the time between two looks, so many times in a row. */
const restful = 0.03;
const looks = 3;
/** A process that has grown by less than this since its last collection is left to V8. */
const worthwhile = 1.2;

let passed = 0;
let collect: Collect | undefined;

/**
 * Called with the size of every transferred frame. Buffers of frames die young, but V8 counts them with the old generation:
 * left alone it marks the whole heap again and again, half of the cost of a transfer (measured).
 */
export function countTransferred(bytes: number): void {
  passed += bytes;
  if (passed < everyBytes) return;
  passed = 0;
  collector()({ type: 'minor' });
}

/**
 * Collects the garbage of a start or a rush once the process has rested for three looks: V8 by itself frees it when it next
 * needs memory, which may be never. Goes on until the result is called. `ms`: between two looks.
 */
export function collectAtRest(ms: number = lookMs): () => void {
  // Several collections in a row make all code look old: without it the code would start slowly afterwards.
  setFlagsFromString('--no-flush-bytecode');
  let rested = 0;
  let seen = performance.eventLoopUtilization();
  // Resident bytes at their least since the last collection; freed memory is given back a moment later.
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

/** Undefined where every file that this process may open is open: the kernel is asked through one. */
export function residentBytes(): number | undefined {
  try {
    return process.memoryUsage.rss();
  } catch {
    return undefined;
  }
}

/**
 * V8's own gc(), which `--expose-gc` at the start of a program makes; our programs are started in ways that give no
 * flags. Set later, the flag counts for new contexts only (nodejs/node#16595), so the function is taken out of one, which
 * is undocumented: where it gives nothing V8 collects when it sees fit. Left to that, a broker at rest keeps 43 MiB
 * more, an agent 17, and a transfer has 0.6 of its throughput (measured). The documented way is no substitute:
 * HeapProfiler.collectGarbage of node:inspector gives back 9 MiB less, and collects no young generation alone.
 */
function collector(): Collect {
  if (collect) return collect;
  setFlagsFromString('--expose-gc');
  collect = (runInNewContext('globalThis.gc') as Collect | undefined) ?? (() => {});
  return collect;
}
