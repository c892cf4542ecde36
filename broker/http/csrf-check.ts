// Protects logins against requests of other sites (CSRF): a login's cookie counts only for requests of the
// broker's own pages.
import type { IncomingMessage } from 'node:http';
import { AppError } from '../../shared/errors.ts';
import { isLoopback } from '../../shared/loopback.ts';
import { type Proxies, plainAddress } from '../client-address.ts';

export interface OriginServices {
  /** The URL of the API for clients. */
  publicUrl(): string;
  proxies: Proxies;
}

/** The header that the console adds to requests; a page of another origin cannot add it. */
const consoleHeader = 'x-farhand-console';
/**
 * Values of Sec-Fetch-Dest for content that a browser would run or apply. Such requests may not use the cookie of a
 * login.
 */
const active = /script|style|worker|worklet|xslt|object|embed/;

/** True if the header Origin names this broker. */
export function isOwnOrigin(request: IncomingMessage, services: OriginServices): boolean {
  const { origin = '', host } = request.headers;
  const from = URL.parse(origin);
  // If a proxy has terminated TLS, the broker does not see whether the client used TLS. If the proxy does not report
  // this, the scheme of Origin is accepted.
  const scheme = schemeOf(request, services.proxies) ?? from?.protocol;
  const own = [services.publicUrl(), `${scheme}//${host}`].map((url) => URL.parse(url));
  return own.some((one) => one && one.host === from?.host && one.protocol === from.protocol);
}

/** Headers that a proxy adds to the requests of its clients. */
const forwarding = [
  'forwarded',
  'via',
  'x-forwarded-for',
  'x-forwarded-host',
  'x-forwarded-proto',
  'x-real-ip',
];

/**
 * True if the request came through a proxy that is not trusted. The client's address is then unknown, so the client may
 * be on any machine.
 */
export function isForwarded(request: IncomingMessage, proxies: Proxies): boolean {
  return hasForwarding(request) && !proxies.trusts(peerOf(request));
}

/**
 * True if others on the network could not read the request. This means that it came over TLS, or directly from the
 * broker's own computer. The TLS connection may end at a trusted proxy.
 */
export function isPrivate(request: IncomingMessage, proxies: Proxies): boolean {
  const scheme = schemeOf(request, proxies);
  return scheme === 'https:' || (!hasForwarding(request) && isLoopback(peerOf(request)));
}

function hasForwarding({ headers }: IncomingMessage): boolean {
  return forwarding.some((name) => headers[name] !== undefined);
}

/** Throws forbidden if a request with the cookie of a login was not sent by a page of this broker. */
export function assertOwnPage(request: IncomingMessage, services: OriginServices): void {
  const { method = '', headers } = request;
  if (active.test(String(headers['sec-fetch-dest'] ?? '')))
    throw refusal(
      'a request with the cookie of a login cannot load scripts or styles, because a script from a machine’s files could then run in the console: send an API key',
    );
  const site = headers['sec-fetch-site'];
  const own = site === undefined ? isOwnOrigin(request, services) : site === 'same-origin';
  if (!own && !resumesDownload(request))
    throw refusal('only pages of this broker may send requests with the cookie of a login: send an API key');
  if (['GET', 'HEAD'].includes(method) || headers[consoleHeader] === '1') return;
  throw refusal('with the cookie of a login this request needs the header X-Farhand-Console: 1');
}

/**
 * True if the browser itself, and not a page, resumes a broken download. This is safe, because no page can send such a
 * request or read the answer.
 */
function resumesDownload({ method, headers }: IncomingMessage): boolean {
  const byBrowser = headers['sec-fetch-site'] === 'none' && headers['sec-fetch-dest'] === 'empty';
  return method === 'GET' && byBrowser && headers.range !== undefined;
}

function refusal(message: string): AppError {
  return new AppError('forbidden', message, { cookie: true });
}

function schemeOf(request: IncomingMessage, proxies: Proxies): string | undefined {
  if ('encrypted' in request.socket) return 'https:';
  return proxies.schemeOf(peerOf(request), String(request.headers['x-forwarded-proto'] ?? ''));
}

function peerOf({ socket }: IncomingMessage): string {
  return plainAddress(socket.remoteAddress ?? '');
}
