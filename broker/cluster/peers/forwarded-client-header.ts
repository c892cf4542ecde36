// The client of a forwarded request: the broker that authenticated it describes it in a header, and the owner of
// the machine authorizes it. The header counts only at the peer port, which only brokers can open.
import { z } from 'zod';
import type { KeyId, LoginId } from '../../../shared/api/shared-schemas.ts';
import { AppError } from '../../../shared/errors.ts';
import { databaseUnavailable } from '../../history/group-commit.ts';
import { currentKey, localKey } from '../../keys/rights.ts';
import type { Client } from '../../request-checks/authenticate.ts';
import type { State } from '../../state/in-memory-state.ts';
import type { Cluster } from '../owners.ts';

export const clientHeader = 'x-farhand-client';

/** Unknown fields are ignored, because a newer broker may send them. */
const described = z.object({
  address: z.string(),
  key_id: z.string(),
  login_id: z.string().optional(),
  secure: z.boolean().optional(),
});

interface Services {
  state: State;
  cluster: Pick<Cluster, 'isAlive'> | undefined;
}

/** Returns the value of the header for an authenticated client. It is ASCII: an address and ids. */
export function describeClient({ address, key, login_id, secure }: Client): string {
  return JSON.stringify({ address, key_id: key.id, login_id, secure });
}

/**
 * Returns the client that another broker describes. It is found by the id of its key: a new secret does not end
 * requests that were made with the old one. The other broker has counted the request against the rate limit.
 * Throws unauthorized if the key was revoked or has expired meanwhile, and unavailable without a lease.
 */
export async function describedClient(header: string, { state, cluster }: Services): Promise<Client> {
  if (cluster && !cluster.isAlive) throw databaseUnavailable();
  const { address, key_id, login_id, secure = false } = parse(header);
  const knowsKey = key_id === localKey.id || state.keys.has(key_id);
  // The other broker may have read a new key or login before this one.
  if (!knowsKey || (login_id !== undefined && !state.logins.has(login_id))) await state.refresh();
  // The casts are safe: ids that exist nowhere are refused by currentKey() and when the request is authorized.
  const key = currentKey(state, key_id as KeyId);
  return { address, key, secure, ...(login_id !== undefined && { login_id: login_id as LoginId }) };
}

function parse(header: string): z.output<typeof described> {
  try {
    return described.parse(JSON.parse(header));
  } catch {
    throw new AppError(
      'invalid_request',
      `the header ${clientHeader}, which brokers send here, is not valid`,
    );
  }
}
