// farhand shell: a terminal on a machine, in the one this runs in; or through pipes.
import type { Command } from 'commander';
import { clean } from '../../shared/clean.ts';
import { StartError, UsageError } from '../../shared/errors.ts';
import type { Ending, Farhand, Terminal, TerminalNote, TerminalSettings } from '../../shared/sdk/index.ts';
import { withBroker } from './connect.ts';
import { machineNamed } from './named.ts';
import { rawMode, watchModes } from './screen.ts';
import { onStop } from './stop.ts';
import { write } from './told.ts';
import { bareVerb } from './verb.ts';
import { where } from './where.ts';

interface ShellOptions {
  dataDir?: string;
  session?: string;
  observe?: boolean;
}

/** Ctrl-] as telnet has it: no program wants it. */
const detachKey = 0x1d;
/** Ctrl-D. */
const endOfInput = '\x04';
/** What a program there should know of the terminal here. */
const passedOn = ['TERM', 'COLORTERM'];
const newline = 0x0a;

export function addShell(program: Command): void {
  const examples = ['farhand shell web-1', 'echo uptime | farhand shell web-1'] as const;
  bareVerb(
    program,
    'shell [machine]',
    'a terminal on a machine; Ctrl-] detaches, the session runs on',
    ...examples,
  )
    .option('--session <id>', 'attach to this session instead of opening one')
    .option('--observe', 'only look (with --session)')
    .action(async (machine: string | undefined, options: ShellOptions) => {
      const { session, observe = false } = options;
      if ((machine === undefined) === (session === undefined)) {
        throw new UsageError('say either a machine, or --session ID');
      }
      if (observe && session === undefined) throw new UsageError('--observe needs --session ID');
      await withBroker(where(options), async (client) => {
        const session_id = session ?? (await openSession(client, machine ?? ''));
        process.exitCode = await show(client, session_id, observe);
      });
    });
}

async function openSession(client: Farhand, machine: string): Promise<string> {
  const { columns: cols, rows } = process.stdout;
  const env: Record<string, string> = {};
  for (const name of passedOn) if (process.env[name]) env[name] = process.env[name];
  const { session_id } = await client.sessions.create({
    machine_id: await machineNamed(client, machine),
    ...(process.stdin.isTTY && { env }),
    // A terminal that nobody has sized yet says 0.
    ...(process.stdout.isTTY && cols > 0 && rows > 0 && { cols, rows }),
  });
  return session_id;
}

/** Shows a session until it ends or is detached; gives the exit code for this program. */
export async function show(client: Farhand, session_id: string, observe: boolean): Promise<number> {
  const modes = watchModes();
  const stop = stopSignals();
  const putBack = (): void => {
    if (process.stdout.isTTY && process.stdout.writable) process.stdout.write(modes.undo());
  };
  const onNote = (note: TerminalNote): void => {
    if (note.type === 'status') hint(`${session_id}: ${note.status}`);
  };
  try {
    for (let first = true; ; first = false) {
      const terminal = await open(client, session_id, observe, { signal: stop.signal, onNote }).catch(
        (error: unknown) => {
          if (stop.code() === undefined) throw error;
        },
      );
      if (!terminal) return stop.code() ?? 1;
      if (first) hint(`${session_id}: Ctrl-] detaches`);
      const ending = await drive(terminal, observe, (bytes) => modes.see(bytes));
      // One that was too slow goes on with the last that there was.
      if (ending.why === 'fell_behind') continue;
      // What is told now must not go with the alternate screen.
      putBack();
      return stop.code() ?? codeOf(ending, session_id);
    }
  } finally {
    stop.forget();
    putBack();
  }
}

async function open(
  client: Farhand,
  session_id: string,
  observe: boolean,
  settings: TerminalSettings & { signal: AbortSignal },
): Promise<Terminal> {
  const mode = observe ? 'observer' : 'operator';
  const attached = await client.sessions.attach({ session_id, mode }, { signal: settings.signal });
  return client.sessions.terminal(attached, settings).catch((error: unknown) => {
    throw new StartError(error instanceof Error ? error.message : String(error), 1, { cause: error });
  });
}

/** Joins a terminal with this program's own input and output until it ends. */
async function drive(
  terminal: Terminal,
  observe: boolean,
  see: (bytes: Uint8Array) => void,
): Promise<Ending> {
  const restore = rawMode();
  const input = observe ? watchOnly(terminal) : typeInto(terminal);
  const left = (): void => terminal.detach();
  // Of a window that was closed, say.
  process.stdin.on('error', left);
  try {
    for await (const bytes of terminal.output) {
      see(bytes);
      await write('stdout', bytes).catch(left);
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
  /** What came from the terminal, for who must answer it. */
  answer(bytes: Uint8Array): void;
  stop(): void;
}

/** What is typed goes to the terminal, and the size of the window too. */
function typeInto(terminal: Terminal): Typing {
  const { stdin, stdout } = process;
  let stopped = false;
  let last: number | undefined;
  let over = false;
  const resize = (): void => {
    if (stdout.isTTY && stdout.columns > 0 && stdout.rows > 0) terminal.resize(stdout.columns, stdout.rows);
  };
  const take = (bytes: Buffer): void => {
    const at = stdin.isTTY ? bytes.indexOf(detachKey) : -1;
    const typed = at < 0 ? bytes : bytes.subarray(0, at);
    last = typed.at(-1) ?? last;
    stdin.pause();
    void terminal.write(typed).then(() => {
      if (!stopped) stdin.resume();
    });
    if (at >= 0) terminal.detach();
  };
  const end = (): void => {
    // A window that was closed; the session runs on.
    if (stdin.isTTY) terminal.detach();
    // A last line without its end is one all the same.
    else void terminal.write(last === undefined || last === newline ? endOfInput : `\n${endOfInput}`);
    over = true;
  };
  resize();
  stdout.on('resize', resize);
  stdin.on('data', take).on('end', end);
  return {
    // What is typed while a program runs is not its shell's: a prompt is told again that there is no more.
    answer: (bytes) => void (over && bytes.at(-1) !== newline && terminal.write(endOfInput)),
    stop() {
      stopped = true;
      stdout.off('resize', resize);
      stdin.off('data', take).off('end', end).pause();
    },
  };
}

/** Of the keys only the one that detaches counts. */
function watchOnly(terminal: Terminal): Typing {
  const { stdin } = process;
  if (!stdin.isTTY) return { answer: () => {}, stop: () => {} };
  const take = (bytes: Buffer): void => {
    if (bytes.includes(detachKey)) terminal.detach();
  };
  stdin.on('data', take);
  return { answer: () => {}, stop: () => void stdin.off('data', take).pause() };
}

/** Signals that would end this program detach it first, so that the terminal it runs in is put back. */
function stopSignals() {
  const leaving = new AbortController();
  let caught: number | undefined;
  const forget = onStop((code) => {
    caught = code;
    leaving.abort();
  });
  return { signal: leaving.signal, code: () => caught, forget };
}

const again = (session_id: string): string =>
  `the session runs on; farhand shell --session ${session_id} attaches again`;
const farewells = {
  forbidden: 'the key may no longer',
  fell_behind: 'too slow',
  stopping: 'the broker stops',
};

/** The exit code that an ending makes; what it leaves is told. */
function codeOf(ending: Ending, session_id: string): number {
  if (ending.why === 'ended') {
    if (ending.reason) process.stderr.write(`farhand: ${clean(ending.reason)}\r\n`);
    return ending.exit_code ?? 1;
  }
  if (ending.why === 'detached') {
    hint(`detached: ${again(session_id)}`);
    return 0;
  }
  const why = ending.why === 'lost' ? ending.message : farewells[ending.why];
  process.stderr.write(`\r\nfarhand: ${clean(why)}; ${again(session_id)}\r\n`);
  return 1;
}

/** For a person only. */
function hint(text: string): void {
  if (process.stderr.isTTY) process.stderr.write(`\r\n[${clean(text)}]\r\n`);
}
