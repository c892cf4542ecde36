// Connects an emulator with a session on a machine. After each loss it reconnects, and continues at the same byte if
// that is possible.
import type { Ending, Terminal } from '../../../shared/sdk/index.ts';
import { client, FarhandError, messageOf } from '../api-client.ts';
import { after } from '../timers.ts';
import { afterCtrl } from './touch-keys.tsx';
import type { Emulator } from './xterm-setup.ts';

export type Phase =
  | { name: 'connecting' | 'offline' }
  /** `client`: the id of this client in the session. */
  | { name: 'connected'; client: string }
  /**
   * `behind`: this page read the output too slowly, the machine accepted no input, or the machine no longer stores the
   * output that this page needs next.
   */
  | { name: 'lost' | 'behind'; text: string }
  | { name: 'ended'; text: string };

export type Mode = 'operator' | 'observer';

interface Attachment {
  session: string;
  mode: Mode;
  emulator: Emulator;
  signal: AbortSignal;
  onPhase: (phase: Phase) => void;
}

const retryMs = 1_500;
/** An answer of the emulator to a query of a program, such as the one for the position of the cursor. */
// biome-ignore lint/suspicious/noControlCharactersInRegex: answers are escape sequences
const answer = /^\u001b(?:\[[?>]?[\d;]*(?:[cnR]|\$y)|\]|P)/;

/**
 * Keeps the emulator attached until the session ends, the client is detached, the client's login or key may no longer
 * use the session, or the AbortSignal `signal` is aborted.
 */
export async function keepAttached(attachment: Attachment): Promise<void> {
  const { session, mode, emulator, signal, onPhase } = attachment;
  let offset: number | undefined;
  let terminal: Terminal | undefined;
  /** Number of pieces of old output that the emulator has not parsed yet. Queries in it were answered before. */
  let old = 0;
  const { terminal: screen } = emulator;
  const send = (input: string | Uint8Array): void => void terminal?.write(input);
  const listeners = [
    screen.onData((text) => (old === 0 || !answer.test(text)) && send(afterCtrl(text))),
    screen.onBinary((text) => send(Uint8Array.from(text, (letter) => letter.charCodeAt(0)))),
    screen.onResize(({ cols, rows }) => terminal?.resize(cols, rows)),
  ];
  try {
    while (!signal.aborted) {
      onPhase({ name: 'connecting' });
      const phase = await once(async () => {
        const input = { session_id: session, mode, ...(offset !== undefined && { offset }) };
        const attached = await client.sessions.attach(input);
        const connected: Phase = { name: 'connected', client: attached.client_id };
        let answered = 0;
        terminal = await client.sessions.terminal(attached, {
          signal,
          onNote(note) {
            if (note.type === 'ready' && offset === undefined) answered = note.answered ?? 0;
            if (note.type === 'status')
              onPhase(note.status === 'CONNECTED' ? connected : { name: 'offline' });
            if (note.type === 'size' && mode === 'observer') screen.resize(note.cols, note.rows);
          },
        });
        onPhase(connected);
        if (mode === 'operator') terminal.resize(screen.cols, screen.rows);
        else screen.resize(terminal.cols, terminal.rows);
        for await (const bytes of terminal.output) {
          const before = Math.max(0, answered - terminal.offset + bytes.length);
          offset = terminal.offset;
          if (before > 0) {
            old += 1;
            screen.write(bytes.subarray(0, before), () => {
              old -= 1;
            });
          }
          await emulator.write(bytes.subarray(before));
        }
        return endOf(await terminal.ended);
      });
      if (signal.aborted) return;
      onPhase(phase);
      if (phase.name === 'ended') return;
      if (phase.name === 'behind') {
        offset = undefined;
        screen.reset();
      }
      await new Promise<void>((resolve) => after(retryMs, resolve));
    }
  } finally {
    for (const listener of listeners) listener.dispose();
  }
}

function endOf(end: Ending): Phase {
  if (end.why === 'ended') {
    const how = end.signal ?? (end.exit_code === null ? end.reason : `exit code ${end.exit_code}`);
    return { name: 'ended', text: `The session has ended${how ? ` (${how})` : ''}.` };
  }
  if (end.why === 'forbidden') return { name: 'ended', text: 'Your key may not use this terminal any more.' };
  if (end.why === 'detached')
    return { name: 'ended', text: 'You were detached. Open the terminal again to go on.' };
  if (end.why === 'fell_behind')
    return {
      name: 'behind',
      text: 'This page missed some output, or the machine accepted no input. Connecting again…',
    };
  return { name: 'lost', text: 'The connection was lost; the session goes on. Connecting again…' };
}

/**
 * Attaches once. When that fails or the connection ends, returns the phase that follows. If this phase is not `ended`,
 * the caller attaches again.
 */
async function once(connect: () => Promise<Phase>): Promise<Phase> {
  try {
    return await connect();
  } catch (error) {
    // If the broker closed the connection, error.cause says why. `fell_behind` means that the machine no longer
    // stores the output from the offset that this page asked for.
    const why: unknown = error instanceof Error && Reflect.get(Object(error.cause), 'why');
    if (why === 'fell_behind') return endOf({ why });
    const isOver =
      error instanceof FarhandError && error.status >= 400 && error.status < 500 && error.status !== 429;
    return { name: isOver ? 'ended' : 'lost', text: messageOf(error) };
  }
}
