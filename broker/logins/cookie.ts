// The cookie of a login. Because of its prefix `__Host-`, browsers accept it only from this host and over TLS.

const name = '__Host-farhand';
/**
 * Allows only blanks and tabs before the name of the cookie. Browsers take any other white space as a part of the name.
 * Such a name does not begin with `__Host-`, so another subdomain could set a cookie with it.
 */
const stored = new RegExp(`(?:^|;)[ \\t]*${name}=([^; \\t]*)`);
const attributes = 'Path=/; HttpOnly; Secure; SameSite=Strict';

/** Returns the header Set-Cookie that stores a secret for at most `ms` milliseconds. */
export function cookieWith(secret: string, ms: number): string {
  return `${name}=${secret}; Max-Age=${Math.floor(ms / 1000)}; ${attributes}`;
}

/** The value of the header Set-Cookie that removes the cookie. */
export const noCookie = `${name}=; Max-Age=0; ${attributes}`;

/** Returns the secret in the header Cookie; empty if the cookie is missing. */
export function secretIn(cookies = ''): string {
  return stored.exec(cookies)?.[1] ?? '';
}
