// The idle timeout of a streaming call: it fails when its machine neither takes nor sends anything for too long.
import { after } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';

/** After a transfer a disk may need so many times longer to sync everything. */
const settling = 10;

/** Runs only while it is the machine's turn. */
export class IdleTimeout {
  readonly #ms: number;
  readonly #abort: AbortController;
  #cancel = (): void => {};
  #ended = false;

  /** `ms` 0: no timeout. */
  constructor(ms: number, abort: AbortController) {
    this.#ms = ms;
    this.#abort = abort;
  }

  /** Waiting for the source of the requests does not count; after the last request the machine's turn begins. */
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

  /** Waiting for the reader of the frames does not count. */
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
    const error = new AppError(
      'machine_timeout',
      'the machine stopped in the middle of its answer: try again, or look at its agent’s log',
    );
    this.#cancel = after(this.#ms * times, () => this.#abort.abort(error));
  }
}
