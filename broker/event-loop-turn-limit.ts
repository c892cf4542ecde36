// Spreads work over several turns of the event loop, so that a burst of work does not delay other requests.

export class TurnLimit {
  readonly #most: number;
  #left: number;
  readonly #waiting: (() => void)[] = [];

  /** `most`: maximum number of callers that may work in one turn. */
  constructor(most: number) {
    this.#most = most;
    this.#left = most;
  }

  /**
   * Resolves when the caller may work, in this turn of the event loop or a later one. Calls resolve in the order in
   * which they were made.
   */
  async enter(): Promise<void> {
    if (this.#left === this.#most) setImmediate(() => this.#nextTurn());
    if (this.#left > 0) this.#left -= 1;
    else await new Promise<void>((resolve) => this.#waiting.push(resolve));
  }

  #nextTurn(): void {
    const entering = this.#waiting.splice(0, this.#most);
    this.#left = this.#most - entering.length;
    if (entering.length > 0) setImmediate(() => this.#nextTurn());
    for (const enter of entering) enter();
  }
}
