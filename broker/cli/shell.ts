// The verb farhand shell: opens a terminal on a machine, and connects it to the local terminal or to pipes.
import type { Command } from 'commander';
import { after, sleep } from '../../shared/clock.ts';
import { StartError, UsageError } from '../../shared/errors.ts';
import { clean } from '../../shared/sanitize-text.ts';
import {
  type Ending,
  type Farhand,
  FarhandError,
  type Terminal,
  type TerminalNote,
} from '../../shared/sdk/index.ts';
import { where, withBroker } from './connect-to-broker.ts';
import { localVerb } from './declare-verb.ts';
import { findMachine } from './find-by-name.ts';
import { rawMode, watchModes } from './local-terminal.ts';
import { endSoon, onStop, orAborted, write } from './stdout-stderr-and-exit.ts';

/** Code of the key Ctrl-], which detaches, as in telnet. Few programs use this key. */
const detachKey = 0x1d;
/** Code of Ctrl-C. */
const interruptKey = 0x03;
/** The character of Ctrl-D, the end of input on a terminal. */
const endOfInput = '\x04';
/** Environment variables that describe the local terminal to remote programs. */
const passedOn = ['TERM', 'COLORTERM'];
const newline = 0x0a;
/** Milliseconds between two attempts to attach again. */
const retryMs = 1_500;
/**
 * Time limit of an attempt to attach again, in milliseconds. Without it, an attempt over a network that drops packets
 * would never fail.
 */
const attachMs = 10_000;

export function addShell(program: Command): void {
  const spec = {
    about: 'open a terminal on a machine; Ctrl-] detaches and leaves the session open',
    examples: ['farhand shell web-1', 'echo uptime | farhand shell web-1'],
    flags: {
      '--session <id>': 'attach to this session instead of creating one',
      '--observe': 'only watch: send no input (needs --session)',
    },
    interactive: true,
  } as const;
  localVerb(program, 'shell [machine]', spec, async (machine, options) => {
    const { session, observe = false } = options;
    if ((machine === undefined) === (session === undefined))
      throw new UsageError('choose either a machine or an open session (--session ID)');
    if (observe && session === undefined)
      throw new UsageError('--observe needs a session to watch: give its id by --session ID');
    // A WebSocket of Node cannot be closed over a dead connection. One of this transport can, but takes longer to load.
    await withBroker({ ...where(options), isSlow: true }, async (client) => {
      const session_id = session ?? (await createSession(client, machine ?? ''));
      process.exitCode = await showSession(client, session_id, observe);
    });
  });
}

async function createSession(client: Farhand, machine: string): Promise<string> {
  const { columns: cols, rows } = process.stdout;
  const env: Record<string, string> = {};
  for (const name of passedOn) if (process.env[name]) env[name] = process.env[name];
  const { session_id } = await client.sessions.create({
    machine_id: await findMachine(client, machine),
    ...(process.stdin.isTTY && { env }),
    // Some terminals report the size 0 before their size is set.
    ...(process.stdout.isTTY && cols > 0 && rows > 0 && { cols, rows }),
  });
  return session_id;
}

/** A session that this program displays. */
interface View {
  client: Farhand;
  session_id: string;
  observe: boolean;
  /** Aborted when the user leaves the session, or when a signal ends this program. */
  leaving: AbortController;
}

/** Displays a session until it ends or the user detaches from it. Returns the exit code for this program. */
export async function showSession(client: Farhand, session_id: string, observe: boolean): Promise<number> {
  const modes = watchModes();
  const leaving = new AbortController();
  const view: View = { client, session_id, observe, leaving };
  let code: number | undefined;
  // On a signal the session is detached before the program ends, so that the local terminal is restored.
  const forget = onStop((as) => {
    code = as;
    leaving.abort();
  });
  const restore = (): void => {
    if (process.stdout.isTTY && process.stdout.writable) process.stdout.write(modes.undo());
  };
  try {
    const attachNow = (): Promise<Terminal | undefined> =>
      attach(view).catch((error: unknown) => {
        if (code === undefined) throw error;
        return undefined;
      });
    let terminal = await attachNow();
    if (terminal) hint(`${session_id}: Ctrl-] detaches`);
    while (terminal) {
      const ending = await drive(terminal, view, (bytes) => modes.see(bytes));
      const { offset } = terminal;
      terminal = undefined;
      // A client that read too slowly attaches again and continues with the latest output.
      if (ending.why === 'fell_behind') terminal = await attachNow();
      else if (isBroken(ending) && process.stdin.isTTY && !leaving.signal.aborted) {
        hint(`${reasonOf(ending)}: attaching again; Ctrl-] leaves`);
        terminal = await attachAgain(view, offset);
        // Redraws the screen to remove the hint: a full-screen program does not draw over the hint by itself.
        if (terminal && modes.isAlternateScreen && !observe) redraw(terminal);
      }
      if (terminal) continue;
      // The normal screen is restored before codeOf() prints the last message. Otherwise that message would vanish with
      // the alternate screen.
      restore();
      return code ?? codeOf(ending, session_id);
    }
    return code ?? 1;
  } finally {
    forget();
    restore();
    if (code !== undefined) endSoon(code);
  }
}

/** Attaches to a session. The output begins at `offset`, or with the latest 256 KiB if `offset` is undefined. */
async function attach(view: View, signal = view.leaving.signal, offset?: number): Promise<Terminal> {
  const { client, session_id, observe } = view;
  const mode = observe ? 'observer' : 'operator';
  const onNote = (note: TerminalNote): void => {
    if (note.type === 'status') hint(`${session_id}: ${note.status}`);
  };
  const input = { session_id, mode, ...(offset !== undefined && { offset }) } as const;
  const attached = await client.sessions.attach(input, { signal });
  return client.sessions.terminal(attached, { signal, onNote }).catch((error: unknown) => {
    throw new StartError(error instanceof Error ? error.message : String(error), 1, { cause: error });
  });
}

/**
 * Tries to attach from output offset `offset` until it succeeds. Returns undefined if the user leaves. Throws if the
 * session has ended or the API key is refused.
 */
async function attachAgain(view: View, offset: number): Promise<Terminal | undefined> {
  const { signal } = view.leaving;
  const restore = rawMode();
  const leave = (keys: Buffer): void => {
    if (keys.includes(detachKey) || keys.includes(interruptKey)) view.leaving.abort();
  };
  process.stdin.on('data', leave).resume();
  try {
    for (let from: number | undefined = offset; !signal.aborted; await sleep(retryMs, signal)) {
      const failing = new AbortController();
      const cancel = after(attachMs, () => failing.abort());
      try {
        return await attach(view, AbortSignal.any([signal, failing.signal]), from);
      } catch (error) {
        if (!signal.aborted && !mayWorkLater(error)) throw error;
        // The machine stores only the newest output. If the output at `offset` is gone, the latest output is displayed.
        if (endingIn(error)?.why === 'fell_behind') from = undefined;
      } finally {
        cancel();
      }
    }
    return undefined;
  } finally {
    process.stdin.off('data', leave).pause();
    restore();
  }
}

/** Returns false if another attempt is useless, because the broker refused the session or the API key. */
function mayWorkLater(error: unknown): boolean {
  // Status 0 means that the broker did not answer, so attaching is tried again.
  if (error instanceof FarhandError)
    return !(error.status >= 400 && error.status < 500) || error.status === 429;
  const why = endingIn(error)?.why;
  return why !== 'ended' && why !== 'forbidden';
}

/** Returns why a terminal was closed before it was ready; undefined for other errors. */
function endingIn(error: unknown): Ending | undefined {
  const reason = error instanceof StartError && error.cause instanceof Error ? error.cause.cause : undefined;
  // The cast is safe: the SDK sets the cause of its error to an Ending.
  return reason as Ending | undefined;
}

/** Makes the program in the terminal redraw its whole screen, by changing the size of the terminal twice. */
function redraw(terminal: Terminal): void {
  const { columns, rows } = process.stdout;
  if (rows > 1) terminal.resize(columns, rows - 1);
  terminal.resize(columns, rows);
}

/** Connects a terminal to this program's input and output until the terminal ends. */
async function drive(
  terminal: Terminal,
  { observe, leaving }: View,
  see: (bytes: Uint8Array) => void,
): Promise<Ending> {
  const restore = rawMode();
  const input = typeInto(terminal, observe);
  const left = (): void => terminal.detach();
  // Reading input fails if the user closes the window of the local terminal.
  process.stdin.on('error', left);
  try {
    for await (const bytes of terminal.output) {
      see(bytes);
      // A signal ends the program even if the reader of its output reads nothing.
      await orAborted(leaving.signal, write('stdout', bytes)).catch(left);
      input.answer(bytes);
    }
    return await terminal.ended;
  } finally {
    input.stop();
    restore();
    process.stdin.off('error', left);
  }
}

interface Typing {
  /**
   * Must be called with each piece of the terminal's output. Once the local input has ended, sends another Ctrl-D
   * after each piece that may end with a prompt of the shell.
   */
  answer(bytes: Uint8Array): void;
  stop(): void;
}

/** Sends keys and the window size to the terminal. With `observe` only the detach key has an effect. */
function typeInto(terminal: Terminal, observe: boolean): Typing {
  const { stdin, stdout } = process;
  let stopped = false;
  let last: number | undefined;
  let over = false;
  const resize = (): void => {
    if (stdout.isTTY && stdout.columns > 0 && stdout.rows > 0) terminal.resize(stdout.columns, stdout.rows);
  };
  const send = (keys: Buffer): void => {
    last = keys.at(-1) ?? last;
    stdin.pause();
    void terminal.write(keys).then(() => {
      if (!stopped) stdin.resume();
    });
  };
  const take = (bytes: Buffer): void => {
    const at = stdin.isTTY ? bytes.indexOf(detachKey) : -1;
    if (!observe) send(at < 0 ? bytes : bytes.subarray(0, at));
    if (at >= 0) terminal.detach();
  };
  const end = (): void => {
    // If the input is a terminal, it ends when the user closes that terminal's window. The session is then only
    // detached, not ended.
    if (stdin.isTTY) terminal.detach();
    // A last line without a line feed gets one, because Ctrl-D ends the input only at the start of a line.
    else void terminal.write(last === undefined || last === newline ? endOfInput : `\n${endOfInput}`);
    over = true;
  };
  if (!observe) {
    resize();
    stdout.on('resize', resize);
    stdin.on('end', end);
  }
  // An earlier stop() may have paused the input, so resume() is called.
  if (!observe || stdin.isTTY) stdin.on('data', take).resume();
  return {
    // The first Ctrl-D is meant for the shell, but a program that the shell runs may read it. Output without a line
    // feed at its end may be a prompt of the shell, so Ctrl-D is sent again after such output.
    answer: (bytes) => void (over && bytes.at(-1) !== newline && terminal.write(endOfInput)),
    stop() {
      stopped = true;
      stdout.off('resize', resize);
      stdin.off('data', take).off('end', end).pause();
    },
  };
}

const again = (session_id: string): string =>
  `the session stays open; attach again with farhand shell --session ${session_id}`;
const endings = {
  detached: 'this client was detached',
  forbidden: 'the API key may no longer use this session',
  fell_behind: 'this client read the output too slowly, or the machine accepted no input for 25 s',
  stopping: 'the broker is stopping, or another broker takes over the machine',
};

/** Returns the exit code for an ending, and prints its reason or how to attach again. */
function codeOf(ending: Ending, session_id: string): number {
  if (ending.why === 'ended') {
    if (ending.reason) process.stderr.write(`farhand: ${clean(ending.reason)}\r\n`);
    return ending.exit_code ?? 1;
  }
  if (ending.why === 'detached') {
    hint(`detached: ${again(session_id)}`);
    return 0;
  }
  process.stderr.write(`\r\nfarhand: ${clean(reasonOf(ending))}; ${again(session_id)}\r\n`);
  return 1;
}

type Interrupted = Exclude<Ending, { why: 'ended' }>;

/** True if the connection broke or the broker stopped, so that attaching again may work. */
const isBroken = (ending: Ending): ending is Interrupted =>
  ending.why === 'lost' || ending.why === 'stopping';
const reasonOf = (ending: Interrupted): string =>
  ending.why === 'lost' ? ending.message : endings[ending.why];

/** Prints a hint if standard error is a terminal. */
function hint(text: string): void {
  if (process.stderr.isTTY) process.stderr.write(`\r\n[${clean(text)}]\r\n`);
}
