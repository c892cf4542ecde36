// Sends a request and, where that is safe, sends it again: the one loop of the SDK that retries.
import { backoff } from '../backoff.ts';
import { sleep } from '../clock.ts';
import { FarhandError, failureOf, noAnswer, reasonOf } from './failure.ts';
import type { Connection, Prepared } from './request.ts';

/** Between attempts, in milliseconds: a random share of a ceiling that doubles. */
const waits = { first: 500, most: 8_000 };
/** Whoever is asked to wait for longer decides for himself. */
const longestWait = 60_000;
/** Nothing was sent: nobody was reached. */
const neverSent = [
  'ECONNREFUSED',
  'ENOTFOUND',
  'EHOSTUNREACH',
  'ENETUNREACH',
  'EAI_AGAIN',
  'UND_ERR_CONNECT_TIMEOUT',
];

/** Resolves with what `read` makes of a success. */
export async function send<T>(
  to: Connection,
  request: Prepared,
  signal: AbortSignal | undefined,
  read: (response: Response) => Promise<T>,
): Promise<T> {
  const pause = backoff(waits);
  for (let left = to.retries; ; left -= 1) {
    try {
      return await read(await once(to, request, signal));
    } catch (error) {
      const again = left > 0 && error instanceof FarhandError && mayRepeat(error, request);
      if (!again || (error.retryAfter ?? 0) > longestWait) throw error;
      await sleep((error.retryAfter ?? 0) + pause.next(), signal);
      signal?.throwIfAborted();
    }
  }
}

async function once(to: Connection, request: Prepared, signal: AbortSignal | undefined): Promise<Response> {
  const { route, url, headers, body } = request;
  const init = { method: route.method, headers, ...body, ...(signal && { signal }) };
  const response = await heard(url, signal, () => to.fetch(url, init));
  if (response.ok || response.status === 304) return response;
  throw failureOf(response, await textOf(response, url, signal));
}

/** The whole of a body. */
export function textOf(response: Response, url: string, signal: AbortSignal | undefined): Promise<string> {
  return heard(url, signal, () => response.text());
}

/** What fails on the way, other than by the caller's own signal, is that no answer came. */
export async function heard<T>(
  url: string,
  signal: AbortSignal | undefined,
  hear: () => Promise<T>,
): Promise<T> {
  try {
    return await hear();
  } catch (error) {
    if (signal?.aborted || error instanceof FarhandError) throw error;
    throw noAnswer(new URL(url).origin, error);
  }
}

/** The table of the README's chapter on the SDK, in code. */
function mayRepeat(error: FarhandError, { route, repeatable, harmless }: Prepared): boolean {
  if (!repeatable) return false;
  if (error.status === 429) return true;
  // Refused before anything began, as far as the broker can know.
  if (error.code === 'unavailable') return route.method !== 'POST' || harmless;
  // Our first attempt, which the broker still works on.
  if (error.code === 'conflict') return harmless && error.details.under_way === true;
  return error.code === 'no_answer' && (wasNeverSent(error) || (harmless && isPassing(error)));
}

function wasNeverSent({ cause }: FarhandError): boolean {
  return neverSent.includes(reasonOf(cause) ?? '');
}

/** The connection failed, or a proxy says that it has no broker just now. */
export function isPassing({ status }: FarhandError): boolean {
  return [0, 502, 503, 504].includes(status);
}
