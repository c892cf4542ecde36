// Writes standard output and standard error, and handles signals. A failed write makes the exit code nonzero.
import { once } from 'node:events';
import { fstatSync, writeSync } from 'node:fs';
import { constants } from 'node:os';
import { after } from '../../shared/clock.ts';

export type OutputName = 'stdout' | 'stderr';

/** Thrown to end the program with an exit code. `message` is printed unless it is empty. */
export class Exit extends Error {
  override readonly name = 'Exit';
  readonly exitCode: number;

  constructor(exitCode: number, message = '', options?: ErrorOptions) {
    super(message, options);
    this.exitCode = exitCode;
  }
}

/** Thrown when the program stops on a signal. */
export class Interrupted extends Exit {
  constructor(exitCode: number, rest = 'no partial files are left') {
    super(exitCode, `interrupted; ${rest}`);
  }
}

/**
 * Calls `leave` with an exit code on SIGINT, SIGTERM or SIGHUP. Returns a function that removes these signal handlers.
 */
export function onStop(leave: (code: number) => void): () => void {
  const names = ['SIGINT', 'SIGTERM', 'SIGHUP'] as const;
  const listener = (name: NodeJS.Signals): void => leave(128 + constants.signals[name]);
  for (const name of names) process.on(name, listener);
  return () => {
    for (const name of names) process.off(name, listener);
  };
}

/**
 * Milliseconds after the cleanup on a signal, within which the program must end. Without this limit, a pipe without a
 * reader or writer could keep it from ending.
 */
const mostEndMs = 3_000;

/** Kills the program by the signal of the exit code `code` if it does not end soon. onStop() must be over. */
export function endSoon(code: number): void {
  // process.exit() would wait for the pipe.
  after(mostEndMs, () => process.kill(process.pid, code - 128));
}

/** Waits for `work`, but at most until the signal fires, and then rejects with its reason. `work` may go on. */
export function orAborted<T>(signal: AbortSignal, work: Promise<T>): Promise<T> {
  const { promise, reject } = Promise.withResolvers<never>();
  const leave = (): void => reject(signal.reason);
  if (signal.aborted) leave();
  signal.addEventListener('abort', leave);
  return Promise.race([work, promise]).finally(() => signal.removeEventListener('abort', leave));
}

const losing = new AbortController();
/** Fires on the first failed write, with an Exit as its reason. */
export const lost: AbortSignal = losing.signal;

function lose(output: OutputName, cause: Error): void {
  if (lost.aborted) return;
  // If the reader closes the pipe early, as head does, the exit code is 141, the code of SIGPIPE in shells.
  const isPipe = 'code' in cause && cause.code === 'EPIPE';
  losing.abort(new Exit(isPipe ? 128 + constants.signals.SIGPIPE : 1, '', { cause }));
  if (!isPipe && output === 'stdout') process.stderr.write(`farhand: standard output: ${cause.message}\n`);
}

/** Makes a failed write set a nonzero exit code instead of ending the program. */
export function watchOutputs(): void {
  for (const name of ['stdout', 'stderr'] as const)
    process[name].on('error', (error: Error) => lose(name, error));
  process.on('exit', () => {
    if (lost.reason instanceof Exit) process.exitCode ||= lost.reason.exitCode;
  });
}

const draining: Partial<Record<OutputName, Promise<unknown>>> = {};

/** Writes bytes. Resolves when more may be written. Rejects with an Exit after a failed write. */
export async function write(name: OutputName, bytes: Uint8Array | string): Promise<void> {
  writeNow(name, bytes);
  lost.throwIfAborted();
  const out = process[name];
  if (!out.writableNeedDrain) return;
  // All waiting writes share one drain listener.
  draining[name] ??= once(out, 'drain', { signal: lost }).finally(() => delete draining[name]);
  await draining[name].catch((error: unknown) => {
    lost.throwIfAborted();
    throw error;
  });
}

/** Writes all bytes of a body to standard output. */
export async function copyOut(body: AsyncIterable<Uint8Array> | null): Promise<void> {
  if (body) for await (const chunk of body) await write('stdout', chunk);
}

/**
 * Waits until all earlier writes to standard output have ended. If a write has failed, prints `text` to standard error
 * and returns false.
 */
export async function checkPrinted(text: string): Promise<boolean> {
  await new Promise<void>((resolve) => process.stdout.write('', () => resolve()));
  if (lost.aborted) process.stderr.write(`farhand: ${text}\n`);
  return !lost.aborted;
}

const isFile: Partial<Record<OutputName, boolean>> = {};

/** Writes short output without waiting. */
export function writeNow(name: OutputName, bytes: Uint8Array | string): void {
  if (lost.aborted) return;
  const { fd } = process[name];
  isFile[name] ??= fstatSync(fd).isFile();
  if (!isFile[name]) return void process[name].write(bytes);
  // A full disk may store only a part of the bytes, and Node's stream does not report this. Files are therefore written
  // by writeSync().
  const buffer = Buffer.from(bytes);
  try {
    for (let at = 0; at < buffer.length; ) at += writeSync(fd, buffer, at);
  } catch (error) {
    lose(name, error instanceof Error ? error : new Error(String(error)));
  }
}
