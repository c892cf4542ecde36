// What is typed or piped here goes to a command there, each byte once and in order.
import { fstatSync, statSync } from 'node:fs';
import { isatty } from 'node:tty';
import { sleep } from '../../../shared/clock.ts';
import { type Farhand, FarhandError } from '../../../shared/sdk/index.ts';

/** A terminal is somebody's who may not mean it; one that is closed has nothing to say. */
export function hasInput(): boolean {
  try {
    return !isatty(0) && !isNothing();
  } catch {
    return false;
  }
}

/** /dev/null: a command that is started without input need not wait for its end. */
function isNothing(): boolean {
  return fstatSync(0).rdev === statSync('/dev/null').rdev && fstatSync(0).isCharacterDevice();
}

const pieceBytes = 256 * 1024;
const pauseMs = 500;

/** Sends standard input until it ends, or the command does; never rejects. */
export async function passInput(client: Farhand, command_id: string, over: AbortSignal): Promise<void> {
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
  } catch {
    // The command does not want it any more, or its end tells what is wrong.
  } finally {
    over.removeEventListener('abort', leave);
    leave();
  }
}

/** With its offset a piece may be sent twice: what broke is tried again until the command is over. */
async function insist(send: () => Promise<unknown>, over: AbortSignal): Promise<void> {
  for (;;) {
    try {
      await send();
      return;
    } catch (error) {
      const busy =
        error instanceof FarhandError && (error.status === 0 || error.status === 429 || error.status >= 500);
      if (over.aborted || !busy) throw error;
      await sleep(pauseMs, over);
    }
  }
}
