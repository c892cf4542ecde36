// The first moment of an answer, held back: what is whole by then goes out in one message, without a stream of its own.
import { after } from '../../shared/clock.ts';

/** From the start on, so that the first words of what lasts (a watch, a command, a slow listing) wait no longer. */
const momentMs = 5;
/** With the heads of its messages it stays below what may be on the control stream. */
const mostBytes = 60 * 1024;
const mostFrames = 64;

/**
 * All frames of an answer that ends within the moment and is small; else the whole of it, as it comes. Throws what the
 * answer throws before its first frame.
 */
export async function gather(answer: AsyncGenerator<Buffer>): Promise<Buffer[] | AsyncGenerator<Buffer>> {
  const frames: Buffer[] = [];
  const moment = begin();
  try {
    for (let bytes = 0; bytes <= mostBytes && frames.length < mostFrames; ) {
      const next = answer.next();
      const first = await Promise.race([next, moment.over]).catch((error: unknown) => {
        // After a frame the failure is part of what comes.
        if (frames.length === 0) throw error;
      });
      if (!first) return resumed(frames, answer, next);
      if (first.done) return frames;
      frames.push(first.value);
      bytes += first.value.length;
    }
    return resumed(frames, answer);
  } finally {
    moment.cancel();
  }
}

function begin(): { over: Promise<void>; cancel(): void } {
  const { promise: over, resolve } = Promise.withResolvers<void>();
  return { over, cancel: after(momentMs, resolve) };
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
