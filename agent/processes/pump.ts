// Copies the output of a process from its pipe or terminal into its log.
import type { OnReadOpts, Socket } from 'node:net';
import { monotonic, sleep } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';

/** What a pipe holds. */
const pipeBytes = 64 * 1024;
/** Buffers of pumps that are done: new ones for every command keep the garbage collector busy. */
const spare: Buffer[] = [];
const mostSpare = 32;

/** Waits for the end of all pipes, but not long for something in the background that holds them. Never rejects. */
export async function drain(pumps: Pump[], drainMs: number): Promise<void> {
  const over = new AbortController();
  const all = Promise.all(pumps.map(({ done }) => done)).finally(() => over.abort());
  if (pumps.some((pump) => !pump.ended)) {
    do await sleep(drainMs, over.signal);
    while (
      // A disk that hangs is no reason to lose what the process wrote.
      !over.signal.aborted &&
      pumps.some((pump) => pump.stalled(drainMs / 2))
    );
  }
  for (const pump of pumps) pump.cut();
  await all;
}

export interface Sink {
  /** Resolves when there may be more. */
  append(data: Uint8Array): Promise<void>;
}

/**
 * Reads a pipe or terminal through one buffer, and no further before its log took it: a runaway writer costs
 * itself speed and the agent no memory.
 */
export class Pump {
  /** Resolves when all that was read is in the log. Never rejects. */
  readonly done: Promise<void>;
  readonly #pipe: Socket;
  readonly #buffer = spare.pop() ?? Buffer.allocUnsafeSlow(pipeBytes);
  #store: (data: Uint8Array) => Promise<void> = async () => {};
  #written = Promise.resolve();
  #busySince = Number.POSITIVE_INFINITY;
  #ended = false;

  /** Nothing is written there before into(). */
  constructor(open: (onread: OnReadOpts) => Socket) {
    const callback = (bytes: number): boolean => {
      this.#written = this.#take(bytes);
      return false;
    };
    this.#pipe = open({ buffer: this.#buffer, callback });
    // Its close says enough.
    this.#pipe.on('error', () => {});
    this.done = new Promise((resolve) => {
      this.#pipe.once('end', () => {
        this.#ended = true;
        void this.#written.then(resolve);
      });
      this.#pipe.once('close', () => {
        void this.#written.then(() => {
          if (spare.length < mostSpare) spare.push(this.#buffer);
          resolve();
        });
      });
    });
    this.#pipe.resume();
  }

  /** Whose output it is from now on. */
  into(output: Sink, id: string, log: Logger): this {
    let complained = false;
    this.#store = (data) =>
      output.append(data).catch((error: unknown) => {
        if (!complained) log.error({ err: error, id }, 'output of a command could not be stored');
        complained = true;
      });
    return this;
  }

  /** Whether the pipe came to its end; the disk may still have work. */
  get ended(): boolean {
    return this.#ended;
  }

  cut(): void {
    this.#pipe.destroy();
  }

  /** Whether the disk has held it up for that long. */
  stalled(ms: number): boolean {
    return monotonic() - this.#busySince >= ms;
  }

  async #take(bytes: number): Promise<void> {
    this.#busySince = monotonic();
    await this.#store(this.#buffer.subarray(0, bytes));
    this.#busySince = Number.POSITIVE_INFINITY;
    this.#pipe.resume();
  }
}
