// The session cookie of a login. Its prefix makes browsers accept it only from this host, encrypted, for every path.

const name = '__Host-farhand';
/**
 * The cookie in the header Cookie. Other white space than blanks and tabs is part of a name: browsers do not protect the
 * prefix of a name that begins with it, so a neighbouring host could set such a cookie.
 */
const stored = new RegExp(`(?:^|;)[ \\t]*${name}=([^; \\t]*)`);
const attributes = 'Path=/; HttpOnly; Secure; SameSite=Strict';

/** The value of the header Set-Cookie that stores a secret for at most `ms` milliseconds. */
export function cookieWith(secret: string, ms: number): string {
  return `${name}=${secret}; Max-Age=${Math.floor(ms / 1000)}; ${attributes}`;
}

/** The value of the header Set-Cookie that removes the cookie. */
export const noCookie = `${name}=; Max-Age=0; ${attributes}`;

/** The secret in the header Cookie; empty without one. */
export function secretIn(cookies = ''): string {
  return stored.exec(cookies)?.[1] ?? '';
}
