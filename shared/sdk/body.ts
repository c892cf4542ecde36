// The body of an answer as it comes: all of it, or an error.
import { noAnswer } from './failure.ts';
import { heard } from './send.ts';

/** The same Response, but its body rejects where it ends before what was announced. */
export function wholeOrError(response: Response, url: string, signal: AbortSignal | undefined): Response {
  const { body, status, statusText, headers } = response;
  if (!body) return response;
  // What a proxy has compressed is announced in other bytes than those that are read.
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
  let taken = 0;
  const pull = async (controller: ReadableStreamDefaultController<Uint8Array>): Promise<void> => {
    const { done, value } = await heard(url, signal, () => reader.read());
    taken += value?.length ?? 0;
    if (value) controller.enqueue(value);
    if (!done) return;
    if (length !== undefined && taken !== length) {
      throw noAnswer(new URL(url).origin, new Error(`${taken} bytes came instead of ${length}`));
    }
    controller.close();
  };
  return new ReadableStream({ pull, cancel: (reason) => reader.cancel(reason) }, { highWaterMark: 0 });
}
