// Draws the progress of a file transfer on standard error if that is a terminal.
import { every, monotonic } from '../../../shared/clock.ts';
import { paddingOf } from '../../../shared/tar/index.ts';
import { clean, size, span } from '../print.ts';

const redrawMs = 100;
const barWidth = 24;

export interface Progress {
  name: string;
  /**
   * Returns the total number of bytes, or an estimate; called only if progress is drawn. Without this function,
   * percentage and remaining time are not drawn.
   */
  total?: () => Promise<number | undefined>;
}

/** Yields the chunks, and meanwhile draws the progress on the terminal. Throws once the signal has fired. */
export async function* withProgress(
  chunks: AsyncIterable<Uint8Array>,
  { name, total }: Progress,
  signal: AbortSignal,
): AsyncGenerator<Uint8Array<ArrayBuffer>> {
  const { stderr } = process;
  const began = monotonic();
  let [done, all]: [number, number | undefined] = [0, undefined];
  const draw = (): void => {
    stderr.write(`\r\x1b[K${line(name, done, all, monotonic() - began)}`);
  };
  let stop = stderr.isTTY ? every(redrawMs, draw) : undefined;
  if (stop && total) {
    const know = (bytes: number | undefined): void => {
      all = bytes;
    };
    total().then(know, () => {});
  }
  const end = (): void => {
    if (!stop) return;
    stop();
    stop = undefined;
    draw();
    stderr.write('\n');
  };
  signal.addEventListener('abort', end);
  try {
    for await (const chunk of chunks) {
      // The signal is checked for each chunk, because fetch reads a request body to its end even after the signal.
      signal.throwIfAborted();
      done += chunk.length;
      // The cast is safe: bytes of files and of fetch are never in shared memory.
      yield chunk as Uint8Array<ArrayBuffer>;
    }
    // At the end the exact size replaces the estimate.
    if (all !== undefined) all = done;
  } finally {
    signal.removeEventListener('abort', end);
    end();
  }
}

/**
 * Estimates the bytes of an entry in a tar archive. The three blocks of 512 bytes are the plain header and a pax header
 * of two blocks, which contains the exact modification time. The content follows, padded to whole blocks.
 */
export const tarBytes = (bytes = 0): number => 3 * 512 + bytes + paddingOf(bytes);

function line(name: string, done: number, total: number | undefined, ms: number): string {
  const rate = ms > 0 ? (1000 * done) / ms : 0;
  const parts = [clean(name).slice(-40), size(done), `${size(rate)}/s`];
  if (total) {
    const share = Math.min(1, done / total);
    const full = Math.round(share * barWidth);
    parts.splice(1, 0, `[${'#'.repeat(full)}${' '.repeat(barWidth - full)}] ${Math.floor(100 * share)} %`);
    if (rate > 0 && done < total) parts.push(`${span(((total - done) / rate) * 1000)} left`);
  }
  return parts.join('  ');
}
