// Measures the time from a key press in a terminal to its echo.
import { setTimeout as sleep } from 'node:timers/promises';
import type { Farhand as Client } from '../../../shared/sdk/index.ts';
import { timed } from '../start-and-measure-programs.ts';

const patienceMs = 10_000;
/** The command that runs in the terminal and echoes each byte. */
export const echo = 'stty raw -echo; echo ready; exec cat';

/** A terminal with a running `cat`, as its client uses it. */
export interface Typist {
  /** Types `text`, by default one byte. */
  press(text?: string): unknown;
  /** Calls `listener` with the number of bytes of each received chunk. */
  hear(listener: (bytes: number) => void): void;
  close(): void;
}

/** Presses `count` keys, one after another. Returns the milliseconds until each echo, shortest first. */
export function echoes(typist: Typist, count: number): Promise<number[]> {
  return timed(count, async () => {
    const heard = nextByte(typist);
    typist.press();
    await heard;
  });
}

export function nextByte(typist: Typist): Promise<void> {
  return inTime(new Promise((resolve) => typist.hear(() => resolve())), () => 'a key was not echoed');
}

export async function inTime(work: Promise<void>, complaint: () => string): Promise<void> {
  const late = new AbortController();
  const failed = sleep(patienceMs, undefined, late).then(
    () => {
      throw new Error(complaint());
    },
    () => {},
  );
  await Promise.race([work, failed]).finally(() => late.abort());
}

/** Starts a session whose terminal echoes every byte. */
export async function startEcho(client: Client, machine: string): Promise<string> {
  const { id } = await client.sessions.create({ machine_id: machine, shell: '/bin/sh', args: ['-c', echo] });
  return id;
}

export async function attached(client: Client, id: string): Promise<Typist> {
  const terminal = await client.sessions.terminal(await client.sessions.attach({ session_id: id }));
  let listener = (_bytes: number): void => {};
  const begun = Promise.withResolvers<void>();
  const reading = (async () => {
    for await (const { length } of terminal.output) {
      begun.resolve();
      listener(length);
    }
  })();
  reading.catch((error: unknown) => begun.reject(error));
  // Waits until the program has printed that it is ready.
  await begun.promise;
  return {
    press: (text = 'x') => terminal.write(text),
    hear: (next) => {
      listener = next;
    },
    close: () => terminal.detach(),
  };
}
