// Parses the bytes of an answer as lines (NDJSON) and as server-sent events (WHATWG HTML, section 9.2.6).
import { sleep } from '../clock.ts';
import type { ReceivedEvent } from './call-types.ts';

/** Maximum number of characters in a line. No route sends a line of nearly this length. */
const longestLine = 64 * 1024 * 1024;

/** Yields the lines of a body without their ends (LF, CRLF or CR). Drops an incomplete last line. */
async function* linesOf(chunks: AsyncIterable<Uint8Array>): AsyncGenerator<string> {
  const decoder = new TextDecoder();
  // Parts of the current line, whose end has not arrived yet.
  let begun: string[] = [];
  let length = 0;
  let half = '';
  for await (const chunk of chunks) {
    const text = half + decoder.decode(chunk, { stream: true });
    // A CR at the end of a chunk may be half of a CRLF, so it is read with the next chunk.
    half = text.endsWith('\r') ? '\r' : '';
    const [first = '', ...more] = text.slice(0, text.length - half.length).split(/\r\n|\n|\r/);
    begun.push(first);
    length += first.length;
    const last = more.pop();
    if (last !== undefined) {
      yield begun.join('');
      yield* more;
      begun = [last];
      length = last.length;
    }
    if (length > longestLine) throw new Error(`a line has more than ${longestLine} characters`);
  }
  if (half) yield begun.join('');
}

/** Yields one object per line, parsed as JSON. Skips empty lines. */
export async function* objectsOf(chunks: AsyncIterable<Uint8Array>): AsyncGenerator<unknown> {
  for await (const line of linesOf(chunks)) if (line !== '') yield JSON.parse(line);
}

/** Yields events with their data parsed as JSON. Drops an event that is cut off. */
export async function* eventsOf(chunks: AsyncIterable<Uint8Array>): AsyncGenerator<ReceivedEvent<unknown>> {
  let event: { data?: string; event?: string; id?: string } = {};
  for await (const line of linesOf(chunks)) {
    if (line !== '') {
      event = withField(event, line);
      continue;
    }
    const { data, event: name = 'message', id } = event;
    event = {};
    if (data !== undefined) yield { event: name, data: JSON.parse(data), ...(id !== undefined && { id }) };
  }
}

function withField(event: { data?: string; event?: string; id?: string }, line: string): typeof event {
  const colon = line.indexOf(':');
  // A line that starts with a colon is a comment. Its empty field name matches no field below.
  const name = colon < 0 ? line : line.slice(0, colon);
  const value = colon < 0 ? '' : line.slice(colon + 1).replace(/^ /, '');
  if (name === 'data')
    return { ...event, data: event.data === undefined ? value : `${event.data}\n${value}` };
  if (name === 'event') return { ...event, event: value };
  if (name === 'id' && !value.includes('\0')) return { ...event, id: value };
  return event;
}

/**
 * Yields the chunks of a body to one reader, and closes the connection when the reader stops. Throws if nothing arrives
 * for `silenceMs` milliseconds.
 */
export async function* chunksOf(
  body: ReadableStream<Uint8Array> | null,
  silenceMs = Number.POSITIVE_INFINITY,
): AsyncGenerator<Uint8Array> {
  if (!body) return;
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await within(silenceMs, reader.read());
      if (done) return;
      yield value;
    }
  } finally {
    // read() already threw any error of the stream.
    await reader.cancel().catch(() => {});
  }
}

async function within<T>(ms: number, work: Promise<T>): Promise<T> {
  if (ms === Number.POSITIVE_INFINITY) return work;
  const timeout = new AbortController();
  const silence = sleep(ms, timeout.signal).then(() => {
    if (!timeout.signal.aborted) throw new Error(`nothing arrived for ${ms} ms`);
    return work;
  });
  try {
    return await Promise.race([work, silence]);
  } finally {
    timeout.abort();
    // Without this handler, a rejection of `silence` after the end of `work` would be unhandled.
    silence.catch(() => {});
  }
}
