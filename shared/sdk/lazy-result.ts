// The result of the SDK's list and stream calls: a promise that can also be iterated.
/* oxlint-disable unicorn/no-thenable -- it is a promise */

/** A promise whose request starts when it is awaited or iterated, and an iterator over the answer's items. */
export class Lazy<T, Item> implements Promise<T>, AsyncIterable<Item> {
  readonly [Symbol.toStringTag] = 'Promise';
  readonly #begin: () => Promise<T>;
  readonly #items: (begun: () => Promise<T>) => AsyncIterator<Item>;
  #begun: Promise<T> | undefined;

  constructor(begin: () => Promise<T>, items: (begun: () => Promise<T>) => AsyncIterator<Item>) {
    this.#begin = begin;
    this.#items = items;
  }

  #start(): Promise<T> {
    this.#begun ??= this.#begin();
    return this.#begun;
  }

  // biome-ignore lint/suspicious/noThenProperty: it is a promise
  then<A = T, B = never>(
    resolved?: ((value: T) => A | PromiseLike<A>) | null,
    rejected?: ((reason: unknown) => B | PromiseLike<B>) | null,
  ): Promise<A | B> {
    return this.#start().then(resolved, rejected);
  }

  catch<B = never>(rejected?: ((reason: unknown) => B | PromiseLike<B>) | null): Promise<T | B> {
    return this.#start().catch(rejected);
  }

  finally(done?: (() => void) | null): Promise<T> {
    return this.#start().finally(done);
  }

  [Symbol.asyncIterator](): AsyncIterator<Item> {
    return this.#items(() => this.#start());
  }
}
