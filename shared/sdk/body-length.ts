// Checks that the body of a download has as many bytes as its Content-Length.
import { noAnswer } from './error.ts';
import { orNoAnswer } from './send.ts';

/**
 * Returns the same response with a body that rejects if it has fewer or more bytes than its Content-Length.
 */
export function checkedBody(response: Response, url: string, signal: AbortSignal | undefined): Response {
  const { body, status, statusText, headers } = response;
  if (!body) return response;
  // Content-Length counts compressed bytes, but fetch passes on decompressed bytes, which cannot be compared.
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
      throw noAnswer(new URL(url).origin, new Error(`received ${received} of ${length} bytes`));
    }
    controller.close();
  };
  return new ReadableStream({ pull, cancel: (reason) => reader.cancel(reason) }, { highWaterMark: 0 });
}
