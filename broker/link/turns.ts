// Divides work among the turns of the event loop, so that other requests are served in between.

export class Turns {
  readonly #perTurn: number;
  readonly #waiting: (() => void)[] = [];

  constructor(perTurn: number) {
    this.#perTurn = perTurn;
  }

  /** Resolves in a later turn of the event loop, in the order of the calls. */
  next(): Promise<void> {
    return new Promise((resolve) => {
      if (this.#waiting.push(resolve) === 1) setImmediate(() => this.#turn());
    });
  }

  #turn(): void {
    const some = this.#waiting.splice(0, this.#perTurn);
    if (this.#waiting.length > 0) setImmediate(() => this.#turn());
    for (const resolve of some) resolve();
  }
}
