// The stream of events to a follower of a process: started, output from an offset on, gaps, the exit.
import type { ProcessEvent } from '../../proto/types/farhand/agent/v1/ProcessEvent.ts';
import type { OutputLog, OutputReader } from '../../shared/output.ts';
import { gaveUp } from '../../shared/rpc.ts';
import type { Tracked } from './table.ts';

/** A command as its followers see it. */
interface Followed extends Pick<Tracked, 'changed' | 'started' | 'exit' | 'begun'> {
  readonly stdout: OutputLog;
  readonly stderr: OutputLog;
}

export interface Answer {
  event: ProcessEvent;
}

const streams = ['stdout', 'stderr'] as const;
type Stream = (typeof streams)[number];
export type Offsets = Record<Stream, number>;

const names = { stdout: 'OUTPUT_STREAM_STDOUT', stderr: 'OUTPUT_STREAM_STDERR' } as const;
/** Largest output event. */
const frameBytes = 256 * 1024;

/**
 * Follows what `find` gives until its exit or the signal; nothing happens before the first next(). While it is
 * read it holds the process to its pace.
 */
export function follow(
  find: () => Promise<Followed>,
  offsets: Offsets,
  signal: AbortSignal,
): AsyncIterableIterator<Answer, undefined> {
  return leaving(signal, async function* (left) {
    yield* events(await find(), offsets, left);
  });
}

/**
 * What `answer` gives, until it ends or the signal fires. Ending early, also while it waits, costs nothing. The signal that
 * `answer` gets has fired once it is over in any way: also when the next one is never asked for.
 */
export function leaving<A>(
  signal: AbortSignal,
  answer: (left: AbortSignal) => AsyncGenerator<A>,
): AsyncIterableIterator<A, undefined> {
  const own = new AbortController();
  const left = AbortSignal.any([signal, own.signal]);
  const inner = answers(answer(left), own);
  return {
    [Symbol.asyncIterator]() {
      return this;
    },
    next: () => inner.next(),
    return() {
      // A generator alone would not answer before the process speaks again.
      own.abort(gaveUp);
      return inner.return(undefined);
    },
  };
}

async function* answers<A>(answer: AsyncGenerator<A>, own: AbortController): AsyncGenerator<A, undefined> {
  try {
    yield* answer;
  } finally {
    own.abort(gaveUp);
  }
}

async function* events(followed: Followed, offsets: Offsets, signal: AbortSignal): AsyncGenerator<Answer> {
  const readers = {
    stdout: followed.stdout.reader(offsets.stdout),
    stderr: followed.stderr.reader(offsets.stderr),
  };
  const close = (): void => {
    for (const stream of streams) readers[stream].close();
  };
  signal.addEventListener('abort', close, { once: true });
  if (signal.aborted) close();
  yield* started(followed, signal);
  while (!signal.aborted) {
    // Looked at before reading: once it is set, all output is in the logs.
    const { exit } = followed;
    for (const stream of streams) yield* output(followed[stream], readers[stream], stream);
    if (streams.some((stream) => followed[stream].end > readers[stream].position)) continue;
    if (exit && !signal.aborted) {
      yield { event: { exit } };
      return;
    }
    // Both looks and the wait are in one turn, so no wake is missed.
    if (!followed.exit) await followed.changed.wait(signal);
  }
}

async function* started(followed: Followed, signal: AbortSignal): AsyncGenerator<Answer> {
  await followed.begun(signal);
  const { started: begun } = followed;
  if (begun && !signal.aborted) yield { event: { started: { pid: begun.pid, started_at_ms: begun.at } } };
}

/** One piece of a stream, after the gap before it. */
async function* output(log: OutputLog, reader: OutputReader, stream: Stream): AsyncGenerator<Answer> {
  const from = reader.position;
  if (log.end <= from) return;
  const { offset, data } = await reader.read(frameBytes);
  if (offset > from) yield { event: { gap: { stream: names[stream], from, to: offset } } };
  if (data.length > 0) yield { event: { output: { stream: names[stream], offset, data } } };
}
