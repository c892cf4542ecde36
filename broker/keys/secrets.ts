// Secrets of API keys: makes and hashes them, and finds the key that has a presented secret.
import { hash, timingSafeEqual } from 'node:crypto';
import { now } from '../../shared/clock.ts';
import { newSecret } from '../../shared/ids.ts';
import type { Key, State } from '../state/state.ts';

/** The text with which every key starts (spec section 5). */
const literal = 'service_apikey_';

export function newKeySecret(): string {
  return `${literal}${newSecret()}`;
}

export function hashOf(secret: string): string {
  return hash('sha256', secret);
}

/**
 * Finds keys by the hash of their secrets. The index is rebuilt only when the committed keys have changed.
 */
export class SecretIndex {
  readonly #state: State;
  #keys: State['keys'] | undefined;
  #byHash = new Map<string, { key: Key; until: number }>();

  constructor(state: State) {
    this.#state = state;
  }

  /** The key that has a secret, even if it has expired. */
  find(presented: string): Key | undefined {
    if (!presented.startsWith(literal)) return undefined;
    this.#update();
    const hashed = hashOf(presented);
    const found = this.#byHash.get(hashed);
    if (!found || found.until <= now()) return undefined;
    const { key } = found;
    // The time of the index look-up may vary; this comparison always takes the same time.
    const hashes = [key.hash, key.previous?.hash ?? key.hash];
    return hashes.some((one) => timingSafeEqual(Buffer.from(one), Buffer.from(hashed))) ? key : undefined;
  }

  #update(): void {
    if (this.#keys === this.#state.keys) return;
    this.#keys = this.#state.keys;
    this.#byHash.clear();
    for (const key of this.#keys.values()) {
      const { hash: current, previous } = key;
      if (previous) this.#byHash.set(previous.hash, { key, until: Date.parse(previous.until) });
      this.#byHash.set(current, { key, until: Number.POSITIVE_INFINITY });
    }
  }
}
