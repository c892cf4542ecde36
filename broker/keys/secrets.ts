// Secrets of keys: how one is made, what is kept of it, and which key is behind one that is shown.
import { hash, timingSafeEqual } from 'node:crypto';
import { now } from '../../shared/clock.ts';
import { newSecret } from '../../shared/ids.ts';
import type { Key, State } from '../state/index.ts';

/** Spec section 5: the literal every key starts with. */
const literal = 'service_apikey_';

export function newKeySecret(): string {
  return `${literal}${newSecret()}`;
}

export function hashOf(secret: string): string {
  return hash('sha256', secret);
}

/** Finds the key of a secret by its hash, in an index that is made anew only when the committed keys changed. */
export function secretIndex(state: State): (presented: string) => Key | undefined {
  let from: State['keys'] | undefined;
  let index = new Map<string, { key: Key; until: number }>();
  return (presented) => {
    if (!presented.startsWith(literal)) return undefined;
    if (from !== state.keys) index = secretsOf(state.keys);
    from = state.keys;
    const shown = hashOf(presented);
    const found = index.get(shown);
    if (!found || found.until <= now()) return undefined;
    const { key } = found;
    // Whatever the index does with its time, what is compared takes the same.
    const known = [key.hash, key.previous?.hash ?? key.hash];
    return known.some((one) => timingSafeEqual(Buffer.from(one), Buffer.from(shown))) ? key : undefined;
  };
}

function secretsOf(keys: State['keys']): Map<string, { key: Key; until: number }> {
  const index = new Map<string, { key: Key; until: number }>();
  for (const key of keys.values()) {
    if (key.previous) index.set(key.previous.hash, { key, until: Date.parse(key.previous.until) });
    index.set(key.hash, { key, until: Number.POSITIVE_INFINITY });
  }
  return index;
}
