// A join token as text: a secret, the pin of the broker that will take it, and the hash of the packages it hands out.
import { StartError } from './errors.ts';

const form = /^farhand_join_([0-9A-Za-z]{43})\.([0-9a-f]{64})(?:\.[0-9a-f]{64})?$/;

/**
 * The token that a person copies; `fingerprint` is the SHA-256 of the broker's CA in hexadecimal, `packages` that of its
 * SHA256SUMS, for install.sh alone.
 */
export function joinTokenText(secret: string, fingerprint: string, packages: string | undefined): string {
  return [`farhand_join_${secret}`, fingerprint, ...(packages ? [packages] : [])].join('.');
}

/** Takes a token apart. Throws StartError when it is not one. */
export function parseJoinToken(text: string): { secret: string; fingerprint: string } {
  const [, secret, fingerprint] = form.exec(text.trim()) ?? [];
  if (secret && fingerprint) return { secret, fingerprint };
  throw new StartError('the join token is not complete: copy it whole, it starts with farhand_join_');
}
