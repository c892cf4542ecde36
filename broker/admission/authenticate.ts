// Finds the key that a request presents, and counts the request against the rate limits.
import type { Keys } from '../keys/index.ts';
import { hasExpired } from '../keys/rights.ts';
import type { Key } from '../state/index.ts';
import type { Quota, Rates } from './rate-limits.ts';

/** The sender of an authenticated request. */
export interface Client {
  /** As far as trusted proxies report it; empty over the broker's own socket file. */
  address: string;
  key: Key;
  /** What a key with a rate limit has left. */
  quota?: Quota | undefined;
}

const bearer = /^Bearer ([\x21-\x7e]+)$/i;

/** The valid key in `Bearer KEY`. */
export function validKeyIn(authorization: string, keys: Keys): Key | undefined {
  const key = keyIn(authorization, keys);
  return key && !hasExpired(key) ? key : undefined;
}

/** The key in `Bearer KEY`, also an expired one. */
function keyIn(authorization: string, keys: Keys): Key | undefined {
  const presented = bearer.exec(authorization)?.[1];
  return presented === undefined ? undefined : keys.find(presented);
}

/**
 * Counts a request, once: against the key in `Bearer KEY`, or where that is wrong against its source. Throws unauthorized,
 * and rate_limited for a source; a key over its limit is refused when the request is authorized, so that it is on record.
 */
export async function authenticate(
  authorization: string,
  address: string,
  { keys, rates }: { keys: Keys; rates: Rates },
): Promise<Client> {
  const found = keyIn(authorization, keys);
  // A request without a key tries none.
  if (authorization !== '' && (!found || hasExpired(found))) await rates.countWrongKey(address);
  const key = keys.admit(found, address);
  return { address, key, quota: await rates.spend(key.id) };
}
