// Runs one command line of farhand, prints its failure and sets the exit code.
import { CommanderError } from 'commander';
import { reason } from '../../shared/doctor/check-result.ts';
import { AppError, errnoOf } from '../../shared/errors.ts';
import { failure, hideArgument, nodeIsGood, wrongNode } from '../../shared/program-start-and-end.ts';
import { FarhandError } from '../../shared/sdk/index.ts';
import { reasonOf } from '../../shared/system-error-messages.ts';
import { clean, hint } from './print.ts';
import { Exit, watchOutputs } from './stdout-stderr-and-exit.ts';
import { createProgram } from './verb-tree.ts';

export async function run(argv: string[]): Promise<void> {
  if (!nodeIsGood(process.version)) return end(`farhand: ${wrongNode}`, 1);
  hideArgument('--env');
  watchOutputs();
  try {
    if (argv[2] === '__complete')
      return await (await import('./completion-candidates.ts')).complete(argv.slice(3));
    await (await createProgram(argv[2])).parseAsync(argv);
  } catch (error) {
    // Commander has printed its error already. After help or the version, it throws with the exit code 0.
    if (error instanceof CommanderError) process.exitCode = error.exitCode === 0 ? 0 : 2;
    else if (error instanceof FarhandError) end(refusal(error), 1);
    else if (error instanceof Exit) end(error.message && `farhand: ${error.message}`, error.exitCode);
    // Errors that users can understand (our own, and those of the operating system) are printed without a stack
    // trace.
    else if (error instanceof AppError || errnoOf(error)) end(`farhand: ${clean(reasonOf(error))}`, 1);
    else {
      const { text, code } = failure('farhand', error);
      end(text, code);
    }
  }
}

function end(text: string, code: number): void {
  if (text) hint(text);
  process.exitCode = code;
}

function refusal(error: FarhandError): string {
  const { code, message, requestId, details } = error;
  const request = requestId && `, request ${clean(requestId)}`;
  // The cause is printed too, because the message of fetch is only "fetch failed".
  const why = code === 'no_answer' && error.cause !== undefined ? `: ${clean(reason(error))}` : '';
  const lines = [
    `farhand: ${clean(message)}${why} (${clean(code)}${request})`,
    ...issuesOf(details, message),
  ];
  const next = nextSteps[code];
  return [...lines, ...(next ? [next] : [])].join('\n');
}

/** Returns one line for each invalid field. Issues that the error message `text` already contains are left out. */
function issuesOf({ issues }: Readonly<Record<string, unknown>>, text: string): string[] {
  if (!Array.isArray(issues)) return [];
  // The cast is safe, because the values are only printed.
  const pairs = issues.map((one: { path?: unknown; message?: unknown } | null) => [one?.path, one?.message]);
  const others = pairs.filter(([, message]) => !text.includes(String(message)));
  return others.map((pair) => `  ${clean(pair.join(': '))}`);
}

/** Next steps by error code, for errors whose message contains no next step. */
const nextSteps: Readonly<Record<string, string>> = {
  no_answer: 'Run farhand doctor to find out why.',
  unauthorized:
    'The broker does not know this key, or it was revoked or has expired. Run farhand login to store another one.',
  forbidden: 'Run farhand whoami to print what this key may do.',
  machine_offline:
    'Run farhand machines list to see when the machine was last seen. A command can wait for it: exec --queue-for 10m.',
  already_exists:
    'To replace a file or an empty directory, add --overwrite to files cp or files mv. If the directory may exist already, use files mkdir -p.',
  directory_not_empty: 'files rm -r deletes a directory with its content.',
  internal_error: 'The broker’s log has details under this request id.',
};
