// Composes and parses join tokens: a secret, the fingerprint of the broker's CA, and the hash of the broker's packages.
import { StartError } from './errors.ts';

const form = /^farhand_join_([0-9A-Za-z]{43})\.([0-9a-f]{64})(?:\.[0-9a-f]{64})?$/;

/**
 * Returns the text of a join token. `fingerprint`: hexadecimal SHA-256 of the broker's CA certificate.
 * `packages`: SHA-256 of the broker's SHA256SUMS, used only by install.sh.
 */
export function joinTokenText(secret: string, fingerprint: string, packages: string | undefined): string {
  return [`farhand_join_${secret}`, fingerprint, ...(packages ? [packages] : [])].join('.');
}

/** Splits a join token into its parts. Throws StartError for any other text; its message names `file` if given. */
export function parseJoinToken(text: string, file?: string): { secret: string; fingerprint: string } {
  const [, secret, fingerprint] = form.exec(text.trim()) ?? [];
  if (secret && fingerprint) return { secret, fingerprint };
  const token = file === undefined ? 'the join token' : `the join token in ${file}`;
  throw new StartError(
    `${token} is incomplete: copy all of it (one line, farhand_join_….…), or make one with farhand join-tokens create`,
  );
}
