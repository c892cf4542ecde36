// Gives a streaming call up when its machine neither takes nor sends anything for too long.
import { after } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';

/** A disk may need so many times longer to make everything durable. */
const settling = 10;

/** Runs only where it is the machine's turn. */
export class IdleTimeout {
  readonly #ms: number;
  readonly #abort: AbortController;
  #cancel = (): void => {};
  #ended = false;

  /** `ms` 0: endless. */
  constructor(ms: number, abort: AbortController) {
    this.#ms = ms;
    this.#abort = abort;
  }

  /** The time of the source of the requests is not the machine's; from the last request on it is. */
  async *whileSending(requests: AsyncIterable<Buffer> | Iterable<Buffer>): AsyncGenerator<Buffer> {
    let sent = 0;
    this.#cancel();
    for await (const request of requests) {
      sent += 1;
      this.#start();
      yield request;
      this.#cancel();
    }
    this.#start(sent > 1 ? settling : 1);
  }

  /** Neither is the time of the reader of the frames. */
  async *whileReceiving<T>(frames: AsyncIterable<T>): AsyncGenerator<T> {
    for await (const frame of frames) {
      this.#cancel();
      yield frame;
      this.#start();
    }
  }

  /** For good: the call is over. */
  end(): void {
    this.#ended = true;
    this.#cancel();
  }

  #start(times = 1): void {
    this.#cancel();
    if (this.#ms === 0 || this.#ended) return;
    const error = new AppError('machine_timeout', 'the machine stopped in the middle of its answer');
    this.#cancel = after(this.#ms * times, () => this.#abort.abort(error));
  }
}
