// What is told of a command besides its output: how it ended, and what is lost.
import { clean, hint } from '../output.ts';
import { OutputLost, write } from '../told.ts';
import type { End, OutputStream } from './follow.ts';

/** The exit code of this program for the end of a command. */
export function exitCodeOf({ status, exit_code }: Pick<End, 'status' | 'exit_code'>): number {
  if (status === 'timeout') return 124;
  if (status === 'lost' || status === 'expired') return 1;
  return exit_code ?? 1;
}

/** In words, where its exit code alone does not tell. */
export function explain({ status, exit_code, signal, reason }: Omit<End, 'duration'>): string | undefined {
  const why = reason ? `: ${clean(reason)}` : '';
  if (status === 'completed') return;
  if (status !== 'failed') return `${status}${why}`;
  if (exit_code === null) return `it could not be started${why}`;
  return signal ? `killed by ${clean(signal)}` : undefined;
}

export function paintHint(text: string): void {
  hint(`farhand: ${text}`);
}

/** Where nobody takes it any more the command is being cancelled (stop.ts): only its end is waited for. */
export async function tellOutput(stream: OutputStream, bytes: Uint8Array | string): Promise<void> {
  await write(stream, bytes).catch((error: unknown) => {
    if (!(error instanceof OutputLost)) throw error;
  });
}

export function tellGap(stream: OutputStream, count: number): void {
  paintHint(`${count} bytes of ${stream} were dropped: it was written faster than it was read`);
}
