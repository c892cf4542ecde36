// Asks the user by prompts and confirmations, and reads standard input as text.
import { fstatSync } from 'node:fs';
import { StartError, UsageError } from '../../shared/errors.ts';
import { clean } from '../../shared/sanitize-text.ts';

/** True if standard input and standard error are terminals, so that a user can be asked. */
export const isInteractive = (): boolean => process.stdin.isTTY && process.stderr.isTTY;

/** Asks for a confirmation unless `yes` is set (--yes). Throws UsageError if the user does not agree. */
export async function confirm(yes: boolean | undefined, what: string): Promise<void> {
  if (yes) return;
  if (!isInteractive()) throw new UsageError(`this command would ${what}; add --yes to confirm`);
  const prompts = await import('@clack/prompts');
  const message = clean(`This will ${what}. Continue?`);
  const answer = await prompts.confirm({
    message,
    initialValue: false,
    output: screen(),
    signal: endOfInput(),
  });
  if (answer !== true) throw new UsageError('cancelled; nothing was changed');
}

/** Asks for a text. A `secret` is not displayed while it is typed. */
export async function prompt(message: string, kind: 'text' | 'secret' = 'text'): Promise<string> {
  const { password, text } = await import('@clack/prompts');
  const answer = await (kind === 'secret' ? password : text)({
    message,
    output: screen(),
    signal: endOfInput(),
  });
  if (typeof answer === 'string' && answer !== '') return answer;
  throw new UsageError('no value was entered; nothing was changed');
}

/** Fires when the terminal closes or the user presses Ctrl-D. Without this signal, a prompt would then wait forever. */
function endOfInput(): AbortSignal {
  const ended = new AbortController();
  process.stdin.once('end', () => ended.abort());
  process.stdin.on('keypress', (_text: string | undefined, key: { ctrl?: boolean; name?: string }) => {
    if (key.ctrl && key.name === 'd') ended.abort();
  });
  return ended.signal;
}

/**
 * Returns the stream to which prompts are written: standard error. If its width is unknown, sets the width to 80
 * columns, now and after each resize. With an unknown width, a prompt would have a line break after each character.
 */
function screen(): typeof process.stderr {
  const setWidth = (): void => {
    process.stderr.columns ||= 80;
  };
  setWidth();
  process.stderr.on('resize', setWidth);
  return process.stderr;
}

/** Throws StartError if standard input is a directory, because Node would read it as empty. */
export function assertInput(): void {
  if (fstatSync(0).isDirectory())
    throw new StartError('standard input is a directory; redirect it from a file', 1);
}

/**
 * Reads standard input as UTF-8 of at most `maxBytes`. Throws a UsageError for any other input. The error's
 * message ends with `advice`.
 */
export async function readInput(maxBytes: number, advice: string): Promise<string> {
  assertInput();
  const chunks: Buffer[] = [];
  let bytes = 0;
  for await (const chunk of process.stdin as AsyncIterable<Buffer>) {
    bytes += chunk.length;
    if (bytes > maxBytes) throw new UsageError(`standard input has more than ${maxBytes} bytes; ${advice}`);
    chunks.push(chunk);
  }
  try {
    return new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(Buffer.concat(chunks));
  } catch {
    throw new UsageError(`standard input is not UTF-8; ${advice}`);
  }
}
