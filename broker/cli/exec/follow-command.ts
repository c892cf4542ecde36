// Follows a command to its end: reports its output, gaps in the output, and its exit. Cancels the command on Ctrl-C.
import { after } from '../../../shared/clock.ts';
import { StartError } from '../../../shared/errors.ts';
import { type Farhand, FarhandError } from '../../../shared/sdk/index.ts';
import type { Options } from '../declare-verb.ts';
import { clean, cleanJson, hint } from '../print.ts';
import { Exit, lost, type OutputName, onStop, write } from '../stdout-stderr-and-exit.ts';
import type { ConnectionReporter } from './report-silence.ts';

export const flags = {
  '--tags <list>': 'run on every machine with all of these tags',
  '-i, --interactive':
    'send standard input to the command; without this flag it is sent only from a pipe or file, and only to a single machine',
  '--timeout <duration>': 'kill the command and its child processes after this time',
  '--cwd <dir>': 'working directory on the machine',
  '--env <name=value>': 'environment variable; repeat the flag for several',
  '--user <name>': 'user to run as, if the agent allows it',
  '--queue-for <duration>': 'wait up to this long for a machine that is offline or busy',
  '--detach': 'print the id of the command, and do not wait for its end',
  '--concurrency <count>': 'run on at most COUNT machines at once',
  '--max-failures <number>':
    'after more than NUMBER failures, do not start on the remaining machines (default: no limit)',
} as const;
export type ExecOptions = Options<typeof flags>;
export type Params = Omit<Parameters<Farhand['commands']['async']>[0], 'machine_id' | 'stdin' | 'input'>;

type Followed =
  ReturnType<Farhand['commands']['stream']> extends AsyncIterable<{ data: infer D }> ? D : never;
export type End = Extract<Followed, { status: unknown }>;

export interface Listener {
  output(stream: OutputName, bytes: Uint8Array): Promise<void> | void;
  /** Called when `count` bytes of output were dropped before they could be read. */
  gap(stream: OutputName, count: number): Promise<void> | void;
  /** Called for each event of the command. */
  heard?(): void;
}

export async function follow(
  client: Farhand,
  command_id: string,
  listener: Listener,
  connection: ConnectionReporter,
): Promise<End> {
  const onConnection = (isOpen: boolean): void => connection.changed(command_id, isOpen);
  try {
    for await (const { data } of client.commands.stream({ command_id }, { onConnection })) {
      if ('status' in data) return data;
      listener.heard?.();
      if ('from' in data) await listener.gap(data.stream, data.to - data.from);
      else await listener.output(data.stream, Buffer.from(data.data, data.encoding));
    }
  } finally {
    connection.forget(command_id);
  }
  throw new StartError(
    `the connection ended before command ${command_id} did; see farhand commands get ${command_id}`,
    1,
  );
}

/**
 * Returns an error handler for follow(). For a FarhandError, the handler throws a StartError which says that `what` was
 * sent but cannot be followed, so that the user does not send it again. Other errors are thrown unchanged.
 */
export const wasSent =
  (what: string, next: string) =>
  (error: unknown): never => {
    if (!(error instanceof FarhandError)) throw error;
    const { code, message, details } = error;
    const { required_scope: scope } = details;
    const why =
      typeof scope === 'string'
        ? `reading its output needs the scope ${scope}, which this key lacks`
        : message;
    throw new StartError(`${what} was sent, but cannot be followed: ${why} (${code}); ${next}`, 1, {
      cause: error,
    });
  };

export function exitCodeOf({ status, exit_code }: Pick<End, 'status' | 'exit_code'>): number {
  if (status === 'timeout') return 124;
  if (status === 'lost' || status === 'expired') return 1;
  return exit_code ?? 1;
}

/** Words for the reasons why a command never ran. */
const reasons = new Map([
  [
    'queue_expired',
    'the machine was offline or busy for too long (queue_expired); --queue-for sets how long the command waits',
  ],
  ['machine_offline', 'the machine is offline (machine_offline); --queue-for waits for it'],
  ['max_failures', 'there were more failures than --max-failures allows (max_failures)'],
  ['machine_removed', 'the machine was removed (machine_removed)'],
]);

/** Explains in words how a command ended. Returns undefined if the exit code is explanation enough. */
export function explain({ status, exit_code, signal, reason }: Omit<End, 'duration'>): string | undefined {
  const why = reason ? `: ${reasons.get(reason) ?? clean(reason)}` : '';
  if (status === 'completed') return;
  if (status !== 'failed') return `${status}${why}`;
  if (exit_code === null) return `the command could not be started${why}`;
  return signal ? `the command was killed by ${clean(signal)}` : undefined;
}

/**
 * Writes output of a command. A failed write is ignored here: it makes cancelOnSignals() cancel the command, whose
 * output is then no longer needed.
 */
export async function writeOutput(stream: OutputName, bytes: Uint8Array | string): Promise<void> {
  await write(stream, bytes).catch((error: unknown) => {
    if (!(error instanceof Exit)) throw error;
  });
}

/** Prints output as the command wrote it. */
export const plain: Listener = {
  output: writeOutput,
  gap: (stream, count) =>
    hint(
      `farhand: ${count} bytes of ${stream} were dropped, because the command wrote faster than its output was read`,
    ),
};

/** Prints each event of a command as one line of JSON. */
export function jsonLines(command_id: string, more: Record<string, unknown> = {}): Listener {
  const print = (rest: Record<string, unknown>): Promise<void> =>
    writeOutput('stdout', `${cleanJson({ command_id, ...more, ...rest })}\n`);
  return {
    output(stream, bytes) {
      const [buffer, text] = [Buffer.from(bytes), Buffer.from(bytes).toString('utf8')];
      return Buffer.from(text).equals(buffer)
        ? print({ stream, data: text, encoding: 'utf-8' })
        : print({ stream, data: buffer.toString('base64'), encoding: 'base64' });
    },
    gap: (stream, dropped) => print({ stream, dropped }),
  };
}

/** Milliseconds after a signal within which the broker must accept the cancellation. */
const cancelMs = 10_000;

/**
 * Cancels a command on a signal, or after a failed write to standard output or standard error. Ends the program if the
 * broker does not accept this in time.
 */
export function cancelOnSignals(cancel: () => Promise<unknown>) {
  let code: number | undefined;
  /**
   * True once the command has ended. After that, a failed cancellation is not reported, because the connection
   * may be closed before the broker has answered the request.
   */
  let over = false;
  const stop = (as: number): void => {
    if (code !== undefined) process.exit(as);
    code = as;
    const accepted = after(cancelMs, () => {
      if (over) return;
      hint(`farhand: not cancelled within ${cancelMs / 1000} s: the command may go on`);
      process.exit(as);
    });
    cancel().then(accepted, (error: unknown) => {
      if (!over)
        hint(
          `farhand: the command could not be cancelled: ${error instanceof Error ? error.message : String(error)}`,
        );
    });
  };
  const forget = onStop((as) => {
    if (process.stderr.isTTY && code === undefined)
      hint('farhand: cancelling the command; Ctrl-C again exits at once, and the command may go on');
    stop(as);
  });
  const onLost = (): void => {
    if (code === undefined) stop(lost.reason instanceof Exit ? lost.reason.exitCode : 1);
  };
  if (lost.aborted) onLost();
  lost.addEventListener('abort', onLost);
  return {
    // Exit code for this program if the command was cancelled, otherwise undefined.
    code: () => code,
    forget() {
      over = true;
      forget();
      lost.removeEventListener('abort', onLost);
    },
  };
}
