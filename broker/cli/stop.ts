// Signals that ask this program to leave: one list for all who clear away before they do.
import { constants } from 'node:os';

const names = ['SIGINT', 'SIGTERM', 'SIGHUP'] as const;

/** Calls `leave` with the exit code that each makes, until the result is called. */
export function onStop(leave: (code: number) => void): () => void {
  const heard = (name: NodeJS.Signals): void => leave(128 + constants.signals[name]);
  for (const name of names) process.on(name, heard);
  return () => {
    for (const name of names) process.off(name, heard);
  };
}

/** What was under way was given up on a signal. */
export class Interrupted extends Error {
  override readonly name = 'Interrupted';
  readonly exitCode: number;

  constructor(exitCode: number, rest = 'nothing half is left') {
    super(`interrupted; ${rest}`);
    this.exitCode = exitCode;
  }
}
