// Has V8 collect its young generation after so many bytes of frames. Their buffers die young, but V8 counts them with
// the old generation: left alone it marks the whole heap again and again, half of what a transfer costs (measured).
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';

/** A heap that has idled is marked again after some 8 MiB; each frame is held in several buffers on its way. */
const everyBytes = 2 * 1024 * 1024;
let passed = 0;
let collect: ((options: { type: 'minor' }) => void) | undefined;

/** Called with every frame that passes. */
export function passing(bytes: number): void {
  passed += bytes;
  if (passed < everyBytes) return;
  passed = 0;
  collect ??= collector();
  collect({ type: 'minor' });
}

/** V8's own function, which Node shows only where this flag is set; the flag reaches no other context of ours. */
function collector(): (options: { type: 'minor' }) => void {
  setFlagsFromString('--expose-gc');
  return runInNewContext('gc') as (options: { type: 'minor' }) => void;
}
