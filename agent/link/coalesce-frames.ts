// Coalesces the frames of a short answer: one that ends within a moment goes out in one message, without a
// stream.
import { after } from '../../shared/clock.ts';

/**
 * From the first frame on: a command of a busy machine ends in that, and a watch's first words wait no
 * longer.
 */
const momentMs = 25;
/** From the start on: the broker waits for a sign, however long there is nothing to say. */
const silentMs = 1_000;
/** With the heads of its messages it stays below the limit of the control stream. */
const mostBytes = 60 * 1024;
const mostFrames = 64;

/**
 * All frames of an answer that ends within the moment and is small; else the whole of it, as it comes. Throws
 * what the answer throws before its first frame. The caller closes `answer`.
 */
export async function coalesce(answer: AsyncGenerator<Buffer>): Promise<Buffer[] | AsyncGenerator<Buffer>> {
  const frames: Buffer[] = [];
  const { promise: over, resolve } = Promise.withResolvers<void>();
  let cancel = after(silentMs, resolve);
  try {
    for (let bytes = 0; bytes <= mostBytes && frames.length < mostFrames; ) {
      const next = answer.next();
      const first = await Promise.race([next, over]).catch((error: unknown) => {
        // After the first frame a failure is part of the answer, and is not thrown here.
        if (frames.length === 0) throw error;
      });
      if (!first) return rest(frames, answer, next);
      if (first.done) return frames;
      if (frames.length === 0) {
        cancel();
        cancel = after(momentMs, resolve);
      }
      frames.push(first.value);
      bytes += first.value.length;
    }
    return rest(frames, answer);
  } finally {
    cancel();
  }
}

/** Yields the frames of an answer. `pending`: a frame that was requested and has not arrived yet. */
async function* rest(
  frames: Buffer[],
  answer: AsyncGenerator<Buffer>,
  pending?: Promise<IteratorResult<Buffer>>,
): AsyncGenerator<Buffer> {
  yield* frames;
  const next = await pending;
  if (next?.done) return;
  if (next) yield next.value;
  yield* answer;
}
