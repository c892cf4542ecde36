// Follows a command to its end: every byte of both outputs once, how it ended and what is lost; Ctrl-C meanwhile.
import { StartError } from '../../../shared/errors.ts';
import type { Farhand } from '../../../shared/sdk/index.ts';
import { clean, hint } from '../output.ts';
import { onStop } from '../stop.ts';
import { lost, OutputLost, write } from '../told.ts';
import type { Common } from '../verb.ts';

export interface ExecOptions extends Common {
  tag?: string[];
  interactive?: boolean;
  timeout?: number;
  cwd?: string;
  env?: Record<string, string>;
  user?: string;
  queueFor?: number;
  detach?: boolean;
  concurrency?: number;
  maxFailures?: number;
}

export type Spec = Omit<Parameters<Farhand['commands']['async']>[0], 'machine_id' | 'stdin' | 'input'>;

export type OutputStream = 'stdout' | 'stderr';
type Told = ReturnType<Farhand['commands']['stream']> extends AsyncIterable<{ data: infer D }> ? D : never;
export type End = Extract<Told, { status: unknown }>;

export interface Hearer {
  output(stream: OutputStream, bytes: Uint8Array): Promise<void> | void;
  /** So many bytes went before they could be had. */
  gap(stream: OutputStream, count: number): void;
}

export async function follow(client: Farhand, command_id: string, hearer: Hearer): Promise<End> {
  for await (const { data } of client.commands.stream({ command_id })) {
    if ('status' in data) return data;
    if ('from' in data) hearer.gap(data.stream, data.to - data.from);
    else await hearer.output(data.stream, Buffer.from(data.data, data.encoding));
  }
  throw new StartError(`the output of ${command_id} ended before the command did`, 1);
}

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
