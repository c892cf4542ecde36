// Follows a stream of server-sent events: reconnects after a loss, and resumes after the last received event.
import { backoff } from '../backoff.ts';
import { monotonic, sleep } from '../clock.ts';
import type { ReceivedEvent } from './call-types.ts';
import { FarhandError, noAnswer } from './errors-and-envelopes.ts';
import { chunksOf, eventsOf } from './parse-lines-and-sse.ts';
import { isTransient } from './send.ts';

export interface FollowOptions {
  url: string;
  signal: AbortSignal | undefined;
  /**
   * Requests the events that follow the event whose id is `after`. Without an id, sends the caller's request again.
   */
  connect(after: string | undefined): Promise<Response>;
  /** True to reconnect after a lost connection, until the signal fires or the reader stops. */
  resumes: boolean;
  /** Name of the event that ends the stream; undefined if the stream has no end. */
  last: string | undefined;
  onConnection: ((isOpen: boolean) => void) | undefined;
}

/** Milliseconds without data after which a connection counts as lost. The broker sends a comment every 15 s. */
const silenceMs = 45_000;
/**
 * A connection that was open for more milliseconds than this counts as a success, even if no event came. The next delay
 * before a reconnect is then short.
 */
const settledMs = 5_000;

/** Yields the events of a response, and of the responses after each reconnect. */
export async function* follow(
  first: Response,
  options: FollowOptions,
): AsyncGenerator<ReceivedEvent<unknown>> {
  const { signal, resumes, last } = options;
  const pause = backoff();
  let openedAt = monotonic();
  // If the connection breaks before the first event, the stream resumes after the event whose id is in this header.
  let at = first.headers.get('x-last-event-id') ?? undefined;
  for (let response: Response | undefined = first; ; response = await reconnect(at, options)) {
    let failure: unknown;
    try {
      for await (const event of eventsOf(chunksOf(response?.body ?? null, silenceMs))) {
        at = event.id ?? at;
        pause.reset();
        yield event;
        if (event.event === last) return;
      }
    } catch (error) {
      failure = error;
    }
    signal?.throwIfAborted();
    if (!resumes && failure !== undefined) throw noAnswer(options.url, failure);
    // The end of the response ends a stream that does not resume. A stream that resumes ends only after the event
    // `last`. That event has not come here, so the connection counts as lost.
    if (!resumes) return;
    options.onConnection?.(false);
    if (monotonic() - openedAt > settledMs) pause.reset();
    await sleep(pause.next(), signal);
    signal?.throwIfAborted();
    openedAt = monotonic();
  }
}

/** Connects again. Returns undefined after a temporary failure, so that the caller tries again. */
async function reconnect(at: string | undefined, how: FollowOptions): Promise<Response | undefined> {
  try {
    const response = await how.connect(at);
    how.onConnection?.(true);
    return response;
  } catch (error) {
    how.signal?.throwIfAborted();
    if (!(error instanceof FarhandError)) throw error;
    const { status, code } = error;
    const transient =
      status === 429 || code === 'unavailable' || (code === 'no_answer' && isTransient(error));
    if (!transient) throw error;
    return undefined;
  }
}
