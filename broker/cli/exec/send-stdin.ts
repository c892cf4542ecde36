// Sends standard input to a remote command, each byte once and in order.
import { fstatSync, statSync } from 'node:fs';
import { isatty } from 'node:tty';
import { sleep } from '../../../shared/clock.ts';
import { type Farhand, FarhandError } from '../../../shared/sdk/index.ts';
import { reasonOf } from '../../../shared/system-error-messages.ts';
import { hint } from '../print.ts';

/** True if standard input should be sent, because it is open and is neither a terminal nor /dev/null. */
export function hasInput(): boolean {
  try {
    const { rdev } = statSync('/dev/null');
    return !isatty(0) && !(fstatSync(0).isCharacterDevice() && fstatSync(0).rdev === rdev);
  } catch {
    return false;
  }
}

const pieceBytes = 256 * 1024;
const retryMs = 500;

/** Sends standard input until it ends, or until `over` fires because the command has ended. Never rejects. */
export async function sendInput(client: Farhand, command_id: string, over: AbortSignal): Promise<void> {
  let offset = 0;
  const send = async (bytes: Buffer, end: boolean): Promise<void> => {
    const piece = { data: bytes.toString('base64'), encoding: 'base64' as const, offset, end };
    await insist(() => client.commands.input({ command_id, ...piece }, { signal: over }), over);
    offset += bytes.length;
  };
  const leave = (): void => void process.stdin.destroy();
  over.addEventListener('abort', leave);
  try {
    for await (const chunk of process.stdin) {
      const bytes = chunk as Buffer;
      for (let at = 0; at < bytes.length; at += pieceBytes)
        await send(bytes.subarray(at, at + pieceBytes), false);
    }
    await send(Buffer.alloc(0), true);
  } catch (error) {
    // Errors of the request are ignored here: either the command no longer reads its input, or its result shows the
    // reason.
    if (over.aborted || error instanceof FarhandError) return;
    hint(
      `farhand: standard input could not be read (${reasonOf(error)}); the end of input was sent to the command`,
    );
    await send(Buffer.alloc(0), true).catch(() => undefined);
  } finally {
    over.removeEventListener('abort', leave);
    leave();
  }
}

/**
 * Repeats `send` until it succeeds or the command has ended. A repeat is safe: each piece has its offset, so the
 * machine ignores bytes that the command already got.
 */
async function insist(send: () => Promise<unknown>, over: AbortSignal): Promise<void> {
  for (;;) {
    try {
      await send();
      return;
    } catch (error) {
      const isBusy =
        error instanceof FarhandError && (error.status === 0 || error.status === 429 || error.status >= 500);
      if (over.aborted || !isBusy) throw error;
      await sleep(retryMs, over);
    }
  }
}
