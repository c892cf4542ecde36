// Opens terminals as WebSockets: checks the ticket of each request and connects the socket to its session. Refusals are
// answers in the JSON envelope.
import type { IncomingMessage } from 'node:http';
import type { Duplex } from 'node:stream';
import { type WebSocket, WebSocketServer } from 'ws';
import { sessionId } from '../../shared/api/shared-schemas.ts';
import { maxMessageBytes, terminal } from '../../shared/api/terminal-websocket.ts';
import { AppError } from '../../shared/errors.ts';
import { newId, requestIdFrom } from '../../shared/ids-and-secrets.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Peers } from '../cluster/peers/route-to-owner.ts';
import { assertKnownParameters, queryOf } from '../request-checks/parse-api-request.ts';
import type { ClientPort } from '../sessions/terminal-client.ts';
import { isOwnOrigin, type OriginServices } from './csrf-check.ts';
import { WebSocketClient } from './websocket-terminal-client.ts';

/** What a ticket allows: to connect one client to one session. */
export interface Attachment {
  readonly attached: { readonly session_id: string; readonly client_id: string };
  serve(port: ClientPort): Promise<void>;
  /** Called instead of serve() if the ticket was used, but the WebSocket was not opened. */
  leave(): void;
}

export interface WebSocketServices extends OriginServices {
  /** Returns the attachment of a ticket; undefined for an unknown or used ticket. A ticket is valid once. */
  redeem(ticket: string): Attachment | undefined;
  /** Forwards terminals to the brokers that own their machines; undefined if this broker runs alone. */
  peers?: Peers | undefined;
  log: Logger;
}

/** Milliseconds after which a client that does not answer the close frame is disconnected. */
const closeMs = 2_000;
/**
 * Maximum number of lookups at the same time. Each lookup finds the broker that has the session of one request. The
 * number is small, because these requests have no key, and their tickets are not checked yet.
 */
const mostLookups = 16;
const path = new RegExp(`^${terminal.base}${terminal.path.replace('{session_id}', '([^/]+)')}$`);

export class WebSocketUpgrades {
  readonly #services: WebSocketServices;
  readonly #server = new WebSocketServer({
    noServer: true,
    clientTracking: false,
    maxPayload: maxMessageBytes,
    perMessageDeflate: false,
    // WebSocketClient itself answers pings, one at a time.
    autoPong: false,
    // closeTimeout is missing in the library's types.
    ...{ closeTimeout: closeMs },
  });
  readonly #admitted = new WeakMap<IncomingMessage, Attachment>();
  /** Requests for sessions that are not open at this broker, with the id of the session. */
  readonly #elsewhere = new WeakMap<IncomingMessage, string>();
  readonly #refused = new WeakMap<IncomingMessage, unknown>();
  readonly #isPeerPort: boolean;
  #lookups = 0;

  /**
   * If `isPeerPort` is true, the origin of a request is not checked, because the broker that forwarded the request has
   * checked it.
   */
  constructor(services: WebSocketServices, isPeerPort = false) {
    this.#services = services;
    this.#isPeerPort = isPeerPort;
  }

  /**
   * Checks a request to open a WebSocket. If it returns true, forward() or take() must be called in the same turn
   * of the event loop: later, the limits and rights that were checked may have changed.
   */
  admits(request: IncomingMessage): boolean {
    const session = sessionOf(request);
    if (session === undefined) return false;
    const { peers } = this.#services;
    try {
      assertHandshake(request);
      if (!this.#isPeerPort) assertOwnOrigin(request, this.#services);
      const isElsewhere = peers !== undefined && !this.#isPeerPort && !peers.hasSession(session);
      if (isElsewhere && (this.#lookups >= mostLookups || !sessionId.safeParse(session).success))
        throw unknownTicket;
      if (isElsewhere) this.#elsewhere.set(request, session);
      else this.#admitted.set(request, admitTicket(request, session, this.#services));
      return true;
    } catch (error) {
      this.#refused.set(request, error);
      return false;
    }
  }

  /**
   * Forwards a request to open a terminal to the broker that has its session. Results:
   * - undefined: this broker has the session.
   * - true: the other broker opened the terminal.
   * - false: the other broker refused, and the client gets the answer of that broker.
   * - Rejects if no other broker has the session, or if the broker that has it does not answer. The caller then answers
   *   the client.
   */
  forward(request: IncomingMessage, socket: Duplex, head: Buffer): Promise<boolean> | undefined {
    const session = this.#elsewhere.get(request);
    const { peers } = this.#services;
    if (session === undefined || !peers) return undefined;
    this.#lookups += 1;
    const looked = (): void => {
      this.#lookups -= 1;
    };
    return forwardTo(peers, session, request, socket, head, looked);
  }

  take(request: IncomingMessage, socket: Duplex, head: Buffer): void {
    const attachment = this.#admitted.get(request);
    if (!attachment) return void socket.destroy();
    let opened = false;
    this.#server.handleUpgrade(request, socket, head, (ws) => {
      opened = true;
      serve(ws, attachment, this.#services.log);
    });
    // If the library ws has refused the handshake, it has also answered the request.
    if (!opened) attachment.leave();
  }

  /** The error by which admits() refused a request for a terminal. */
  refusal(request: IncomingMessage): unknown {
    return this.#refused.get(request) ?? notASocket('this path serves only WebSockets: see /docs');
  }
}

function serve(ws: WebSocket, attachment: Attachment, log: Logger): void {
  const { session_id, client_id } = attachment.attached;
  const named = { request_id: newId('request'), session_id, client_id };
  log.debug(named, 'a terminal was opened');
  ws.once('close', (code) => log.debug({ ...named, code }, 'a terminal was closed'));
  attachment.serve(new WebSocketClient(ws)).catch((error: unknown) => {
    log.error({ ...named, err: error }, 'a terminal failed unexpectedly; its connection was closed');
    ws.close(1011, 'unexpected failure; see the broker’s log');
  });
}

/** Returns the session whose terminal a request wants to open as a WebSocket; undefined for any other request. */
function sessionOf({ method, url = '', headers }: IncomingMessage): string | undefined {
  if (method !== 'GET' || headers.upgrade?.toLowerCase() !== 'websocket') return undefined;
  return path.exec(url.split('?', 1)[0] ?? '')?.[1];
}

async function forwardTo(
  peers: Peers,
  session: string,
  request: IncomingMessage,
  socket: Duplex,
  head: Buffer,
  looked: () => void,
): Promise<boolean> {
  // Node has removed its own error listener. If the socket had none, an error would end the process.
  socket.on('error', () => socket.destroy());
  const ids = [{ noun: 'session' as const, id: session, listed: false, filters: false }];
  const subject = await peers.subjectOf(ids).finally(looked);
  // The socket needs no timeout, because the pings of the terminal detect when the client is gone.
  request.socket.setTimeout(0);
  const elsewhere = subject && peers.elsewhere(subject);
  if (!elsewhere) throw unknownTicket;
  const requestId = requestIdFrom(String(request.headers['x-request-id'] ?? ''));
  return elsewhere.upgrade(request, socket, head, { requestId });
}

const unknownTicket = new AppError(
  'unauthorized',
  'this ticket is unknown, used or expired: attach again, and open the new stream_url within 30 seconds',
);

/** Redeems the ticket of a request. This comes after all other checks, because it uses the ticket up. */
function admitTicket(request: IncomingMessage, session: string, services: WebSocketServices): Attachment {
  const query = queryOf(request.url?.split('?', 2)[1] ?? '');
  assertKnownParameters(query, terminal.query);
  const ticket = typeof query.ticket === 'string' ? query.ticket : '';
  const attachment = services.redeem(ticket);
  if (attachment?.attached.session_id === session) return attachment;
  attachment?.leave();
  throw unknownTicket;
}

/**
 * Refuses bad handshakes. The library would refuse them too, but without the envelope (RFC 6455 section
 * 4.2.1).
 */
function assertHandshake({ headers }: IncomingMessage): void {
  const key = headers['sec-websocket-key'] ?? '';
  if (!/^[+/0-9A-Za-z]{22}==$/.test(key)) throw notASocket('Sec-WebSocket-Key must be 16 bytes in base64');
  if (headers['sec-websocket-version'] !== '13') throw notASocket('Sec-WebSocket-Version must be 13');
  if (headers['content-length'] !== undefined || headers['transfer-encoding'] !== undefined) {
    throw notASocket('the request for a WebSocket has a body: send it without one');
  }
}

/** Refuses pages of another origin, because they could act for the user who views them. Programs send no Origin. */
function assertOwnOrigin(request: IncomingMessage, services: WebSocketServices): void {
  const { origin } = request.headers;
  if (origin === undefined || isOwnOrigin(request, services)) return;
  throw new AppError('forbidden', 'pages of another origin are not allowed to open terminals', { origin });
}

function notASocket(message: string): AppError {
  return new AppError('invalid_request', message);
}
