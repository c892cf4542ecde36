// Finds the key or the login of a request, and counts the request against the rate limits.
import type { LoginId } from '../../shared/api/shared-schemas.ts';
import type { Cluster } from '../cluster/index.ts';
import { databaseUnavailable } from '../history/group-commit.ts';
import type { Keys } from '../keys/index.ts';
import { hasExpired } from '../keys/rights.ts';
import type { Logins } from '../logins/index.ts';
import { loginEnded } from '../logins/login-validity.ts';
import type { Key } from '../state/index.ts';
import type { Quota, Rates } from './rate-limits.ts';

export interface Client {
  /** IP address of the client, as trusted proxies report it; empty over the broker's own socket file. */
  address: string;
  key: Key;
  /** The login whose cookie the request has; undefined for a request with a key. */
  login_id?: LoginId;
  /** True if the request arrived over TLS, or from the broker's own machine; only for a request that logs in. */
  secure?: boolean;
  /** True if another broker has authenticated the client, and sent the request here. */
  isForwarded?: boolean;
  /** SHA-256 of the API key in the request, in hexadecimal digits; only for a request that logs in. */
  secret_hash?: string | undefined;
  /** How many more requests the key may make in this minute; undefined for a key without a rate limit. */
  quota?: Quota | undefined;
}

/**
 * Finds the key in `Bearer KEY`, and counts the request. Throws unauthorized for a wrong key, and rate_limited for a
 * source with too many wrong keys.
 */
export async function authenticate(
  authorization: string,
  address: string,
  { keys, rates, cluster }: { keys: Keys; rates: Rates; cluster?: Pick<Cluster, 'isAlive'> | undefined },
): Promise<Client> {
  assertAlive(cluster);
  // Another broker may have created the key a moment ago.
  const found = keys.find(authorization) ?? (cluster && (await keys.findNew(authorization)));
  // A request without an Authorization header does not count as a wrong key.
  if (authorization !== '' && (!found || hasExpired(found))) await rates.countWrongKey(address);
  const key = keys.admit(found, address);
  // A key over its limit is refused later, in AuthorizedRequest, so that the refusal is recorded.
  return { address, key, quota: await rates.spend(key.id) };
}

/** Finds the login of a cookie, and counts the request for the login's key. */
export async function authenticateLogin(
  secret: string,
  address: string,
  {
    keys,
    logins,
    rates,
    cluster,
  }: { keys: Keys; logins: Logins; rates: Rates; cluster?: Pick<Cluster, 'isAlive'> | undefined },
): Promise<Client> {
  assertAlive(cluster);
  // Another broker may have created the login a moment ago.
  const found = logins.find(secret) ?? (cluster && (await logins.findNew(secret)));
  // A wrong cookie is not counted as a wrong key: browsers still send the cookies of ended logins, and a secret of 256
  // bits cannot be guessed.
  if (!found) throw loginEnded;
  logins.note(found.login);
  const key = keys.admit(found.key, address);
  return { address, key, login_id: found.login.id, quota: await rates.spend(key.id) };
}

/** Throws unavailable while other brokers may have taken over the machines of this broker. */
function assertAlive(cluster: Pick<Cluster, 'isAlive'> | undefined): void {
  if (cluster && !cluster.isAlive) throw databaseUnavailable();
}
