// How far a transfer is, for a person who watches.
import { every, monotonic } from '../../../shared/clock.ts';
import { clean, size, span } from '../output.ts';

const redrawMs = 200;
const barWidth = 24;

/** Passes chunks on and draws how many there were; nothing where standard error is no terminal. */
export async function* shownProgress(
  chunks: AsyncIterable<Uint8Array>,
  name: string,
  total?: number,
): AsyncGenerator<Uint8Array<ArrayBuffer>> {
  const { stderr } = process;
  const began = monotonic();
  let done = 0;
  const draw = (): void => {
    stderr.write(`\r\x1b[K${line(name, done, total, monotonic() - began)}`);
  };
  const stop = stderr.isTTY ? every(redrawMs, draw) : undefined;
  try {
    for await (const chunk of chunks) {
      done += chunk.length;
      // Bytes of files and of fetch never lie in shared memory.
      yield chunk as Uint8Array<ArrayBuffer>;
    }
  } finally {
    stop?.();
    if (stop) {
      draw();
      stderr.write('\n');
    }
  }
}

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
