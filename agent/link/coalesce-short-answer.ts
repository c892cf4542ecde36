// Joins the frames of a short answer. An answer that ends within 25 ms after its first frame is sent as one message,
// without a stream of its own.
import { after } from '../../shared/clock.ts';

/** Milliseconds to wait for the end of an answer after its first frame. Most short commands end within that time. */
const momentMs = 25;
/**
 * Milliseconds to wait for the first frame. If none comes, the answer gets its own stream, because the broker expects
 * an answer or a stream within a time limit.
 */
const silentMs = 1_000;
/** Maximum size in bytes of an answer that is sent as one message. The control stream allows 64 KiB with headers. */
const mostBytes = 60 * 1024;
const mostFrames = 64;

/**
 * Collects the frames of `answer`. Resolves to an array of all frames if the answer ends within the limits above,
 * otherwise to a generator of all frames. Throws if `answer` fails before its first frame. The caller closes `answer`.
 */
export async function coalesce(answer: AsyncGenerator<Buffer>): Promise<Buffer[] | AsyncGenerator<Buffer>> {
  const frames: Buffer[] = [];
  const { promise: over, resolve } = Promise.withResolvers<void>();
  let cancel = after(silentMs, resolve);
  try {
    for (let bytes = 0; bytes <= mostBytes && frames.length < mostFrames; ) {
      const next = answer.next();
      const first = await Promise.race([next, over]).catch((error: unknown) => {
        // A failure after the first frame is not thrown here: rest() yields the frames first, and then throws.
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

/** Yields all frames of an answer. `pending`: the frame that was requested but has not arrived yet. */
async function* rest(
  frames: Buffer[],
  answer: AsyncGenerator<Buffer>,
  pending?: Promise<IteratorResult<Buffer>>,
): AsyncGenerator<Buffer> {
  for (let frame = frames.shift(); frame; frame = frames.shift()) yield frame;
  let next = await pending;
  // Drops the reference to the frame. Otherwise it would stay in memory during the rest of the answer, perhaps hours.
  pending = undefined;
  if (next?.done) return;
  if (next) yield next.value;
  next = undefined;
  yield* answer;
}
