// Sends a command's events to a follower: its start, its output from an offset on, gaps in the output, its
// exit.
import type { ProcessEvent } from '../../proto/types/farhand/agent/v1/ProcessEvent.ts';
import { gaveUp } from '../../shared/agent-rpcs.ts';
import type { OutputLog, OutputReader } from '../../shared/output-log.ts';
import type { Tracked } from './process-registry.ts';

export interface Answer {
  event: ProcessEvent;
}

const streams = ['stdout', 'stderr'] as const;
type Stream = (typeof streams)[number];
export type Offsets = Record<Stream, number>;
type Followed = Tracked & Readonly<Record<Stream, OutputLog>>;

const names = { stdout: 'OUTPUT_STREAM_STDOUT', stderr: 'OUTPUT_STREAM_STDERR' } as const;
const frameBytes = 256 * 1024;

/**
 * Yields the events of the command that `find` returns, until its exit or until `signal` fires. `find` is called when
 * the first event is requested. A slow reader of the events slows the command.
 */
export function follow(
  find: () => Promise<Followed>,
  offsets: Offsets,
  signal: AbortSignal,
): AsyncGenerator<Answer> {
  return leaving(signal, (left) => events(find, offsets, left));
}

/**
 * Yields what the generator `answer` yields. `answer` gets a signal that fires when `signal` fires, and also when the
 * caller stops the iteration.
 */
export async function* leaving<A>(
  signal: AbortSignal,
  answer: (left: AbortSignal) => AsyncGenerator<A>,
): AsyncGenerator<A> {
  const left = new AbortController();
  try {
    yield* answer(AbortSignal.any([signal, left.signal]));
  } finally {
    left.abort(gaveUp);
  }
}

async function* events(
  find: () => Promise<Followed>,
  offsets: Offsets,
  signal: AbortSignal,
): AsyncGenerator<Answer> {
  const followed = await find();
  const readers = {
    stdout: followed.stdout.reader(offsets.stdout),
    stderr: followed.stderr.reader(offsets.stderr),
  };
  const close = (): void => {
    for (const stream of streams) readers[stream].close();
  };
  signal.addEventListener('abort', close, { once: true });
  if (signal.aborted) close();
  await followed.begun(signal);
  if (followed.started && !signal.aborted) yield startedEvent(followed.started);
  while (!signal.aborted) {
    // The exit is read before the output: if it is set already, the output that is read afterwards is complete.
    const { exit } = followed;
    for (const stream of streams) yield* output(followed[stream], readers[stream], stream);
    if (streams.some((stream) => followed[stream].end > readers[stream].position)) continue;
    if (exit && !signal.aborted) {
      yield { event: { exit } };
      return;
    }
    // Nothing is awaited between the checks above and this wait, so no call of wake() is missed.
    if (!followed.exit) await followed.changed.wait(signal);
  }
}

export function startedEvent({ pid, at }: { pid: number; at: number }) {
  return { event: { started: { pid, started_at_ms: at } } };
}

/** Yields the next piece of one output stream. If bytes before that piece were dropped, a gap event comes first. */
async function* output(log: OutputLog, reader: OutputReader, stream: Stream): AsyncGenerator<Answer> {
  const from = reader.position;
  if (log.end <= from) return;
  const { offset, data } = await reader.read(frameBytes);
  if (offset > from) yield { event: { gap: { stream: names[stream], from, to: offset } } };
  if (data.length > 0) yield { event: { output: { stream: names[stream], offset, data } } };
}
