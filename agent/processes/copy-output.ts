// Copies the output of a process from its pipe or terminal into its log.
import type { OnReadOpts, Socket } from 'node:net';
import { monotonic, sleep } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';

/** Default capacity of a pipe on Linux (pipe(7)). */
const pipeBytes = 64 * 1024;
/** Buffers of ended pumps, for reuse: new buffers for every command would keep the garbage collector busy. */
const spare: Buffer[] = [];
const mostSpare = 32;

/**
 * Waits for the end of all pipes, then closes them. It stops after `drainMs` if a background process still
 * holds a pipe open, or later while the disk is slow. Never rejects.
 */
export async function drain(pumps: Pump[], drainMs: number): Promise<void> {
  const over = new AbortController();
  const all = Promise.all(pumps.map(({ done }) => done)).finally(() => over.abort());
  if (pumps.some((pump) => !pump.ended)) {
    do await sleep(drainMs, over.signal);
    while (
      // While the disk hangs, waiting goes on, so that no output of the process is lost.
      !over.signal.aborted &&
      pumps.some((pump) => pump.stalled(drainMs / 2))
    );
  }
  for (const pump of pumps) pump.cut();
  await all;
}

export interface Sink {
  /** Resolves when the next append may be made. */
  append(data: Uint8Array): Promise<void>;
}

/**
 * Reads a pipe or terminal through one buffer, and reads on only after the log has stored the bytes.
 * A program that writes too fast is slowed down and costs the agent no memory.
 */
export class Pump {
  /** Resolves when the pipe has ended or was cut and all bytes read are in the log. Never rejects. */
  readonly done: Promise<void>;
  readonly #pipe: Socket;
  readonly #buffer = spare.pop() ?? Buffer.allocUnsafeSlow(pipeBytes);
  #store: (data: Uint8Array) => Promise<void> = async () => {};
  #written = Promise.resolve();
  #busySince = Number.POSITIVE_INFINITY;
  #ended = false;

  /** `open`: opens the pipe. into() must be called before the first bytes arrive, or they are lost. */
  constructor(open: (onread: OnReadOpts) => Socket) {
    const callback = (bytes: number): boolean => {
      this.#written = this.#take(bytes);
      return false;
    };
    this.#pipe = open({ buffer: this.#buffer, callback });
    // Every error is followed by `close`, which is handled below.
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

  /** Sets the log that receives the output. */
  into(output: Sink, id: string, log: Logger): this {
    let complained = false;
    this.#store = (data) =>
      output.append(data).catch((error: unknown) => {
        if (!complained) log.error({ err: error, id }, 'output of a command could not be stored');
        complained = true;
      });
    return this;
  }

  /** Whether the pipe is at its end. The last bytes may not be in the log yet. */
  get ended(): boolean {
    return this.#ended;
  }

  cut(): void {
    this.#pipe.destroy();
  }

  /** Whether the log has taken at least `ms` to store the last bytes. */
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
