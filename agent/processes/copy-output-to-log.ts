// Copies the output of a process from its pipe or terminal into its log.
import type { OnReadOpts, Socket } from 'node:net';
import { endsWithin, monotonic } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';

/** Size of a buffer in bytes: the default capacity of a pipe on Linux (pipe(7)). */
const pipeBytes = 64 * 1024;

/**
 * Waits until all pipes have ended, and closes them. A pipe that a background process holds open is closed after at
 * least `drainMs` milliseconds. Never rejects.
 */
export async function drain(pumps: Pump[], drainMs: number): Promise<void> {
  const all = Promise.all(pumps.map(({ done }) => done));
  // A pump is stalled if its append to the log does not end because the disk hangs. The loop then waits for another
  // `drainMs`: cut() would lose the output that is still in the pipes.
  while (!(await endsWithin(drainMs, all)) && pumps.some((pump) => pump.stalled(drainMs / 2)));
  for (const pump of pumps) pump.cut();
  await all;
}

export interface Sink {
  /** Stores bytes. Resolves when the next append may be made. */
  append(data: Uint8Array): Promise<void>;
}

/** Copies the output of a pipe or terminal to a log. A program must wait if it writes faster than the log can store. */
export class Pump {
  /** Resolves when the pipe has ended or is closed, and all bytes read from it are in the log. Never rejects. */
  readonly done: Promise<void>;
  readonly #pipe: Socket;
  readonly #buffer = Buffer.allocUnsafeSlow(pipeBytes);
  readonly #store: (data: Uint8Array) => Promise<void>;
  #written = Promise.resolve();
  #busySince = Number.POSITIVE_INFINITY;

  /** `open`: opens the pipe for reading. `id`: id of the command or terminal, for log messages. */
  constructor(open: (onread: OnReadOpts) => Socket, output: Sink, id: string, log: Logger) {
    let complained = false;
    this.#store = (data) =>
      output.append(data).catch((err: unknown) => {
        if (!complained)
          log.error(
            { err, id },
            'the output of a command could not be stored, so its readers see a gap; check the free disk space',
          );
        complained = true;
      });
    const callback = (bytes: number): boolean => {
      this.#written = this.#take(bytes);
      return false;
    };
    this.#pipe = open({ buffer: this.#buffer, callback });
    // No handling is needed: `close` follows every error and is handled below.
    this.#pipe.on('error', () => {});
    this.done = new Promise((resolve) => {
      this.#pipe.once('close', () => void this.#written.then(resolve));
    });
    this.#pipe.resume();
  }

  /** True if the end of the pipe was reached. Its last bytes may not be in the log yet. */
  get ended(): boolean {
    return this.#pipe.readableEnded;
  }

  cut(): void {
    this.#pipe.destroy();
  }

  /** True if an append to the log has taken at least `ms` milliseconds so far and has not ended. */
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
