// Finds the lines of a file that hold a text. However long a line or the file is, a few chunks of it are in memory.
import type { Contents } from '../confine/contents.ts';

const chunkBytes = 64 * 1024;
/** A file with a NUL in its first bytes is no text. */
const probeBytes = 8 * 1024;
/** Bytes of an unfinished line held in memory: enough for a hit across its chunks, and the text around it. */
const longestTail = 64 * 1024;
const longestText = 1024;
/** Of the line, ahead of the hit. */
const lead = 256;

/** A line that holds the text. */
export interface Line {
  /** From 1. */
  number: number;
  /** The line, or at most a kilobyte around the hit. */
  text: Buffer;
}

/** Where the text stands in some bytes; -1: nowhere. */
type Find = (bytes: Buffer) => number;

export interface Text {
  find: Find;
  /** Bytes that a hit may have in two pieces of a line. */
  overlap: number;
}

/** Matches bytes exactly, or ignoring case. */
export function compileText(text: string, ignoreCase: boolean): Text {
  const wanted = Buffer.from(text);
  // A letter may be longer in its other form.
  const overlap = 4 * wanted.length;
  if (!ignoreCase) return { find: (bytes) => bytes.indexOf(wanted), overlap };
  const lower = text.toLowerCase();
  const find = (bytes: Buffer): number => {
    const decoded = bytes.toString();
    const at = decoded.toLowerCase().indexOf(lower);
    // Exact unless a letter before it changes its length; it only decides which part of a long line is reported.
    return at === -1 ? -1 : Math.min(bytes.length, Buffer.byteLength(decoded.slice(0, at)));
  };
  return { find, overlap };
}

/**
 * Reads as much as the file had when it was opened: one that grows meanwhile has an end all the same. Undefined comes
 * after each piece of it.
 */
export async function* linesWith(
  { file, stats }: Contents,
  { find, overlap }: Text,
  signal: AbortSignal,
): AsyncGenerator<Line | undefined, void, void> {
  const size = Number(stats.size);
  const buffer = Buffer.allocUnsafeSlow(longestTail + chunkBytes);
  const state: State = { buffer, held: 0, number: 1, reported: false };
  for (let position = 0; position < size; ) {
    signal.throwIfAborted();
    const wanted = Math.min(chunkBytes, size - position);
    const { bytesRead } = await file.handle.read(buffer, state.held, wanted, position);
    if (bytesRead === 0) break;
    if (position === 0 && buffer.subarray(0, Math.min(bytesRead, probeBytes)).includes(0)) return;
    position += bytesRead;
    state.held += bytesRead;
    yield* complete(state, find);
    yield* shorten(state, find, overlap);
    yield undefined;
  }
  if (state.held > 0) yield* hitIn(state, buffer.subarray(0, state.held), find);
}

interface State {
  buffer: Buffer;
  /** Bytes of the buffer in use: the start of a line, or the end of a long one. */
  held: number;
  number: number;
  /** The current line has been reported. */
  reported: boolean;
}

/** The lines that have ended; the rest is moved to the start of the buffer. */
function* complete(state: State, find: Find): Generator<Line> {
  const { buffer, held } = state;
  const end = buffer.subarray(0, held).lastIndexOf(0x0a) + 1;
  if (end === 0) return;
  const any = find(buffer.subarray(0, end)) !== -1;
  for (let start = 0; start < end; ) {
    const stop = buffer.indexOf(0x0a, start);
    if (any) yield* hitIn(state, buffer.subarray(start, stop), find);
    state.number += 1;
    state.reported = false;
    start = stop + 1;
  }
  buffer.copyWithin(0, end, held);
  state.held = held - end;
}

/** Looks into a long line before its end, and holds only its last bytes. */
function* shorten(state: State, find: Find, overlap: number): Generator<Line> {
  const { buffer, held } = state;
  if (held <= longestTail) return;
  yield* hitIn(state, buffer.subarray(0, held), find);
  const rest = Math.min(held, overlap + lead);
  buffer.copyWithin(0, held - rest, held);
  state.held = rest;
}

function* hitIn(state: State, line: Buffer, find: Find): Generator<Line> {
  const at = state.reported ? -1 : find(line);
  if (at === -1) return;
  state.reported = true;
  const start = line.length <= longestText ? 0 : Math.max(0, Math.min(at - lead, line.length - longestText));
  const text = line.subarray(start, start + longestText);
  // A copy: the buffer is used again.
  yield { number: state.number, text: Buffer.from(text.at(-1) === 0x0d ? text.subarray(0, -1) : text) };
}
