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
  if (pumps.some((pump) => !pump.ended())) await atEnd(pumps, all, drainMs);
  for (const pump of pumps) pump.cut();
  return (await all).every((whole) => whole);
}

async function atEnd(pumps: Pump[], all: Promise<unknown>, drainMs: number): Promise<void> {
  const over = new AbortController();
  void all.finally(() => over.abort());
  do await sleep(drainMs, over.signal);
  while (
    // A disk that hangs is no reason to lose what the process wrote.
    !over.signal.aborted &&
    pumps.some((pump) => pump.stalled(drainMs / 2))
  );
}

/** Where it goes. */
export interface Sink {
  /** Resolves when there may be more. */
  append(data: Uint8Array): Promise<void>;
}

/**
 * Reads a pipe or terminal through one buffer, and no further before its log took it: a runaway writer costs
 * itself speed and us no memory.
 */
export class Pump {
  /** True when the pipe came to its end, false when it was cut. */
  readonly done: Promise<boolean>;
  readonly #pipe: Socket;
  readonly #buffer = spare.pop() ?? Buffer.allocUnsafeSlow(pipeBytes);
  #keep: (data: Uint8Array) => Promise<void> = async () => {};
  #written = Promise.resolve();
  #busySince = Number.POSITIVE_INFINITY;
  #ended = false;

  /** Opens it; nobody writes there before into(). */
  constructor(open: (onread: OnReadOpts) => Socket) {
    const callback = (bytes: number): boolean => {
      this.#written = this.#take(bytes);
      return false;
    };
    this.#pipe = open({ buffer: this.#buffer, callback });
    // Its close says enough.
    this.#pipe.on('error', () => {});
    this.done = new Promise<boolean>((resolve) => {
      this.#pipe.once('end', () => {
        this.#ended = true;
        void this.#written.then(() => resolve(true));
      });
      this.#pipe.once('close', () => {
        void this.#written.then(() => {
          if (spare.length < mostSpare) spare.push(this.#buffer);
          resolve(this.#ended);
        });
      });
    });
    this.#pipe.resume();
  }

  /** Whose output it is from now on. */
  into(output: Sink, id: string, log: Logger): this {
    let complained = false;
    this.#keep = (data) =>
      output.append(data).catch((error: unknown) => {
        if (!complained) log.error({ err: error, id }, 'output of a command could not be kept');
        complained = true;
      });
    return this;
  }

  /** Whether the pipe came to its end; the disk may still have work. */
  ended(): boolean {
    return this.#ended;
  }

  cut(): void {
    this.#pipe.destroy();
  }

  /** Whether the disk has kept it waiting for that long. */
  stalled(ms: number): boolean {
    return monotonic() - this.#busySince >= ms;
  }

  async #take(bytes: number): Promise<void> {
    this.#busySince = monotonic();
    await this.#keep(this.#buffer.subarray(0, bytes));
    this.#busySince = Number.POSITIVE_INFINITY;
    this.#pipe.resume();
  }
}
