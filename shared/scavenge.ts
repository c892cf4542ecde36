// Tells V8 to collect its young generation after so many bytes of large buffers. They die young, but V8 counts them
// with the old generation: it would mark the whole heap again and again, half of the cost of a transfer (measured).
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';

const everyBytes = 8 * 1024 * 1024;
let passed = 0;
let collect: ((options: { type: 'minor' }) => void) | undefined;

/** Called with every large buffer that passes. */
export function passing(bytes: number): void {
  passed += bytes;
  if (passed < everyBytes) return;
  passed = 0;
  collect ??= collector();
  collect({ type: 'minor' });
}

function collector(): (options: { type: 'minor' }) => void {
  setFlagsFromString('--expose-gc');
  return runInNewContext('gc') as (options: { type: 'minor' }) => void;
}
