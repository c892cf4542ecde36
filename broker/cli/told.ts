// Standard output and standard error: at the pace of who reads them, and what nobody took is no success.
import { once } from 'node:events';
import { fstatSync, writeSync } from 'node:fs';
import { constants } from 'node:os';

export type OutputName = 'stdout' | 'stderr';

/** One of the two is gone: nothing that is written there will be had by anybody. */
export class OutputLost extends Error {
  override readonly name = 'OutputLost';
  readonly exitCode: number;

  constructor(output: OutputName, cause: Error) {
    super(`${output === 'stdout' ? 'standard output' : 'standard error'}: ${cause.message}`, { cause });
    // Who leaves early, such as head, has had enough: that is told as the shell tells it.
    this.exitCode = 'code' in cause && cause.code === 'EPIPE' ? 128 + constants.signals.SIGPIPE : 1;
  }
}

const losing = new AbortController();
/** Fires once with the first loss, an OutputLost, as its reason. */
export const lost: AbortSignal = losing.signal;

function lose(output: OutputName, cause: Error): void {
  if (lost.aborted) return;
  const loss = new OutputLost(output, cause);
  losing.abort(loss);
  if (loss.exitCode === 1 && output === 'stdout') process.stderr.write(`farhand: ${loss.message}\n`);
}

/** From now on a loss ends nothing by itself, but no run that had one ends with 0. */
export function watchOutputs(): void {
  for (const name of ['stdout', 'stderr'] as const)
    process[name].on('error', (error: Error) => lose(name, error));
  process.on('exit', () => {
    if (lost.reason instanceof OutputLost) process.exitCode ||= lost.reason.exitCode;
  });
}

const draining: Partial<Record<OutputName, Promise<unknown>>> = {};

/** Resolves when more may be written; rejects with an OutputLost. */
export async function write(name: OutputName, bytes: Uint8Array | string): Promise<void> {
  put(name, bytes);
  lost.throwIfAborted();
  const out = process[name];
  if (!out.writableNeedDrain) return;
  // One for all who wait.
  draining[name] ??= once(out, 'drain', { signal: lost }).finally(() => delete draining[name]);
  await draining[name].catch((error: unknown) => {
    lost.throwIfAborted();
    throw error;
  });
}

/** The same without waiting, for what is short. */
export function put(name: OutputName, bytes: Uint8Array | string): void {
  if (lost.aborted) return;
  if (isPlain(name)) putWhole(name, Buffer.from(bytes));
  else process[name].write(bytes);
}

const plain: Partial<Record<OutputName, boolean>> = {};

function isPlain(name: OutputName): boolean {
  plain[name] ??= fstatSync(process[name].fd).isFile();
  return plain[name];
}

/** Node's own stream for files takes half of a piece, on a disk that fills, for all of it. */
function putWhole(name: OutputName, bytes: Buffer): void {
  try {
    for (let at = 0; at < bytes.length; ) at += writeSync(process[name].fd, bytes, at);
  } catch (error) {
    lose(name, error instanceof Error ? error : new Error(String(error)));
  }
}
