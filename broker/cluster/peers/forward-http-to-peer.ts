// Forwards HTTP requests to the peer ports of other brokers. The request of a client is streamed to the other
// broker, and the answer is streamed back.
import { once } from 'node:events';
import type { ClientRequest, IncomingMessage, OutgoingHttpHeaders, ServerResponse } from 'node:http';
import { Agent, request as httpsRequest } from 'node:https';
import type { Duplex } from 'node:stream';
import { pipeline } from 'node:stream/promises';
import { connect as connectTls, createSecureContext } from 'node:tls';
import type { Caller } from '../../../shared/api/route-table.ts';
import { after } from '../../../shared/clock.ts';
import { AppError } from '../../../shared/errors.ts';
import { LogLimiter } from '../../../shared/log-limiter.ts';
import type { Logger } from '../../../shared/logger.ts';
import { countTransferred } from '../../../shared/v8-garbage-collection.ts';
import { type PeerLeaf, peerName } from '../../ca-and-broker-certificates.ts';
import { leaseMs } from '../cluster-tables.ts';
import { hasDatabasePath } from '../hand-over-when-cut-off.ts';
import { clientHeader, clientOf, type DescribedClient, describeClient } from './forwarded-client-header.ts';
import type { Owners, Peer } from './owner-interfaces.ts';

/** A request to be forwarded, and the parts of it that this broker has read already. */
export interface Forwarded {
  /**
   * The authenticated client; undefined for a terminal, because the owner of the machine checks the terminal's ticket.
   */
  client?: DescribedClient;
  requestId: string;
  /** The whole body, if this broker had to read it to find the machine. */
  body?: Buffer | undefined;
}

/** Longest time in milliseconds to connect to another broker with TCP and TLS. */
const connectMs = 2_000;
/**
 * Milliseconds in which another broker must accept a test connection. A shorter time would end requests to a frozen
 * broker before its lease is over.
 */
const answerMs = leaseMs;
/** Milliseconds in which another broker must report whether it can reach the database. Its query takes up to 3 s. */
const databaseMs = 4_000;
/**
 * Maximum number of idle connections to each broker. A request that finds no idle connection waits some 2 ms for a
 * handshake.
 */
const idleConnections = 64;
/** Headers about a single connection, which are not forwarded (RFC 9110 section 7.6.1). */
const hopByHop = [
  'connection',
  'keep-alive',
  'proxy-authenticate',
  'proxy-authorization',
  'proxy-connection',
  'te',
  'trailer',
  'transfer-encoding',
  'upgrade',
];

const noAnswer = 'requests could not be forwarded, because another broker did not answer at this URL';

export class PeerClient {
  readonly #log: Logger;
  readonly #owners: Pick<Owners, 'hasEnded'>;
  #agent: Agent;
  /** Limits the number of warnings about peers that did not answer. */
  readonly #silent: LogLimiter<Peer>;
  /** Requests and WebSockets that have not ended, with the broker that answers them. */
  readonly #open = new Map<ClientRequest | Duplex, Peer>();

  constructor(leaf: PeerLeaf, owners: Pick<Owners, 'hasEnded'>, log: Logger) {
    this.#log = log;
    this.#silent = new LogLimiter(1, (first, more) => log.warn({ ...first, more }, noAnswer));
    this.#owners = owners;
    this.#agent = agentWith(leaf);
  }

  /** Ends the requests to brokers whose lease is over, because a frozen broker would never answer. */
  endLost(): void {
    for (const [one, { brokerId }] of this.#open)
      if (this.#owners.hasEnded(brokerId))
        one.destroy(new Error(`broker ${brokerId} counts as stopped: its lease is over`));
  }

  /**
   * Ends the requests to brokers that cannot be reached. If a network drops all packets, TCP alone reports this only
   * after a quarter of an hour. Never rejects.
   */
  async endUnreachable(): Promise<void> {
    const urls = new Set([...this.#open.values()].map(({ url }) => url));
    await Promise.all([...urls].map((url) => this.#endIfUnreachable(url)));
  }

  async #endIfUnreachable(url: string): Promise<void> {
    const { hostname: host, port } = addressOf(url);
    const { secureContext } = this.#agent.options;
    const socket = connectTls({ host, port: Number(port), servername: peerName, secureContext });
    // An error event without a listener would end the process.
    socket.on('error', () => {});
    const cancel = after(answerMs, () =>
      socket.destroy(new Error(`no TLS connection to ${url} within ${answerMs} ms`)),
    );
    try {
      await once(socket, 'secureConnect');
    } catch (error) {
      for (const [one, peer] of this.#open)
        if (peer.url === url)
          one.destroy(
            new Error(`broker ${peer.brokerId} can no longer be reached at ${url}`, { cause: error }),
          );
      // The idle connections to all brokers are closed. Otherwise a later request could use an idle connection to the
      // broker that did not answer.
      for (const idle of Object.values(this.#agent.freeSockets).flat()) idle?.destroy();
    } finally {
      cancel();
      socket.destroy();
    }
  }

  #track(one: ClientRequest | Duplex, peer: Peer): void {
    this.#open.set(one, peer);
    one.once('close', () => this.#open.delete(one));
  }

  /** Uses a newer certificate for new connections. */
  renew(leaf: PeerLeaf): void {
    this.#agent = agentWith(leaf);
  }

  close(): void {
    this.#silent.close();
    this.#agent.destroy();
  }

  /**
   * Streams a request to the peer, and the peer's answer back. Throws unavailable if the peer fails before its answer
   * begins. If the peer fails later, closes the client's connection.
   */
  async forward(
    peer: Peer,
    request: IncomingMessage,
    response: ServerResponse,
    forwarded: Forwarded,
  ): Promise<void> {
    const outgoing = this.#send(peer, request, headersOf(request, forwarded));
    const answer = Promise.withResolvers<IncomingMessage>();
    outgoing.once('response', answer.resolve);
    // This listener stays for the whole request, because an error event without a listener would end the
    // process.
    outgoing.on('error', answer.reject);
    const abort = (): void => void outgoing.destroy();
    if (response.closed) abort();
    else response.once('close', abort);
    sendBody(request, response, outgoing, forwarded.body);
    try {
      const incoming = await answer.promise;
      copyHead(incoming, response);
      // A data listener starts the flow of `incoming` only after the current turn of the event loop, so pipeline()
      // misses no data. pipeline() pauses `incoming` while the client is slow.
      incoming.on('data', countChunk);
      await pipeline(incoming, response);
    } catch (error) {
      const gone = response.closed && !response.writableFinished;
      if (!response.headersSent) {
        // A client that closes its connection also causes this error. The log then gets no warning about the peer.
        if (!gone && this.#silent.take(peer.url, peer)) this.#log.warn({ err: error, ...peer }, noAnswer);
        throw unanswered(peer, error);
      }
      response.destroy();
      if (!gone)
        this.#log.warn({ err: error, peer: peer.brokerId }, 'a forwarded answer was not sent in full');
    } finally {
      response.off('close', abort);
      // The peer may answer before it has read the whole body. The rest of the body is then not sent to the peer, but
      // is still read from the client, by the caller of this method. A pipe to the destroyed stream would pause the
      // request, so the pipe is removed first.
      if (!outgoing.writableFinished) {
        request.unpipe(outgoing);
        outgoing.destroy();
      }
    }
  }

  /**
   * Sends a client's GET request to the peer. Resolves with the answer's body, which fails when the caller's signal
   * fires. Throws unavailable unless the peer answers with status 200.
   */
  async get(peer: Peer, path: string, caller: Caller): Promise<IncomingMessage> {
    const { request_id, signal } = caller;
    const headers = { 'x-request-id': request_id, [clientHeader]: describeClient(clientOf(caller)) };
    const outgoing = this.#send(peer, { method: 'GET', url: path }, headers);
    const abort = (): void => void outgoing.destroy();
    signal.addEventListener('abort', abort, { once: true });
    outgoing.once('close', () => signal.removeEventListener('abort', abort));
    if (signal.aborted) abort();
    const answered = Promise.withResolvers<IncomingMessage>();
    outgoing.once('response', answered.resolve);
    outgoing.on('error', answered.reject);
    outgoing.end();
    const answer = await answered.promise.catch((error: unknown) => {
      throw unanswered(peer, error);
    });
    if (answer.statusCode === 200) return answer;
    outgoing.destroy();
    throw unanswered(peer, new Error(`the answer has the status ${answer.statusCode}`));
  }

  /**
   * Opens a client's WebSocket at the peer. Resolves with false if the peer refuses: the client then gets the peer's
   * answer. Throws unavailable if the peer does not answer.
   */
  upgrade(
    peer: Peer,
    request: IncomingMessage,
    socket: Duplex,
    head: Buffer,
    forwarded: Forwarded,
  ): Promise<boolean> {
    const headers = { ...headersOf(request, forwarded), connection: 'Upgrade', upgrade: 'websocket' };
    const outgoing = this.#send(peer, request, headers);
    const abort = (): void => void outgoing.destroy();
    // The client may have disconnected while the owner of the machine was looked up.
    if (socket.destroyed) abort();
    else socket.once('close', abort);
    outgoing.end();
    return new Promise<boolean>((resolve, reject) => {
      outgoing.once('upgrade', (answer, far, farHead) => {
        socket.off('close', abort);
        socket.write(headOf(answer), 'latin1');
        this.#track(far, peer);
        join(socket, head, far, farHead);
        resolve(true);
      });
      outgoing.once('response', (answer) => {
        socket.write(headOf(answer, true), 'latin1');
        answer.once('error', () => socket.destroy()).pipe(socket);
        resolve(false);
      });
      outgoing.on('error', (error) => reject(unanswered(peer, error)));
    });
  }

  /** Asks the peer whether it can reach the database. False if the peer does not answer in time. Never rejects. */
  async hasDatabase(peer: Peer): Promise<boolean> {
    const outgoing = this.#send(peer, { method: 'GET', url: hasDatabasePath }, {});
    const cancel = after(databaseMs, () => outgoing.destroy());
    const answered = Promise.withResolvers<boolean>();
    outgoing.once('response', (answer) => {
      answer.resume();
      answered.resolve(answer.statusCode === 204);
    });
    outgoing.on('error', () => answered.resolve(false)).once('close', () => answered.resolve(false));
    outgoing.end();
    return await answered.promise.finally(cancel);
  }

  #send(
    peer: Peer,
    { method, url: path }: Pick<IncomingMessage, 'method' | 'url'>,
    headers: OutgoingHttpHeaders,
  ): ClientRequest {
    const { hostname: host, port } = addressOf(peer.url);
    const outgoing = httpsRequest({ agent: this.#agent, host, port, method, path, headers });
    this.#track(outgoing, peer);
    const cancel = after(connectMs, () =>
      outgoing.destroy(new Error(`no TLS connection to ${peer.url} within ${connectMs} ms`)),
    );
    outgoing.once('close', cancel).once('socket', (socket) => {
      if (!socket.connecting) cancel();
      else socket.once('secureConnect', cancel);
    });
    return outgoing;
  }
}

/** Returns the host and port of a peer's URL. The brackets around an IPv6 address are removed. */
function addressOf(url: string): { hostname: string; port: string } {
  const { hostname, port } = new URL(url);
  return { hostname: hostname.replace(/^\[|\]$/g, ''), port };
}

function agentWith(leaf: PeerLeaf): Agent {
  return new Agent({
    keepAlive: true,
    maxFreeSockets: idleConnections,
    servername: peerName,
    secureContext: createSecureContext(leaf),
  });
}

/**
 * Returns the headers for the peer: the request's headers that are not about its connection, and the header that
 * describes the client.
 */
function headersOf(request: IncomingMessage, { client, requestId, body }: Forwarded): OutgoingHttpHeaders {
  const { headers } = request;
  const kept = Object.entries(headers).filter(([name]) => !hopByHop.includes(name) && name !== clientHeader);
  const own: OutgoingHttpHeaders = { ...Object.fromEntries(kept), 'x-request-id': requestId };
  if (client) own[clientHeader] = describeClient(client);
  if (body) {
    // The body has arrived already and is sent at once, so the peer need not ask for it with "100 Continue".
    delete own.expect;
    own['content-length'] = body.length;
  } else if (headers['transfer-encoding'] !== undefined) own['transfer-encoding'] = 'chunked';
  return own;
}

const countChunk = (chunk: Buffer): void => countTransferred(chunk.length);

/** Sends the body: `body` if it is set, otherwise the body of the request while it arrives. */
function sendBody(
  request: IncomingMessage,
  response: ServerResponse,
  outgoing: ClientRequest,
  body: Buffer | undefined,
): void {
  const { expect, 'content-length': length, 'transfer-encoding': coding } = request.headers;
  if (body) outgoing.end(body);
  else if (coding === undefined && (length === undefined || length === '0')) outgoing.end();
  else if (expect?.toLowerCase() === '100-continue') {
    // The client sends no body before it gets the status "100 Continue". This broker sends that status once the
    // other broker asks for the body.
    outgoing.once('continue', () => {
      response.writeContinue();
      request.pipe(outgoing);
    });
  } else request.pipe(outgoing);
}

function copyHead(incoming: IncomingMessage, response: ServerResponse): void {
  response.statusCode = incoming.statusCode ?? 502;
  for (const [name, values = []] of Object.entries(incoming.headersDistinct)) {
    const [value = ''] = values;
    if (!hopByHop.includes(name)) response.setHeader(name, values.length > 1 ? values : value);
  }
  // The connection is closed after an oversized body, because the rest of the body is not read.
  if (incoming.statusCode === 413) response.setHeader('Connection', 'close');
  // The head is sent at once, because the first event of a stream may come late.
  if (incoming.headers['content-length'] === undefined) response.flushHeaders();
}

/**
 * Returns the head of an answer as text. With `last`, the head says that the connection is closed after the
 * answer.
 */
function headOf({ statusCode, statusMessage, rawHeaders }: IncomingMessage, last = false): string {
  const lines = [`HTTP/1.1 ${statusCode} ${statusMessage}`];
  for (let at = 0; at < rawHeaders.length; at += 2) {
    const name = rawHeaders[at] ?? '';
    if (!last || !hopByHop.includes(name.toLowerCase())) lines.push(`${name}: ${rawHeaders[at + 1]}`);
  }
  if (last) lines.push('Connection: close');
  return `${lines.join('\r\n')}\r\n\r\n`;
}

/** Passes all bytes of two connections to each other. When one closes, closes the other. */
function join(near: Duplex, nearHead: Buffer, far: Duplex, farHead: Buffer): void {
  if (nearHead.length > 0) near.unshift(nearHead);
  if (farHead.length > 0) far.unshift(farHead);
  for (const [one, other] of [
    [near, far],
    [far, near],
  ] as const) {
    one.on('error', () => one.destroy());
    one.once('close', () => other.destroy());
    one.pipe(other);
  }
}

/** Returns the error for a broker that did not answer, or whose answer was not complete. */
export function unanswered({ brokerId }: Peer, cause: unknown): AppError {
  const message = 'the broker that is responsible for this machine did not answer: try again';
  return new AppError('unavailable', message, { broker_id: brokerId, retry_after: 1 }, { cause });
}
