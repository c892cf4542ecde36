// What is due next: one list in the order of time, so that asking costs nothing and many can wait.

interface Waiting<T> {
  at: number;
  item: T;
}

export class Due<T> {
  /** The latest first: what is due goes from the end. */
  readonly #waiting: Waiting<T>[] = [];
  readonly #times = new Map<T, number>();

  /** When the next one is due. */
  get next(): number | undefined {
    return this.#waiting.at(-1)?.at;
  }

  /** Sets when an item is due, instead of what was set before. */
  set(item: T, at: number): void {
    this.delete(item);
    this.#times.set(item, at);
    this.#waiting.splice(this.#placeOf(at), 0, { at, item });
  }

  delete(item: T): void {
    const at = this.#times.get(item);
    if (at === undefined) return;
    this.#times.delete(item);
    let index = this.#placeOf(at);
    while (this.#waiting[index]?.item !== item) index += 1;
    this.#waiting.splice(index, 1);
  }

  /** Takes away at most `most` that are due by then. */
  take(by: number, most: number): T[] {
    const taken: T[] = [];
    while (taken.length < most && (this.next ?? Number.POSITIVE_INFINITY) <= by) {
      const { item } = this.#waiting.pop() as Waiting<T>;
      this.#times.delete(item);
      taken.push(item);
    }
    return taken;
  }

  /** The first place whose time is not later than `at`. */
  #placeOf(at: number): number {
    let [low, high] = [0, this.#waiting.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if ((this.#waiting[middle]?.at ?? 0) > at) low = middle + 1;
      else high = middle;
    }
    return low;
  }
}
