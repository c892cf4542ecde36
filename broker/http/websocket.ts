// The door of terminals over WebSocket: a request is let in only with a good ticket. One that is not is an ordinary
// request, so that it gets its refusal in the envelope like any other.
import type { IncomingMessage } from 'node:http';
import type { Duplex } from 'node:stream';
import { type WebSocket, WebSocketServer } from 'ws';
import { maxMessageBytes, terminal } from '../../shared/api/terminal.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import type { Logger } from '../../shared/logger.ts';
import { queryOf, refuseUnknown } from '../admission/parse-request.ts';
import { type Proxies, plainAddress } from '../client-address.ts';
import type { ClientPort } from '../sessions/client.ts';
import { SocketPort } from './client-port.ts';

/** What a ticket is good for: one client of one session. */
export interface Attachment {
  readonly session_id: string;
  readonly client_id: string;
  serve(port: ClientPort): Promise<void>;
  /** Instead of serve: nobody came. */
  leave(): void;
}

export interface SocketRooms {
  /** Each ticket once. */
  redeem(ticket: string): Attachment | undefined;
  /** How people reach the API. */
  publicUrl(): string;
  proxies: Proxies;
  log: Logger;
}

/** A client that does not answer the close is cut after this. */
const closeMs = 2_000;
const path = new RegExp(`^${terminal.base}${terminal.path.replace('{session_id}', '([^/]+)')}$`);

export class SocketDoor {
  readonly #rooms: SocketRooms;
  readonly #server = new WebSocketServer({
    noServer: true,
    clientTracking: false,
    maxPayload: maxMessageBytes,
    perMessageDeflate: false,
    // SocketPort answers pings, at the pace of who takes the answers.
    autoPong: false,
    // Known to the library, not yet to its types.
    ...{ closeTimeout: closeMs },
  });
  readonly #admitted = new WeakMap<IncomingMessage, Attachment>();
  readonly #refused = new WeakMap<IncomingMessage, unknown>();

  constructor(rooms: SocketRooms) {
    this.#rooms = rooms;
  }

  /** Whether a request that would be a WebSocket is let in; take() must follow at once. */
  admits(request: IncomingMessage): boolean {
    const session = sessionOf(request);
    if (session === undefined) return false;
    try {
      this.#admitted.set(request, admit(request, session, this.#rooms));
      return true;
    } catch (error) {
      this.#refused.set(request, error);
      return false;
    }
  }

  take(request: IncomingMessage, socket: Duplex, head: Buffer): void {
    const attachment = this.#admitted.get(request);
    if (!attachment) return void socket.destroy();
    let opened = false;
    this.#server.handleUpgrade(request, socket, head, (ws) => {
      opened = true;
      serve(ws, attachment, this.#rooms.log);
    });
    // The library has answered a handshake that it does not like.
    if (!opened) attachment.leave();
  }

  /** Why a request for a terminal was not let in. */
  refusal(request: IncomingMessage): unknown {
    return this.#refused.get(request) ?? notASocket('open this address as a WebSocket; see /docs');
  }
}

function serve(ws: WebSocket, attachment: Attachment, log: Logger): void {
  const { session_id, client_id } = attachment;
  const named = { request_id: newId('request'), session_id, client_id };
  log.debug(named, 'a terminal was opened');
  ws.once('close', (code) => log.debug({ ...named, code }, 'a terminal was closed'));
  attachment.serve(new SocketPort(ws)).catch((error: unknown) => {
    log.error({ ...named, err: error }, 'a terminal failed');
    ws.close(1011, 'unexpected failure; see the broker’s log');
  });
}

/** The session whose terminal is asked for as a WebSocket. */
function sessionOf({ method, url = '', headers }: IncomingMessage): string | undefined {
  if (method !== 'GET' || headers.upgrade?.toLowerCase() !== 'websocket') return undefined;
  return path.exec(url.split('?', 1)[0] ?? '')?.[1];
}

/** Everything that could be wrong comes before the ticket, which is used up by looking at it. */
function admit(request: IncomingMessage, session: string, rooms: SocketRooms): Attachment {
  refuseMalformed(request);
  refuseForeign(request, rooms);
  const query = queryOf(request.url?.split('?', 2)[1] ?? '');
  refuseUnknown(query, terminal.query);
  const ticket = typeof query.ticket === 'string' ? query.ticket : '';
  const attachment = rooms.redeem(ticket);
  if (attachment?.session_id === session) return attachment;
  attachment?.leave();
  throw new AppError(
    'unauthorized',
    'this ticket is not good here, or no longer: attach again, and open its stream_url within 30 seconds',
  );
}

/** What the library would refuse in words of its own (RFC 6455 section 4.2.1). */
function refuseMalformed({ headers }: IncomingMessage): void {
  const key = headers['sec-websocket-key'] ?? '';
  if (!/^[+/0-9A-Za-z]{22}==$/.test(key)) throw notASocket('Sec-WebSocket-Key must be 16 bytes in base64');
  if (headers['sec-websocket-version'] !== '13') throw notASocket('Sec-WebSocket-Version must be 13');
  if (headers['content-length'] !== undefined || headers['transfer-encoding'] !== undefined) {
    throw notASocket('a WebSocket begins without a body');
  }
}

/** Somebody else's page must not speak for who looks at it; programs send no Origin. */
function refuseForeign(request: IncomingMessage, { publicUrl, proxies }: SocketRooms): void {
  const { origin, host } = request.headers;
  if (origin === undefined) return;
  const from = URL.parse(origin);
  // A proxy that tells no scheme may have taken TLS off.
  const scheme = schemeOf(request, proxies) ?? from?.protocol;
  const own = [publicUrl(), `${scheme}//${host}`].map((url) => URL.parse(url));
  if (own.some((one) => one && one.host === from?.host && one.protocol === from.protocol)) return;
  throw new AppError('forbidden', 'pages of another origin may not open terminals here', { origin });
}

function schemeOf({ socket, headers }: IncomingMessage, proxies: Proxies): string | undefined {
  if ('encrypted' in socket) return 'https:';
  const forwarded = headers['x-forwarded-proto'];
  return proxies.schemeOf(plainAddress(socket.remoteAddress ?? ''), String(forwarded ?? ''));
}

function notASocket(message: string): AppError {
  return new AppError('invalid_request', message);
}
