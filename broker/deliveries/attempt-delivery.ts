// Makes one attempt of a delivery: a request to an allowed address, with a deadline for the whole attempt.
import { isIP, type LookupFunction, type Socket } from 'node:net';
import { Agent, buildConnector, type Dispatcher, request } from 'undici';
import { after, monotonic, now } from '../../shared/clock.ts';
import { errnoOf } from '../../shared/errors.ts';
import { retryAfterMs } from '../../shared/sdk/errors-and-envelopes.ts';
import { type AddressGuard, NotAllowed } from './address-guard.ts';

export interface Outcome {
  /** Time at which the attempt began, in milliseconds since 1970. */
  at: number;
  delivered: boolean;
  status_code: number | null;
  duration: number;
  error: string | null;
  /**
   * The first bytes of the answer as text, or null. Always null for a receiver with an internal address, because
   * webhooks must not be a way to read internal services.
   */
  answer: string | null;
  /** Milliseconds to wait, from the header Retry-After of a busy receiver (status 429 or 503); null if unknown. */
  retryAfter: number | null;
  /** True if the broker aborted the attempt. Such an attempt does not count as a failure of the receiver. */
  aborted: boolean;
}

export type Answered = Partial<Omit<Outcome, 'at' | 'duration'>>;

/** The headers and body that an attempt sends over HTTP. */
export interface Sent {
  method?: 'GET' | 'POST';
  headers: Record<string, string>;
  body?: Buffer;
}

const deadlineMs = 15_000;
/**
 * Milliseconds in which an address of a name must accept the connection before the next address is tried. Node's
 * default of 250 ms is too short for distant servers and for a lost packet, which is sent again after 1 s.
 */
const addressMs = 3_000;
const storedBytes = 4 * 1024;
/**
 * Milliseconds for which an idle connection may be used again. The time is short, because receivers close
 * idle connections.
 */
const idleMs = 1_000;

export class Sender {
  readonly #guard: AddressGuard;
  /** Origins whose name resolved to an internal address. Their answers are not stored. */
  readonly #internal = new Set<string>();
  /**
   * Errors of connections that the receiver closed after it had answered a request on the same connection. A request
   * that fails with such an error is sent again on a new connection.
   */
  readonly #stale = new WeakSet<Error>();
  readonly #pooled: Agent;
  readonly #unpooled: Agent;

  constructor(guard: AddressGuard) {
    this.#guard = guard;
    const connect: buildConnector.connector = (target, connected) => {
      this.#connect(target).then(
        (socket) => connected(null, socket),
        (error: Error) => connected(error, null),
      );
    };
    // undici's own timeouts are off, because the deadline applies to the whole attempt.
    const limits = {
      headersTimeout: 0,
      bodyTimeout: 0,
      keepAliveTimeout: idleMs,
      keepAliveMaxTimeout: idleMs,
    };
    this.#pooled = new Agent({ ...limits, connect, allowH2: false, pipelining: 1 });
    this.#unpooled = new Agent({ ...limits, connect, allowH2: false, pipelining: 0 });
  }

  /** Sends an attempt and resolves with its outcome. Never rejects. `make` gets the time at which the attempt began. */
  send(url: string, make: (at: number) => Sent, signal: AbortSignal): Promise<Outcome> {
    return attempt(signal, (at, ending) => {
      const { method = 'POST', headers, body = null } = make(at);
      return this.#post(url, { method, headers, body, signal: ending });
    });
  }

  async close(): Promise<void> {
    await Promise.all([this.#pooled.destroy(), this.#unpooled.destroy()]);
  }

  async #post(url: string, options: Omit<Dispatcher.RequestOptions, 'path' | 'origin'>): Promise<Answered> {
    const response = await request(url, { ...options, dispatcher: this.#pooled }).catch((error: Error) => {
      if (!this.#stale.has(error)) throw error;
      return request(url, { ...options, dispatcher: this.#unpooled });
    });
    const { statusCode: status_code, headers } = response;
    const text = await beginningOf(response);
    const isBusy = [429, 503].includes(status_code);
    return {
      delivered: status_code >= 200 && status_code < 300,
      status_code,
      error:
        status_code >= 300 && status_code < 400
          ? 'the URL redirects, and redirects are not followed: set the final URL'
          : null,
      answer: this.#internal.has(new URL(url).origin) ? null : text,
      retryAfter: isBusy ? (retryAfterMs(String(headers['retry-after'] ?? '').trim()) ?? null) : null,
    };
  }

  /** Connects to an address that the guard has checked. */
  async #connect(options: buildConnector.Options): Promise<Socket> {
    const { hostname, host, protocol } = options;
    const port = options.port || (protocol === 'https:' ? '443' : '80');
    const { addresses, isInternal } = await this.#guard.resolve(hostname, Number(port));
    if (isInternal) this.#internal.add(new URL(`${protocol}//${host}`).origin);
    const connect = buildConnector({ allowH2: false, timeout: deadlineMs, ...connectionTo(addresses) });
    const socket = await new Promise<Socket>((resolve, reject) => {
      connect({ ...options, port }, (...[error, made]) => (error ? reject(error) : resolve(made)));
    });
    this.#guard.refuseSelf(socket);
    const before = socket.bytesRead;
    // undici rejects the request with this same error object. #post() then finds the error in #stale and sends the
    // request again.
    socket.on('error', (error) => {
      const closed = socket.readableEnded || ['ECONNRESET', 'EPIPE'].includes(errnoOf(error) ?? '');
      if (closed && socket.bytesRead > before) this.#stale.add(error);
    });
    return socket;
  }
}

/**
 * Returns options for a connection to one of these addresses, which the guard has checked. The name is not resolved
 * again, because a second lookup could return another address.
 */
export function connectionTo(addresses: readonly string[]) {
  const found = addresses.map((address) => ({ address, family: isIP(address) }));
  const lookup: LookupFunction = (_name, _options, callback) => callback(null, found);
  // node:net tries several addresses only with autoSelectFamily.
  return { lookup, autoSelectFamily: true, autoSelectFamilyAttemptTimeout: addressMs };
}

/**
 * Makes an attempt with a deadline and resolves with its outcome. Never rejects. `act` gets the time at which the
 * attempt began.
 */
export async function attempt(
  signal: AbortSignal,
  act: (at: number, ending: AbortSignal) => Promise<Answered>,
): Promise<Outcome> {
  const [at, begun] = [now(), monotonic()];
  const deadline = new AbortController();
  const cancel = after(deadlineMs, () => deadline.abort());
  const answered = await act(at, AbortSignal.any([signal, deadline.signal])).catch(
    (error: unknown): Answered => ({
      error: deadline.signal.aborted ? `no complete answer within ${deadlineMs / 1000} s` : reasonOf(error),
      aborted: signal.aborted,
    }),
  );
  cancel();
  const duration = Math.round(monotonic() - begun);
  const nothing = { delivered: false, status_code: null, error: null, answer: null, retryAfter: null };
  return { at, ...nothing, aborted: false, ...answered, duration };
}

/**
 * Reads the first bytes of the answer. An incomplete or late body does not make the delivery fail, because
 * the status is already known.
 */
async function beginningOf({ headers, body }: Dispatcher.ResponseData): Promise<string | null> {
  const chunks: Buffer[] = [];
  let size = 0;
  body.on('error', () => {});
  try {
    for await (const chunk of body as AsyncIterable<Buffer>) {
      chunks.push(chunk);
      size += chunk.length;
      if (size >= storedBytes) break;
    }
  } catch {
    // The error is ignored: the bytes that have arrived are enough for the record of the attempt.
  }
  if (headers['content-encoding']) return null;
  return Buffer.concat(chunks).subarray(0, storedBytes).toString('utf8');
}

function reasonOf(error: unknown): string {
  if (error instanceof NotAllowed) return error.message;
  const text = errnoOf(error) ?? (error instanceof Error ? error.message : String(error));
  return text.slice(0, 200);
}
