// One attempt: a POST to an address that the guard allows, with one deadline over all of it and little read back.
import { Agent, type Dispatcher, request } from 'undici';
import { after, monotonic, now } from '../../shared/clock.ts';
import { errnoOf } from '../../shared/errors.ts';
import { openConnections } from './connect.ts';
import { type Guard, NotAllowed } from './guard.ts';
import type { Resolve } from './resolve.ts';
import { headersOf, type Message, type Signer } from './sign.ts';

export interface Outcome {
  /** When it began. */
  at: number;
  delivered: boolean;
  status_code: number | null;
  duration: number;
  error: string | null;
  /** First bytes of the answer as text; null for an internal receiver. */
  answer: string | null;
  /** Milliseconds that a busy receiver asks for. */
  retryAfter: number | null;
  /** Ended by its signal: it says nothing about the receiver. */
  aborted: boolean;
}

export interface Sender {
  /** Never rejects. */
  send(url: string, message: Message, signer: Signer | undefined, signal: AbortSignal): Promise<Outcome>;
  /** Cuts what is open. */
  close(): Promise<void>;
}

const deadlineMs = 15_000;
const readBytes = 16 * 1024;
const keptBytes = 4 * 1024;
/** A receiver may close a connection that idles; one that is used again must not be about to be closed. */
const idleMs = 1_000;

const late = `no complete answer within ${deadlineMs / 1000} s`;

type Asked = Pick<Dispatcher.RequestOptions, 'method' | 'headers' | 'body' | 'signal'>;

export function openSender(guard: Guard, resolve: Resolve): Sender {
  /** Where an internal address was met. */
  const internal = new Set<string>();
  const connections = openConnections(guard, resolve, deadlineMs, (origin) => internal.add(origin));
  const options = {
    connect: connections.connect,
    allowH2: false,
    keepAliveTimeout: idleMs,
    keepAliveMaxTimeout: idleMs,
    // The deadline is one over all, and ours.
    headersTimeout: 0,
    bodyTimeout: 0,
  };
  const lasting = new Agent({ ...options, pipelining: 1 });
  const fresh = new Agent({ ...options, pipelining: 0 });

  /** Over a connection of its own where the receiver has just closed the one that was used again. */
  async function ask(url: URL, message: Asked): Promise<Dispatcher.ResponseData> {
    try {
      return await request(url, { ...message, dispatcher: lasting });
    } catch (error) {
      if (!connections.wasWorn(error)) throw error;
      return request(url, { ...message, dispatcher: fresh });
    }
  }

  return {
    async send(target, message, signer, signal) {
      const [at, begun] = [now(), monotonic()];
      const limit = new AbortController();
      const cut = (): void => limit.abort();
      const cancel = after(deadlineMs, cut);
      signal.addEventListener('abort', cut, { once: true });
      if (signal.aborted) cut();
      const outcome = {
        at,
        delivered: false,
        status_code: null,
        error: null,
        answer: null,
        retryAfter: null,
      };
      const took = (): number => Math.round(monotonic() - begun);
      try {
        const url = new URL(target);
        const headers = headersOf(message, signer, at);
        const response = await ask(url, {
          method: 'POST',
          headers,
          body: message.body,
          signal: limit.signal,
        });
        const status_code = response.statusCode;
        const text = await beginningOf(response);
        return {
          ...outcome,
          delivered: status_code >= 200 && status_code < 300,
          status_code,
          duration: took(),
          error: status_code >= 300 && status_code < 400 ? 'redirects are not followed' : null,
          answer: internal.has(url.origin) ? null : text,
          retryAfter: [429, 503].includes(status_code) ? waitOf(response.headers['retry-after']) : null,
          aborted: false,
        };
      } catch (error) {
        const timedOut = limit.signal.aborted;
        return {
          ...outcome,
          duration: took(),
          error: timedOut ? late : reasonOf(error),
          aborted: signal.aborted,
        };
      } finally {
        cancel();
        signal.removeEventListener('abort', cut);
      }
    },
    async close() {
      await Promise.all([lasting.destroy(), fresh.destroy()]);
    },
  };
}

/** What is read at most, and of that the text that is kept. The head has come: that the rest is cut changes nothing. */
async function beginningOf({ headers, body }: Dispatcher.ResponseData): Promise<string | null> {
  const chunks: Buffer[] = [];
  let size = 0;
  body.on('error', () => {});
  try {
    for await (const chunk of body as AsyncIterable<Buffer>) {
      chunks.push(chunk);
      size += chunk.length;
      if (size >= readBytes) break;
    }
  } catch {
    // Cut off, or too slow.
  }
  if (headers['content-encoding']) return null;
  return Buffer.concat(chunks).subarray(0, keptBytes).toString('utf8');
}

/** Seconds, or a date (RFC 9110 section 10.2.3). */
function waitOf(header: string | string[] | undefined): number | null {
  const text = String(header ?? '').trim();
  if (/^\d{1,9}$/.test(text)) return Number(text) * 1000;
  const date = Date.parse(text);
  return Number.isNaN(date) ? null : Math.max(0, date - now());
}

function reasonOf(error: unknown): string {
  if (error instanceof NotAllowed) return error.message;
  const text = errnoOf(error) ?? (error instanceof Error ? error.message : String(error));
  return text.slice(0, 200);
}
