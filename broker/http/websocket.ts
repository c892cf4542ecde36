// Serves terminals over WebSocket: checks the ticket of each upgrade, and connects the open socket to its
// session. A refused upgrade is handled as an ordinary request, so that its error has the JSON envelope.
import type { IncomingMessage } from 'node:http';
import type { Duplex } from 'node:stream';
import { type WebSocket, WebSocketServer } from 'ws';
import { closeCodes } from '../../shared/api/close-codes.ts';
import { sessionId } from '../../shared/api/shared-schemas.ts';
import { maxMessageBytes, receivedMessage, terminal } from '../../shared/api/terminal.ts';
import { every, monotonic } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId, requestIdFrom } from '../../shared/ids.ts';
import type { Logger } from '../../shared/logger.ts';
import { Wake } from '../../shared/slow-reader-backpressure.ts';
import type { Peers } from '../cluster/peers/route-to-owner.ts';
import { assertKnownParameters, queryOf } from '../request-checks/parse-api-request.ts';
import {
  type Action,
  actionOf,
  type ClientPort,
  type CloseReason,
  type Notice,
} from '../sessions/terminal-client.ts';
import { assertJsonLimits } from './body.ts';
import { isOwnOrigin, type OriginServices } from './csrf-check.ts';

/** What a ticket gives access to: one client of one session. */
export interface Attachment {
  readonly attached: { readonly session_id: string; readonly client_id: string };
  serve(port: ClientPort): Promise<void>;
  /** Called instead of serve() when the client did not connect. */
  leave(): void;
}

export interface WebSocketServices extends OriginServices {
  /** Returns the attachment of a ticket; undefined for an unknown or used ticket. A ticket is valid once. */
  redeem(ticket: string): Attachment | undefined;
  /** The other brokers, which have the terminals of their machines; undefined if there are none. */
  peers?: Peers | undefined;
  log: Logger;
}

const pingMs = 15_000;
/**
 * Number of unanswered pings after which a client is disconnected. The first of these pings is then 30 seconds old.
 */
const maxUnanswered = 2;
/** Bytes of input that may wait for the terminal. If more are waiting, the socket is not read. */
const maxWaiting = 64 * 1024;
/** Maximum number of bytes of a message that reports received output. */
const reportBytes = 64;
/** Bytes counted for each waiting message in addition to its data. */
const messageCost = 64;
/**
 * Milliseconds after which a client is disconnected if its input still waits. The socket of this client is paused,
 * so the broker would not notice if the client were gone.
 */
const stuckMs = 25_000;

const closeReasons: Readonly<Record<CloseReason['why'], string>> = {
  ended: 'the session ended',
  stopping: 'the broker is stopping; attach again later',
  detached: 'this client was detached; the session goes on',
  forbidden: 'this key is no longer allowed to attach to the session',
  fell_behind: 'this client read too slowly; attach again',
};

/** Milliseconds after which a client that does not answer the close frame is disconnected. */
const closeMs = 2_000;
/** Maximum number of requests without a key whose session is being looked up in the database. */
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
   * of the event loop.
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
   * Connects a request with the broker that has its session. Returns undefined if the session is open here.
   * Otherwise resolves to true if the terminal was opened. The promise rejects if the request still needs an answer.
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
    // The library refused the handshake and has answered it.
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
  // Node has removed its own listener, and an error event without one would end the process.
  socket.on('error', () => socket.destroy());
  const ids = [{ noun: 'session' as const, id: session, listed: false, filters: false }];
  const machine = await peers.machineOf(ids).finally(looked);
  // The timeout of the socket is turned off, because the pings of the terminal find a client that is gone.
  request.socket.setTimeout(0);
  const elsewhere = machine && peers.elsewhere(machine);
  if (!elsewhere) throw unknownTicket;
  const requestId = requestIdFrom(String(request.headers['x-request-id'] ?? ''));
  return elsewhere.upgrade(request, socket, head, { requestId });
}

const unknownTicket = new AppError(
  'unauthorized',
  'this ticket is unknown, used or expired: attach again, and open its stream_url within 30 seconds',
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

/** A client of a session that is connected by a WebSocket. */
class WebSocketClient implements ClientPort {
  readonly actions: AsyncIterable<Action>;
  readonly #ws: WebSocket;
  readonly #gone = new AbortController();
  /** Messages that the session has not read yet. While they exceed maxWaiting, the socket is not read. */
  #waiting: { data: Buffer; binary: boolean }[] = [];
  #waitingBytes = 0;
  readonly #changed = new Wake();
  /** Offset after the last byte of output that was sent. */
  #sent = 0;
  /** Offset of the client's last report; undefined for a client that reports nothing. */
  #received: number | undefined;
  readonly #reported = new Wake();
  #closing = false;
  #takenAt = monotonic();
  /** Pings in a row without a message, ping or pong from the client. */
  #unanswered = 0;
  #ponging = false;

  constructor(ws: WebSocket) {
    this.#ws = ws;
    const stopPings = every(pingMs, () => this.#ping());
    this.actions = this.#read();
    // Messages are Buffers, because binaryType has its default value.
    ws.on('message', (data, binary) => this.#receive(data as Buffer, binary));
    ws.on('ping', (data) => this.#pong(data));
    for (const event of ['message', 'ping', 'pong'] as const) {
      ws.on(event, () => {
        this.#unanswered = 0;
      });
    }
    // Errors need no handling, because the library reports them to the client in a close frame.
    ws.on('error', () => {});
    ws.once('close', () => {
      stopPings();
      this.#changed.wake();
      this.#reported.wake();
      if (!this.#closing) this.#gone.abort();
    });
  }

  get gone(): AbortSignal {
    return this.#gone.signal;
  }

  /** Resolves once the client has reported the bytes; if it reports nothing, once the socket has sent them. */
  async output(bytes: Uint8Array): Promise<void> {
    this.#sent += bytes.length;
    const end = this.#sent;
    await this.#send(bytes);
    while (this.#awaitsReports && (this.#received ?? end) < end) await this.#reported.wait();
  }

  notify(notice: Notice): Promise<void> {
    if (notice.type === 'ready') this.#sent = notice.offset;
    return this.#send(JSON.stringify(notice));
  }

  close(closeReason: CloseReason): void {
    if (this.#closing) return;
    this.#closing = true;
    const { why, ...ending } = closeReason;
    if (why === 'ended') void this.#send(JSON.stringify({ type: 'end', ...ending }));
    this.#close(closeCodes[why], closeReasons[why]);
  }

  /** False while no report can arrive: the socket is closed, or is not read because its input waits. */
  get #awaitsReports(): boolean {
    return this.#ws.readyState === this.#ws.OPEN && !this.#ws.isPaused;
  }

  #send(message: Uint8Array | string): Promise<void> {
    const binary = typeof message !== 'string';
    return new Promise((resolve) => this.#ws.send(message, { binary }, () => resolve()));
  }

  /** Drops waiting messages and sends a close frame. Continues to read until the client's close frame arrives. */
  #close(code: number, reason: string): void {
    this.#waiting = [];
    this.#ws.resume();
    this.#ws.close(code, reason);
    this.#changed.wake();
  }

  #receive(data: Buffer, binary: boolean): void {
    if (this.#ws.readyState !== this.#ws.OPEN) return;
    // Reports of received output overtake waiting input, because a program that waits for its output to be read
    // reads no input.
    const report = binary ? undefined : reportIn(data);
    if (report !== undefined) {
      this.#received = report;
      this.#reported.wake();
      return;
    }
    this.#waiting.push({ data, binary });
    this.#waitingBytes += data.length + messageCost;
    if (this.#waitingBytes >= maxWaiting) {
      this.#ws.pause();
      this.#reported.wake();
    }
    this.#changed.wake();
  }

  /** Yields the client's actions. An invalid message closes the connection, but not the session. */
  async *#read(): AsyncGenerator<Action> {
    try {
      for (;;) {
        const next = this.#waiting.shift();
        if (next) {
          this.#waitingBytes -= next.data.length + messageCost;
          this.#takenAt = monotonic();
          if (this.#waitingBytes < maxWaiting && this.#ws.isPaused) this.#ws.resume();
          yield next.binary ? { input: next.data } : actionOf(parseJson(next.data));
        } else if (this.#ws.readyState === this.#ws.OPEN) await this.#changed.wait(this.#gone.signal);
        else return;
      }
    } catch (error) {
      if (!(error instanceof AppError)) throw error;
      // A close reason has at most 123 bytes (RFC 6455 section 5.5), so it is cut to 120 ASCII characters.
      this.#close(1008, error.message.replaceAll(/[^\x20-\x7e]/g, '?').slice(0, 120));
    }
  }

  /**
   * Answers a ping unless another answer is being sent. Pings in between need no answer (RFC 6455 section
   * 5.5.3).
   */
  #pong(data: Buffer): void {
    if (this.#ponging) return;
    this.#ponging = true;
    this.#ws.pong(data, false, () => {
      this.#ponging = false;
    });
  }

  /** Pings the client. Disconnects it if pings are not answered. Pings while the socket is paused do not count. */
  #ping(): void {
    if (this.#ws.isPaused) {
      this.#unanswered = 0;
      if (monotonic() - this.#takenAt >= stuckMs)
        this.#close(closeCodes.fell_behind, 'the machine did not accept input for too long; attach again');
    }
    if (this.#unanswered >= maxUnanswered) this.#ws.terminate();
    // A closing socket accepts no more pings.
    else if (this.#ws.readyState === this.#ws.OPEN) {
      this.#unanswered += 1;
      this.#ws.ping();
    }
  }
}

/** The offset in a message that reports received output; undefined for any other message. */
function reportIn(data: Buffer): number | undefined {
  return data.length > reportBytes ? undefined : receivedMessage.safeParse(parseJson(data)).data?.offset;
}

function parseJson(bytes: Buffer): unknown {
  try {
    assertJsonLimits(bytes);
    return JSON.parse(bytes.toString());
  } catch {
    return undefined;
  }
}
