// A stream of events that goes on where it was after its connection was lost.
import { backoff } from '../backoff.ts';
import { sleep } from '../clock.ts';
import { FarhandError, noAnswer } from './failure.ts';
import { isPassing } from './send.ts';
import type { ReceivedEvent } from './shape.ts';
import { chunksOf, eventsOf } from './sse.ts';

export interface Following {
  url: string;
  signal: AbortSignal | undefined;
  /** Asks for what comes after the event of this id; without one for what the caller asked for. */
  connect(after: string | undefined): Promise<Response>;
  /** Goes on by itself after a loss, until its signal fires or its reader leaves. */
  resumes: boolean;
  /** The event after which nothing comes; without it the stream has no end. */
  last: string | undefined;
}

/** The broker says something at least every 15 s. */
const silenceMs = 45_000;
const waits = { first: 500, most: 30_000 };

/** The events of a response that has begun, and of those that take its place. */
export async function* follow(first: Response, how: Following): AsyncGenerator<ReceivedEvent<unknown>> {
  const { signal, resumes, last } = how;
  const pause = backoff(waits);
  let at = startOf(first);
  for (let response: Response | undefined = first; ; response = await again(at, how)) {
    let lost: unknown;
    try {
      for await (const event of eventsOf(chunksOf(response?.body ?? null, silenceMs))) {
        at = event.id ?? at;
        pause.reset();
        yield event;
        if (event.event === last) return;
      }
    } catch (error) {
      lost = error;
    }
    signal?.throwIfAborted();
    if (!resumes && lost !== undefined) throw noAnswer(new URL(how.url).origin, lost);
    // Of a stream that resumes, whoever ended it before its last event was not the broker.
    if (!resumes) return;
    await sleep(pause.next(), signal);
    signal?.throwIfAborted();
  }
}

/** Where a stream begins that has told nothing yet: what happens while it is lost is not to be missed. */
function startOf(response: Response): string | undefined {
  return response.headers.get('x-last-event-id') ?? undefined;
}

/** Undefined where nobody is there just now. */
async function again(at: string | undefined, how: Following): Promise<Response | undefined> {
  try {
    return await how.connect(at);
  } catch (error) {
    how.signal?.throwIfAborted();
    const passing =
      error instanceof FarhandError &&
      (error.status === 429 ||
        error.code === 'unavailable' ||
        (error.code === 'no_answer' && isPassing(error)));
    if (passing) return undefined;
    throw error;
  }
}
