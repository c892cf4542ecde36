// How long a streaming call waits for a machine that neither takes nor sends anything.
import { after } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import type { Frame } from '../../shared/rpc.ts';

/** A disk may need so many times longer to make everything durable. */
const settling = 10;

/** Gives a call up when the machine neither takes nor sends anything for too long, where it is its turn. */
export class Patience {
  readonly #ms: number;
  readonly #abort: AbortController;
  #cancel = (): void => {};
  #over = false;
  #toldFailure = false;

  /** `ms` 0: endless. */
  constructor(ms: number, abort: AbortController) {
    this.#ms = ms;
    this.#abort = abort;
  }

  /** The time it takes whoever gives us the requests is not the machine's; from the last one on it is. */
  async *whileSending(requests: AsyncIterable<Buffer>): AsyncGenerator<Buffer> {
    let sent = 0;
    this.#hold();
    for await (const request of requests) {
      sent += 1;
      this.#begin();
      yield request;
      this.#hold();
    }
    this.#begin(sent > 1 ? settling : 1);
  }

  /** Neither is the time of whoever takes the frames from us. */
  async *whileReceiving(frames: AsyncIterable<Frame>): AsyncGenerator<Frame> {
    for await (const frame of frames) {
      this.#hold();
      this.#toldFailure = Boolean(frame.error);
      yield frame;
      this.#begin();
    }
  }

  /** The machine itself ended its answer, with an error. */
  get toldFailure(): boolean {
    return this.#toldFailure;
  }

  /** For good: the call is over. */
  end(): void {
    this.#over = true;
    this.#hold();
  }

  #hold(): void {
    this.#cancel();
  }

  #begin(times = 1): void {
    this.#hold();
    if (this.#ms > 0 && !this.#over) this.#cancel = after(this.#ms * times, () => this.#abort.abort(stuck()));
  }
}

function stuck(): AppError {
  return new AppError('machine_timeout', 'the machine stopped in the middle of its answer');
}
