// Parses the bytes of an answer as lines (NDJSON) and as server-sent events (WHATWG HTML, section 9.2.6).
import { sleep } from '../clock.ts';
import type { ReceivedEvent } from './call-types.ts';

/** Characters; no route answers with a line near it. */
const longestLine = 64 * 1024 * 1024;

/** Yields the lines of a body without their ends (LF, CRLF or CR). A last line without an end was cut off and is dropped. */
async function* linesOf(chunks: AsyncIterable<Uint8Array>): AsyncGenerator<string> {
  const decoder = new TextDecoder();
  // Parts of the unfinished line.
  let begun: string[] = [];
  let length = 0;
  let half = '';
  for await (const chunk of chunks) {
    const text = half + decoder.decode(chunk, { stream: true });
    // A CR at the end may be half of a CRLF.
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

/** One object a line. */
export async function* objectsOf(chunks: AsyncIterable<Uint8Array>): AsyncGenerator<unknown> {
  for await (const line of linesOf(chunks)) if (line !== '') yield JSON.parse(line);
}

/** Events with their data parsed as JSON. An event that is cut off is dropped. */
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
  // A line that starts with a colon is a comment.
  const name = colon < 0 ? line : line.slice(0, colon);
  const value = colon < 0 ? '' : line.slice(colon + 1).replace(/^ /, '');
  if (name === 'data')
    return { ...event, data: event.data === undefined ? value : `${event.data}\n${value}` };
  if (name === 'event') return { ...event, event: value };
  if (name === 'id' && !value.includes('\0')) return { ...event, id: value };
  return event;
}

/**
 * The chunks of a body for one reader; the connection closes when the reader stops. Throws when nothing arrives for
 * `silenceMs`.
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
    // An error of the stream was already thrown by read().
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
    // Once the work has won, a later rejection is of no interest.
    silence.catch(() => {});
  }
}
