// Server-sent events (WHATWG HTML, section 9.2) as bytes, with a comment in quiet times so that no proxy cuts the line.
import type { SentEvent } from '../../shared/api/index.ts';
import { after } from '../../shared/clock.ts';

const quietMs = 15_000;
const beat = Buffer.from(':\n\n');

/** Events as they come. */
export async function* eventStream(events: AsyncIterable<SentEvent<unknown>>): AsyncGenerator<Uint8Array> {
  const iterator = events[Symbol.asyncIterator]();
  try {
    for (let next = iterator.next(); ; ) {
      const event = await within(quietMs, next);
      if (event === undefined) {
        yield beat;
        continue;
      }
      if (event.done) return;
      yield Buffer.from(textOf(event.value));
      next = iterator.next();
    }
  } finally {
    await iterator.return?.();
  }
}

/** JSON has no line breaks of its own, so the data is one line. */
function textOf({ event, data, id }: SentEvent<unknown>): string {
  return `${id === undefined ? '' : `id: ${id}\n`}event: ${event}\ndata: ${JSON.stringify(data)}\n\n`;
}

/** Undefined when the time is over first (milliseconds; Infinity: never); the work goes on. */
export function within<T>(ms: number, work: Promise<T>): Promise<T | undefined> {
  if (ms === Number.POSITIVE_INFINITY) return work;
  return new Promise((resolve, reject) => {
    const cancel = after(ms, () => resolve(undefined));
    work.then(resolve, reject).finally(cancel);
  });
}
