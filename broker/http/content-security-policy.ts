// The content security policy of the broker's own pages.
import { randomBytes } from 'node:crypto';

/**
 * Returns a policy with these rules: only the broker's own files are loaded, and inline styles need the nonce. Scripts
 * can turn text into HTML or code only through a Trusted Types policy.
 */
export function pagePolicy(nonce: string, fonts = "'self'"): string {
  return [
    "default-src 'none'; script-src 'self'",
    `style-src 'self' 'nonce-${nonce}'`,
    `img-src 'self' data:; font-src ${fonts}; connect-src 'self'`,
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "require-trusted-types-for 'script'",
  ].join('; ');
}

export const newNonce = (): string => randomBytes(16).toString('base64');
