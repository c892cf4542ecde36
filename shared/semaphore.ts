// A semaphore: limits how much work runs at once. Further work waits in order; cancelled work leaves the queue.

export class Semaphore {
  readonly #atOnce: number;
  readonly #full: (waiting: number) => Error | undefined;
  readonly #waiting = new Set<() => void>();
  #inside = 0;

  /**
   * `full` decides whether a call may wait while all slots are taken. It gets the number of calls that already wait,
   * and returns an error to refuse the new call. By default every call may wait.
   */
  constructor(atOnce: number, full: (waiting: number) => Error | undefined = () => undefined) {
    this.#atOnce = atOnce;
    this.#full = full;
  }

  async run<T>(signal: AbortSignal, work: () => Promise<T>): Promise<T> {
    signal.throwIfAborted();
    const slot = this.acquire(signal);
    const release = slot instanceof Promise ? await slot : slot;
    try {
      return await work();
    } finally {
      release();
    }
  }

  /**
   * Waits for a slot. Returns a function that the caller must call once, to release the slot. Rejects with the signal's
   * reason if the signal fires during the wait. If `full` returns an error, throws this error.
   */
  acquire(signal: AbortSignal): Promise<() => void> | (() => void) {
    if (this.#inside >= this.#atOnce) return this.#turn(signal);
    this.#inside += 1;
    return this.#release;
  }

  readonly #release = (): void => {
    const [next] = this.#waiting;
    // The slot is passed on to the work that has waited longest. If it were set free first, newer work could take it.
    if (next) next();
    else this.#inside -= 1;
  };

  #turn(signal: AbortSignal): Promise<() => void> {
    const refusal = this.#full(this.#waiting.size);
    if (refusal) throw refusal;
    return new Promise((resolve, reject) => {
      const enter = (): void => {
        signal.removeEventListener('abort', leave);
        this.#waiting.delete(enter);
        resolve(this.#release);
      };
      const leave = (): void => {
        this.#waiting.delete(enter);
        reject(signal.reason);
      };
      this.#waiting.add(enter);
      signal.addEventListener('abort', leave, { once: true });
    });
  }
}
