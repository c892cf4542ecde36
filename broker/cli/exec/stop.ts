// Ctrl-C while a command runs somewhere: the first one cancels it, the next one leaves.
import { onStop } from '../stop.ts';
import { lost, OutputLost } from '../told.ts';
import { paintHint } from './ending.ts';

/** Cancels on a signal, or when nobody reads what is written any more. `code` is then this program's. */
export function cancelOnSignals(cancel: () => Promise<unknown>) {
  let code: number | undefined;
  /** What is over needs no cancelling, and its connection may close before the answer to that comes. */
  let over = false;
  const stop = (as: number): void => {
    if (code !== undefined) process.exit(as);
    code = as;
    cancel().catch((error: unknown) => {
      if (!over) paintHint(`cannot be cancelled: ${error instanceof Error ? error.message : String(error)}`);
    });
  };
  const forget = onStop((as) => {
    if (process.stderr.isTTY && code === undefined) paintHint('cancelling; once more leaves it to itself');
    stop(as);
  });
  const onLost = (): void => {
    if (code === undefined) stop(lost.reason instanceof OutputLost ? lost.reason.exitCode : 1);
  };
  if (lost.aborted) onLost();
  lost.addEventListener('abort', onLost);
  return {
    code: () => code,
    forget() {
      over = true;
      forget();
      lost.removeEventListener('abort', onLost);
    },
  };
}
