// Ctrl-C while a command runs somewhere: the first one cancels it, the next one leaves.
import { constants } from 'node:os';
import { paintHint } from './told.ts';

const names = ['SIGINT', 'SIGTERM', 'SIGHUP'] as const;

/** Cancels on a signal, or when nobody reads what is written any more. `code` is then this program's. */
export function cancelOnSignals(cancel: () => Promise<unknown>) {
  let code: number | undefined;
  const stop = (as: number): void => {
    if (code !== undefined) process.exit(as);
    code = as;
    cancel().catch((error: unknown) => {
      paintHint(`cannot be cancelled: ${error instanceof Error ? error.message : String(error)}`);
    });
  };
  const onSignal = (name: NodeJS.Signals): void => {
    if (process.stderr.isTTY && code === undefined) paintHint('cancelling; once more leaves it to itself');
    stop(128 + constants.signals[name]);
  };
  const onClosed = (): void => {
    if (code === undefined) stop(128 + constants.signals.SIGPIPE);
  };
  for (const name of names) process.on(name, onSignal);
  process.stdout.on('error', onClosed);
  return {
    code: () => code,
    forget() {
      for (const name of names) process.off(name, onSignal);
      process.stdout.off('error', onClosed);
    },
  };
}
