// A stream of server-sent events that reconnects and resumes after the last event received.
import { backoff } from '../backoff.ts';
import { sleep } from '../clock.ts';
import type { ReceivedEvent } from './call-types.ts';
import { FarhandError, noAnswer } from './failure.ts';
import { isTransient } from './send.ts';
import { chunksOf, eventsOf } from './sse.ts';

export interface FollowOptions {
  url: string;
  signal: AbortSignal | undefined;
  /** Requests the events after this id; without one, the events the caller asked for. */
  connect(after: string | undefined): Promise<Response>;
  /** Reconnects after a lost connection, until its signal fires or its reader stops. */
  resumes: boolean;
  /** Name of the event that ends the stream; without one it has no end. */
  last: string | undefined;
}

/** The broker sends a comment every 15 s at the latest. */
const silenceMs = 45_000;
const waits = { first: 500, most: 30_000 };

/** The events of a response, and of the responses after each reconnect. */
export async function* follow(first: Response, how: FollowOptions): AsyncGenerator<ReceivedEvent<unknown>> {
  const { signal, resumes, last } = how;
  const pause = backoff(waits);
  // Events during a loss before the first event must not be missed.
  let at = first.headers.get('x-last-event-id') ?? undefined;
  for (let response: Response | undefined = first; ; response = await reconnect(at, how)) {
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
    if (!resumes && failure !== undefined) throw noAnswer(new URL(how.url).origin, failure);
    // A stream that resumes was not ended by the broker before its last event.
    if (!resumes) return;
    await sleep(pause.next(), signal);
    signal?.throwIfAborted();
  }
}

/** Undefined while the broker is not reachable. */
async function reconnect(at: string | undefined, how: FollowOptions): Promise<Response | undefined> {
  try {
    return await how.connect(at);
  } catch (error) {
    how.signal?.throwIfAborted();
    const transient =
      error instanceof FarhandError &&
      (error.status === 429 ||
        error.code === 'unavailable' ||
        (error.code === 'no_answer' && isTransient(error)));
    if (transient) return undefined;
    throw error;
  }
}
