// What a process writes, from its pipes into its logs.
import type { OnReadOpts, Socket } from 'node:net';
import { monotonic, sleep } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';

/** What a pipe holds. */
const pipeBytes = 64 * 1024;
/** Buffers of pumps that are done: new ones for every command would keep the garbage collector busy. */
const spare: Buffer[] = [];
const mostSpare = 32;

/** Waits for the end of both pipes, but not long for something in the background that holds them. */
export async function drain(pumps: Pump[], drainMs: number): Promise<boolean> {
  const all = Promise.all(pumps.map(({ done }) => done));
  // Most have ended before their exit was heard of.
  if (pumps.some(({ ended }) => !ended())) await atEnd(pumps, all, drainMs);
  for (const { cut } of pumps) cut();
  return (await all).every((whole) => whole);
}

async function atEnd(pumps: Pump[], all: Promise<unknown>, drainMs: number): Promise<void> {
  const over = new AbortController();
  void all.finally(() => over.abort());
  do await sleep(drainMs, over.signal);
  while (
    // A disk that hangs is no reason to lose what the process wrote.
    !over.signal.aborted &&
    pumps.some(({ stalled }) => stalled(drainMs / 2))
  );
}

/** Where it goes. */
export interface Sink {
  /** Resolves when there may be more. */
  append(data: Uint8Array): Promise<void>;
}

export interface Pump {
  /** True when the pipe came to its end, false when it was cut. */
  done: Promise<boolean>;
  /** Whether the pipe came to its end; the disk may still have work. */
  ended(): boolean;
  cut(): void;
  /** Whether the disk has kept it waiting for that long. */
  stalled(ms: number): boolean;
}

/**
 * Reads a pipe or terminal through one buffer, and no further before its log took it: a runaway writer costs
 * itself speed and us no memory.
 */
export function pump(open: (onread: OnReadOpts) => Socket, output: Sink, id: string, log: Logger): Pump {
  const buffer = spare.pop() ?? Buffer.allocUnsafeSlow(pipeBytes);
  let busySince = Number.POSITIVE_INFINITY;
  let written = Promise.resolve();
  let complained = false;
  async function keep(bytes: number): Promise<void> {
    busySince = monotonic();
    await output.append(buffer.subarray(0, bytes)).catch((error: unknown) => {
      if (!complained) log.error({ err: error, id }, 'output of a command could not be kept');
      complained = true;
    });
    busySince = Number.POSITIVE_INFINITY;
    pipe.resume();
  }
  const callback = (bytes: number): boolean => {
    written = keep(bytes);
    return false;
  };
  const pipe = open({ buffer, callback });
  let ended = false;
  pipe.once('end', () => {
    ended = true;
  });
  const done = new Promise<boolean>((resolve) => {
    pipe.once('end', () => void written.then(() => resolve(true)));
    pipe.once('close', () => {
      void written.then(() => {
        if (spare.length < mostSpare) spare.push(buffer);
        resolve(ended);
      });
    });
  });
  // Its close says enough.
  pipe.on('error', () => {});
  pipe.resume();
  return {
    done,
    ended: () => ended,
    cut: () => pipe.destroy(),
    stalled: (ms) => monotonic() - busySince >= ms,
  };
}
