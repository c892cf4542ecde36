// Reads identity.json, which has an agent's identity: private key, machine id, and the broker's CA certificate.
import { join } from 'node:path';
import * as z from 'zod';
import { StartError } from './errors.ts';
import { readRegularJson } from './read-regular-file.ts';

const fields = z.strictObject({
  /**
   * Id of the machine; null until the broker has answered the request to join. The private key is stored before that
   * request. After a crash the agent joins again with the same key, and gets the same machine.
   */
  machine_id: z.string().nullable(),
  private_key: z.string(),
  ca_certificate: z.string(),
  fingerprint: z.string(),
  /** SHA-256 of the secret in the join token with which the identity was created. */
  token_hash: z.string().optional(),
  /** True if the broker has removed this machine. With a new join token, the agent joins as a new machine. */
  removed: z.boolean().optional(),
});
/** `next`: the identity with which a removed machine joins again, until the broker has answered. */
const identity = fields.extend({ next: fields.optional() });
export type StoredIdentity = z.output<typeof identity>;

export const identityFile = (directory: string): string => join(directory, 'identity.json');

/**
 * Reads the identity in a data directory. Returns undefined if the file is missing. Throws StartError if it is damaged.
 */
export async function readIdentity(directory: string): Promise<StoredIdentity | undefined> {
  const file = identityFile(directory);
  const json = await readRegularJson(file);
  if (json === undefined) return undefined;
  const parsed = identity.safeParse(json);
  if (parsed.success) return parsed.data;
  throw new StartError(`${file} is damaged; remove it and join the broker again with a new join token`);
}
