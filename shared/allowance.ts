// So many of a kind in a while, and afterwards how many more there were: a flood becomes a number.
import { after } from './clock.ts';

interface Spell<T> {
  first: T;
  taken: number;
  held: number;
  cancel(): void;
}

export class Allowance<T> {
  readonly #most: number;
  readonly #ms: number;
  readonly #mostKinds: number;
  readonly #tell: (first: T, held: number) => void;
  readonly #spells = new Map<string, Spell<T>>();

  /**
   * `most` of each kind within `ms`; then `tell` gets the first of them and how many were held back, if any. More kinds
   * than `mostKinds` share one place: nobody fills the memory with new ones.
   */
  constructor(most: number, ms: number, tell: (first: T, held: number) => void, mostKinds = 1_000) {
    this.#most = most;
    this.#ms = ms;
    this.#tell = tell;
    this.#mostKinds = mostKinds;
  }

  /** Whether one more is let through. */
  take(kind: string, one: T): boolean {
    const place = this.#spells.has(kind) || this.#spells.size < this.#mostKinds ? kind : '';
    const spell = this.#spells.get(place) ?? this.#begin(place, one);
    if (spell.taken < this.#most) spell.taken += 1;
    else spell.held += 1;
    return spell.held === 0;
  }

  /** Tells at once what is still to be told. */
  close(): void {
    for (const place of [...this.#spells.keys()]) this.#end(place);
  }

  #begin(place: string, first: T): Spell<T> {
    const spell = { first, taken: 0, held: 0, cancel: after(this.#ms, () => this.#end(place)) };
    this.#spells.set(place, spell);
    return spell;
  }

  #end(place: string): void {
    const spell = this.#spells.get(place);
    this.#spells.delete(place);
    spell?.cancel();
    if (spell && spell.held > 0) this.#tell(spell.first, spell.held);
  }
}
