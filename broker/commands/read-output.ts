// Reads a command's output, during the run or later: plain bytes of one stream, or events of both streams.
import type { Api, BytesReply, Input, Reply } from '../../shared/api/route-table.ts';
import { AppError } from '../../shared/errors.ts';
import type { OutputLog, OutputReader } from '../../shared/output-log.ts';
import { ownedElsewhere } from '../history/group-commit.ts';
import type { Scheduler } from './command-dispatcher.ts';
import type { Command } from './command-record.ts';
import { serializeEnd } from './command-to-json.ts';
import type { CommandContext } from './shared-by-open-commands.ts';
import { type Output, type Stream, streams } from './stored-output.ts';

/** The output of one command, and its record once the command has ended. */
export interface Source {
  readonly output: Output;
  /** The command's final record, once it is stored and `output` is complete; undefined until then. */
  readonly ended: Command | undefined;
  /**
   * Set if another broker has the output files: the offset of the first byte of each stream in these files. `output`
   * then has only the end of each stream, which is in the database.
   */
  readonly away?: Record<Stream, number> | undefined;
}

/** A piece of output, or a gap: bytes that the broker no longer has. */
type Piece = { stream: Stream; offset: number; data: Buffer } | { stream: Stream; from: number; to: number };
export type Part = Piece | { end: ReturnType<typeof serializeEnd> };

type SentEvent = Reply<Api['commands']['stream']> extends AsyncIterable<infer T> ? T : never;

const readBytes = 256 * 1024;
/**
 * Maximum number of bytes in one event. It is smaller than readBytes, because the text of an event is in memory
 * several times.
 */
const eventBytes = 64 * 1024;

/**
 * Reads one stream to its present end; with `follow`, to the command's end. Throws range_not_satisfiable for bytes that
 * were deleted or are beyond the end, and unavailable for bytes that only another broker has.
 */
export function bytesReply(
  source: Source,
  { stream, follow = false, offset, command_id }: Input<Api['commands']['output']>,
  signal: AbortSignal,
): { reply: BytesReply; from: number } {
  const { start, end } = source.output[stream];
  const from = offset ?? source.away?.[stream] ?? start;
  assertNotAway(source, stream, from);
  // With `follow`, the offset may be beyond the present end, because more bytes may still be written.
  if (from < start || (from > end && (!follow || source.ended))) throw outOfRange(stream, start, end);
  const to = follow ? Number.POSITIVE_INFINITY : end;
  return {
    from,
    reply: {
      filename: `${command_id}.${stream}`,
      ...(follow ? { quiet: true } : { length: to - from }),
      bytes: bytesBetween(source, stream, from, to, signal),
    },
  };
}

async function* bytesBetween(
  source: Source,
  stream: Stream,
  from: number,
  to: number,
  signal: AbortSignal,
): AsyncGenerator<Uint8Array> {
  if (from === to) return;
  for await (const part of parts(source, { [stream]: from }, signal, { most: readBytes, whole: false })) {
    if ('end' in part) return;
    if ('from' in part) {
      const { from, to } = part;
      const message = `bytes ${from} to ${to} of the output were deleted before they could be sent; read on from byte ${to}`;
      throw new AppError('range_not_satisfiable', message, { from, to });
    }
    yield part.data.subarray(0, to - part.offset);
    if (endOf(part) >= to) return;
  }
}

/**
 * Finds the output of a command. Throws unavailable for a command that has not ended and is not open at this broker:
 * its machine is moving from one broker to another.
 */
export async function sourceOf(
  { scheduler, store, outputs, cluster }: CommandContext & { scheduler: Scheduler },
  id: string,
): Promise<Source> {
  const open = scheduler.get(id);
  if (open) return open;
  const ended = await store.get(id);
  if (ended.finished_at === null) throw ownedElsewhere();
  const { kept_bytes, output_directory, stdout_start: stdout, stderr_start: stderr } = ended;
  const here = !cluster || output_directory === null || output_directory === cluster.directoryId;
  if (here || kept_bytes === 0) return { output: await outputs.ofEnded(ended), ended };
  const output = await outputs.ofEnded({ ...ended, kept_bytes: 0 });
  return { output, ended, away: { stdout, stderr } };
}

/** Throws unavailable if the byte at this offset is only in a file of another broker. */
function assertNotAway({ output, away }: Source, stream: Stream, from: number): void {
  const { start } = output[stream];
  if (!away || from < away[stream] || from >= start) return;
  throw new AppError(
    'unavailable',
    `the bytes of ${stream} before byte ${start} are in files of another broker, which does not run: start that broker, or read on from byte ${start}`,
    { stream, start, retry_after: 1 },
  );
}

export function eventOf(part: Part) {
  if ('end' in part) return { event: 'exit', data: part.end };
  if ('to' in part) return { event: 'gap', data: part };
  return { event: 'output', data: { ...part, ...textOrBase64(part.data) } };
}

/**
 * Converts parts to events. The id of an event has the offsets up to which both streams were sent, e.g.
 * `120.0`.
 */
export async function* eventsOf(
  parts: AsyncIterable<Part>,
  from: Record<Stream, number>,
): AsyncGenerator<SentEvent> {
  const sent = { ...from };
  for await (const part of parts) {
    if ('stream' in part) sent[part.stream] = endOf(part);
    const id = `${sent.stdout}.${sent.stderr}`;
    yield { ...eventOf(part), id };
  }
}

/** Returns the offset of the byte after a piece. */
function endOf(piece: Piece): number {
  return 'to' in piece ? piece.to : piece.offset + piece.data.length;
}

function textOrBase64(bytes: Buffer) {
  const text = bytes.toString('utf8');
  const isText = Buffer.byteLength(text) === bytes.length && !text.includes('\ufffd');
  return isText
    ? { data: text, encoding: 'utf-8' as const }
    : { data: bytes.toString('base64'), encoding: 'base64' as const };
}

function outOfRange(stream: Stream, start: number, end: number): AppError {
  const message = `the requested offset is outside the stored output: ${stream} has the bytes from ${start} to ${end}`;
  return new AppError('range_not_satisfiable', message, { start, end });
}

/**
 * Yields both streams in pieces of at most `most` bytes, then the command's end. With `whole`, no piece splits a
 * character. Throws range_not_satisfiable for an offset beyond the final end, and unavailable for bytes that only
 * another broker has.
 */
export function partsFrom(
  source: Source,
  from: Record<Stream, number>,
  signal: AbortSignal,
  whole = false,
  most = eventBytes,
): AsyncGenerator<Part> {
  for (const stream of streams) {
    const { start, end } = source.output[stream];
    if (source.ended && from[stream] > end) throw outOfRange(stream, start, end);
    assertNotAway(source, stream, Math.max(from[stream], source.away?.[stream] ?? 0));
  }
  return parts(source, from, signal, { most, whole });
}

async function* parts(
  source: Source,
  from: Partial<Record<Stream, number>>,
  signal: AbortSignal,
  reading: Reading,
): AsyncGenerator<Part> {
  const { output } = source;
  const readers = streams.flatMap((stream) => {
    const start = from[stream];
    return start === undefined ? [] : [new StreamReader(output[stream], stream, start, reading)];
  });
  try {
    for (;;) {
      const { ended } = source;
      let quiet = true;
      for (const reader of readers) {
        for (const piece of await reader.read(ended !== undefined)) {
          quiet = false;
          yield piece;
        }
      }
      if (!quiet) continue;
      if (ended) {
        yield { end: serializeEnd(ended) };
        return;
      }
      signal.throwIfAborted();
      if (output.stopped)
        throw new AppError(
          'unavailable',
          'this broker is stopping, or another broker is now responsible for the machine: read on from the last offset',
        );
      if (!readers.some(({ behind }) => behind) && !source.ended) await output.changed.wait(signal);
    }
  } finally {
    for (const reader of readers) reader.close();
  }
}

interface Reading {
  /** Maximum number of bytes in a piece. */
  most: number;
  /** True if pieces are cut only between characters. */
  whole: boolean;
}

class StreamReader {
  readonly #log: OutputLog;
  readonly #stream: Stream;
  readonly #reading: Reading;
  readonly #reader: OutputReader;
  /** First bytes of a character whose other bytes have not arrived yet. */
  #begun: Buffer = Buffer.alloc(0);

  constructor(log: OutputLog, stream: Stream, from: number, reading: Reading) {
    this.#log = log;
    this.#stream = stream;
    this.#reading = reading;
    this.#reader = log.reader(from);
  }

  /** Reads the next pieces. `last` means that no more output will come. */
  async read(last: boolean): Promise<Piece[]> {
    const stream = this.#stream;
    const at = this.#reader.position;
    const { offset, data } = await this.#reader.read(this.#reading.most);
    const pieces: Piece[] = [];
    if (offset > at) {
      if (this.#begun.length > 0) pieces.push({ stream, offset: at - this.#begun.length, data: this.#begun });
      this.#begun = Buffer.alloc(0);
      pieces.push({ stream, from: at, to: offset });
    }
    const bytes = this.#begun.length === 0 ? data : Buffer.concat([this.#begun, data]);
    const over = last && !this.behind;
    this.#begun = !this.#reading.whole || over ? Buffer.alloc(0) : unfinished(bytes);
    const sent = bytes.subarray(0, bytes.length - this.#begun.length);
    if (sent.length > 0) pieces.push({ stream, offset: offset + data.length - bytes.length, data: sent });
    return pieces;
  }

  get behind(): boolean {
    return this.#log.end > this.#reader.position;
  }

  close(): void {
    this.#reader.close();
  }
}

/** Returns the incomplete UTF-8 character at the end of these bytes, if there is one (RFC 3629 section 3). */
function unfinished(bytes: Buffer): Buffer {
  for (let back = 1; back <= Math.min(3, bytes.length); back += 1) {
    const byte = bytes[bytes.length - back] ?? 0;
    if ((byte & 0xc0) === 0x80) continue;
    const length = byte >= 0xf5 ? 1 : byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc2 ? 2 : 1;
    return length > back ? Buffer.from(bytes.subarray(bytes.length - back)) : Buffer.alloc(0);
  }
  return Buffer.alloc(0);
}
