// The first moment of an answer, held back: what is whole by then goes out in one message, without a stream of its own.
import { after } from '../../shared/clock.ts';

/** From the first frame on, so that the first words of what lasts (a watch, a command) wait no longer. */
const momentMs = 10;
/** Where so many are held back at once each takes longer, and streams for all of them would take longer still. */
const crowd = 8;
const crowdedMs = 50;
/** From the start on: the broker waits for a sign, however long there is nothing to say. */
const patienceMs = 1_000;
/** With the heads of its messages it stays below what may be on the control stream. */
const mostBytes = 60 * 1024;
const mostFrames = 64;

let held = 0;

/**
 * All frames of an answer that ends within the moment and is small; else the whole of it, as it comes. Throws what the
 * answer throws before its first frame.
 */
export async function gather(answer: AsyncGenerator<Buffer>): Promise<Buffer[] | AsyncGenerator<Buffer>> {
  const frames: Buffer[] = [];
  held += 1;
  const patience = begin(patienceMs);
  let moment = patience;
  try {
    for (let bytes = 0; bytes <= mostBytes && frames.length < mostFrames; ) {
      const next = answer.next();
      const first = await Promise.race([next, moment.over]).catch((error: unknown) => {
        // After a frame the failure is part of what comes.
        if (frames.length === 0) throw error;
      });
      if (!first) return resumed(frames, answer, next);
      if (first.done) return frames;
      if (frames.length === 0) moment = begin(held > crowd ? crowdedMs : momentMs);
      frames.push(first.value);
      bytes += first.value.length;
    }
    return resumed(frames, answer);
  } finally {
    held -= 1;
    patience.cancel();
    moment.cancel();
  }
}

function begin(ms: number): { over: Promise<void>; cancel(): void } {
  const { promise: over, resolve } = Promise.withResolvers<void>();
  return { over, cancel: after(ms, resolve) };
}

/** `pending` is a frame that was asked for and has not come yet. */
async function* resumed(
  frames: Buffer[],
  answer: AsyncGenerator<Buffer>,
  pending?: Promise<IteratorResult<Buffer>>,
): AsyncGenerator<Buffer> {
  try {
    yield* frames;
    const next = await pending;
    if (next?.done) return;
    if (next) yield next.value;
    yield* answer;
  } finally {
    await answer.return(undefined);
  }
}
