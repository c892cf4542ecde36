// The header that describes the client of a forwarded request. Only the peer port reads this header, and only brokers
// can connect to that port.
import { z } from 'zod';
import type { Caller } from '../../../shared/api/route-table.ts';
import type { KeyId, LoginId } from '../../../shared/api/shared-schemas.ts';
import { AppError } from '../../../shared/errors.ts';
import { databaseUnavailable } from '../../history/group-commit.ts';
import { currentKey, localKey } from '../../keys/rights.ts';
import type { Client } from '../../request-checks/authenticate.ts';
import type { State } from '../../state/index.ts';
import type { Cluster } from '../index.ts';

export const clientHeader = 'x-farhand-client';

/** Unknown fields are ignored, because a newer broker may send them. */
const described = z.object({
  address: z.string(),
  key_id: z.string(),
  login_id: z.string().optional(),
});

interface Services {
  state: State;
  cluster: Pick<Cluster, 'isAlive'> | undefined;
}

/** The data about a client that another broker needs. */
export type DescribedClient = Pick<Client, 'address' | 'login_id'> & { key: { id: KeyId } };

export function clientOf({ address, login_id, key_id }: Caller): DescribedClient {
  return { address, key: { id: key_id }, ...(login_id !== undefined && { login_id }) };
}

/**
 * Returns the value of the header for an authenticated client. The value is ASCII, because it contains only an address
 * and ids.
 */
export function describeClient({ address, key, login_id }: DescribedClient): string {
  return JSON.stringify({ address, key_id: key.id, login_id });
}

/**
 * Returns the client that another broker describes. Throws unauthorized if the client's key was revoked or has expired,
 * and unavailable if this broker has no lease.
 */
export async function describedClient(header: string, { state, cluster }: Services): Promise<Client> {
  if (cluster && !cluster.isAlive) throw databaseUnavailable();
  // The key is found by its id, which stays the same when the key gets a new secret. A request that began with the old
  // secret is therefore not refused here.
  const { address, key_id, login_id } = parse(header);
  const knowsKey = key_id === localKey.id || state.keys.has(key_id);
  // The forwarding broker may know a new key or login that this broker has not read yet. This broker then reads the
  // changes of other brokers.
  if (!knowsKey || (login_id !== undefined && !state.logins.has(login_id))) await state.refresh();
  // The casts are safe: currentKey() refuses an unknown key, and the authorization refuses an unknown login.
  const key = currentKey(state, key_id as KeyId);
  const login = login_id !== undefined && { login_id: login_id as LoginId };
  // `isForwarded` means that the other broker has counted the request against the rate limit.
  return { address, key, isForwarded: true, ...login };
}

function parse(header: string): z.output<typeof described> {
  try {
    return described.parse(JSON.parse(header));
  } catch {
    throw new AppError(
      'invalid_request',
      `the header ${clientHeader}, by which another broker describes its client, is not valid: run the same version on all brokers`,
    );
  }
}
