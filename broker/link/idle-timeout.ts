// The idle timeout of a streaming call:
// the call fails when its machine neither takes nor sends anything for too long.
import { after } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';

/**
 * Factor for the timeout after the last request of a transfer,
 * when a disk may need longer to sync everything.
 */
const settling = 10;

/** A timer that runs only while the machine must act. */
export class IdleTimeout {
  readonly #ms: number;
  readonly #abort: AbortController;
  #cancel = (): void => {};
  #ended = false;

  /** A timeout of 0 ms means none. */
  constructor(ms: number, abort: AbortController) {
    this.#ms = ms;
    this.#abort = abort;
  }

  /**
   * Passes requests on. The timer runs while the machine takes a request and after the last request. It stops
   * while the source prepares the next.
   */
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

  /** Passes frames on. The timer stops while the reader handles a frame. */
  async *whileReceiving<T>(frames: AsyncIterable<T>): AsyncGenerator<T> {
    for await (const frame of frames) {
      this.#cancel();
      yield frame;
      this.#start();
    }
  }

  /** Ends the timeout for good, when the call is over. */
  end(): void {
    this.#ended = true;
    this.#cancel();
  }

  #start(times = 1): void {
    this.#cancel();
    if (this.#ms === 0 || this.#ended) return;
    const error = new AppError(
      'machine_timeout',
      'the machine stopped in the middle of its answer: try again, or look at its agent’s log',
    );
    this.#cancel = after(this.#ms * times, () => this.#abort.abort(error));
  }
}
