// Sends an HTTP request, and retries it if a repeat is safe.
import { sleep } from '../clock.ts';
import type { Connection, Prepared } from './build-request.ts';
import { FarhandError, failureOf, noAnswer, reasonOf } from './errors-and-envelopes.ts';

/**
 * Upper limit of the random delay before a retry, in milliseconds. It is `firstCeiling` for the first retry, and
 * doubles with each further retry, up to `lastCeiling`.
 */
const firstCeiling = 500;
const lastCeiling = 8_000;
/** Longest Retry-After in milliseconds for which the client waits. The call rejects if it is longer. */
const longestWait = 60_000;
/** Errors of a failed connection, after which it is certain that no request was sent. */
const neverSent = /^(ECONNREFUSED|ENOTFOUND|EHOSTUNREACH|ENETUNREACH|EAI_AGAIN|UND_ERR_CONNECT_TIMEOUT)$/;

/** Resolves with the result of `read` for a successful answer; rejects with FarhandError. */
export async function send<T>(
  to: Connection,
  request: Prepared,
  signal: AbortSignal | undefined,
  read: (response: Response) => T | Promise<T>,
): Promise<T> {
  let ceiling = firstCeiling;
  for (let left = to.retries; ; left -= 1) {
    try {
      return await read(await attempt(to, request, signal));
    } catch (error) {
      const again = left > 0 && error instanceof FarhandError && mayRepeat(error, request);
      if (!again || (error.retryAfter ?? 0) > longestWait) throw error;
      const ms = (error.retryAfter ?? 0) + Math.random() * ceiling;
      ceiling = Math.min(lastCeiling, ceiling * 2);
      to.onRetry?.(error, ms);
      await sleep(ms, signal);
      signal?.throwIfAborted();
    }
  }
}

async function attempt(
  to: Connection,
  request: Prepared,
  signal: AbortSignal | undefined,
): Promise<Response> {
  const { route, url, headers, body } = request;
  const init = { method: route.method, headers, ...body, ...(signal && { signal }) };
  const response = await orNoAnswer(url, signal, () => to.fetch(url, init));
  if (response.ok || response.status === 304) return response;
  throw failureOf(response, await textOf(response, url, signal));
}

export function textOf(response: Response, url: string, signal: AbortSignal | undefined): Promise<string> {
  return orNoAnswer(url, signal, () => response.text());
}

/** Converts errors of `work` to `no_answer`. Keeps a FarhandError, and keeps any error after the signal has fired. */
async function orNoAnswer<T>(
  url: string,
  signal: AbortSignal | undefined,
  work: () => Promise<T>,
): Promise<T> {
  try {
    return await work();
  } catch (error) {
    if (signal?.aborted || error instanceof FarhandError) throw error;
    throw noAnswer(url, error);
  }
}

/** True if a repeat of the request is safe, by the table in docs/sdk.md. */
function mayRepeat(error: FarhandError, { route, repeatable, idempotent }: Prepared): boolean {
  if (!repeatable) return false;
  if (error.status === 429) return true;
  // `unavailable` means that the request had no effect, as far as the broker knows. The broker cannot be certain, so a
  // POST without an idempotency key is not repeated: it could take effect twice.
  if (error.code === 'unavailable') return route.method !== 'POST' || idempotent;
  // A conflict `under_way` means that the broker still executes the first attempt.
  if (error.code === 'conflict') return idempotent && error.details.under_way === true;
  return error.code === 'no_answer' && (wasNeverSent(error) || (idempotent && isTransient(error)));
}

function wasNeverSent({ cause }: FarhandError): boolean {
  return neverSent.test(reasonOf(cause) ?? '');
}

/** True if the connection failed, or if a proxy reports that it could not reach the broker. */
export function isTransient({ status }: FarhandError): boolean {
  return [0, 502, 503, 504].includes(status);
}

/** Returns the same response with a body that fails if its length differs from Content-Length. */
export function checkedBody(response: Response, url: string, signal: AbortSignal | undefined): Response {
  const { body, status, statusText, headers } = response;
  if (!body) return response;
  // Content-Length counts compressed bytes, but fetch returns decompressed bytes, so they cannot be compared.
  const length = headers.get('content-encoding') ? null : headers.get('content-length');
  const counted = countedBody(body, length === null ? undefined : Number(length), url, signal);
  return new Response(counted, { status, statusText, headers });
}

function countedBody(
  body: ReadableStream<Uint8Array>,
  length: number | undefined,
  url: string,
  signal: AbortSignal | undefined,
): ReadableStream<Uint8Array> {
  const reader = body.getReader();
  let received = 0;
  const pull = async (controller: ReadableStreamDefaultController<Uint8Array>): Promise<void> => {
    const { done, value } = await orNoAnswer(url, signal, () => reader.read());
    received += value?.length ?? 0;
    if (value) controller.enqueue(value);
    if (!done) return;
    if (length !== undefined && received !== length) {
      throw noAnswer(url, new Error(`received ${received} of ${length} bytes`));
    }
    controller.close();
  };
  return new ReadableStream({ pull, cancel: (reason) => reader.cancel(reason) }, { highWaterMark: 0 });
}
