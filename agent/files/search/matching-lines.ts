// Finds the lines of a file that contain a text. Only a few chunks are in memory, however long a line or file
// is.
import type { Contents } from '../confine/open-regular-file.ts';

const chunkBytes = 64 * 1024;
/** A file with a NUL byte in its first 8 KiB counts as binary and is not searched. */
const probeBytes = 8 * 1024;
/**
 * Maximum number of bytes of an unfinished line that stay in memory until the next read. If there are more, they are
 * searched, and then only the last `overlap + lead` bytes stay. The maximum must be larger than `overlap + lead`.
 */
const longestTail = 64 * 1024;
const longestText = 1024;
/** Number of bytes before the hit that are included when a part of a long line is reported. */
const lead = 256;

export interface Line {
  /** Line number, counted from 1. */
  number: number;
  /** The line, or at most a kilobyte around the hit. */
  text: Buffer;
}

/** The offset of the text in `bytes`, or -1. */
type Find = (bytes: Buffer) => number;

export interface Text {
  find: Find;
  /**
   * Maximum number of bytes that a hit can have. A hit may begin in one piece of a long line and end in the next. So at
   * least the last `overlap` bytes of each piece stay in memory.
   */
  overlap: number;
}

/** Prepares the search for a text. `ignoreCase`: upper and lower case count as equal. */
export function compileText(text: string, ignoreCase: boolean): Text {
  const wanted = Buffer.from(text);
  // A letter may have more bytes in its other case. So a hit may have up to 4 bytes for each byte of the text.
  const overlap = 4 * wanted.length;
  if (!ignoreCase) return { find: (bytes) => bytes.indexOf(wanted), overlap };
  const lower = text.toLowerCase();
  const find = (bytes: Buffer): number => {
    const decoded = bytes.toString();
    const at = decoded.toLowerCase().indexOf(lower);
    // A letter may have more or fewer bytes in lower case, so the offset may be slightly wrong. The only effect is on a
    // long line: the reported part of the line starts a little too early or too late.
    return at === -1 ? -1 : Math.min(bytes.length, Buffer.byteLength(decoded.slice(0, at)));
  };
  return { find, overlap };
}

/** Yields the lines that contain the text. Yields undefined after each piece of the file. */
export async function* linesWith(
  { file, stats }: Contents,
  { find, overlap }: Text,
  signal: AbortSignal,
): AsyncGenerator<Line | undefined, void, void> {
  // Bytes that are appended after the file was opened are not read, so that the search of a growing file ends.
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
  /**
   * Number of bytes in use in the buffer. Between two reads, the buffer contains the line whose end has not been read
   * yet. Of a long line it contains only the last bytes.
   */
  held: number;
  number: number;
  /** True if the current line has been reported. */
  reported: boolean;
}

/** Searches the complete lines and moves the rest to the start of the buffer. */
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

/** Searches a long line before its end is read, and leaves only its last bytes in the buffer. */
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
  // The text is copied, because the buffer is used again.
  yield { number: state.number, text: Buffer.from(text.at(-1) === 0x0d ? text.subarray(0, -1) : text) };
}
