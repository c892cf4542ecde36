// Runs commands that keep writing, and terminals that stay open, while brokers are killed. Checks that each byte of
// their output arrives, whichever broker the client uses.
import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { Readable } from 'node:stream';
import { setTimeout as sleep } from 'node:timers/promises';
import { Farhand as Client, FarhandError } from '../../shared/sdk/index.ts';
import { type Access, get, idOf, insist } from './repeated-requests.ts';

interface Settings extends Access {
  folder: string;
  machines: readonly string[];
  /** `grace_period` of the terminals in milliseconds. */
  graceMs?: number;
}

export interface LongRunning {
  /** Ends the commands and terminals. Returns a message for each failed check. */
  end(print: (line: string) => void): Promise<string[]>;
}

const mostTerminals = 5;
const linesAtOnce = 100;
/** Default of `graceMs`. The test fails if the output of a terminal pauses for longer than `graceMs`. */
const defaultGraceMs = 30_000;

export async function startLongRunning(settings: Settings): Promise<LongRunning> {
  const stop = join(settings.folder, 'stop');
  const commands = await Promise.all(settings.machines.map((id, n) => startCommand(settings, stop, id, n)));
  const withTerminals = settings.machines.slice(0, mostTerminals);
  const terminals = await Promise.all(withTerminals.map((id) => startTerminal(settings, stop, id)));
  return {
    async end(print) {
      writeFileSync(stop, '');
      const ofCommands = (await Promise.all(commands.map((check) => check()))).flat();
      const ended = await Promise.all(terminals.map((end) => end()));
      const bytes = sumOfOutput(settings.folder, commands.length);
      const silence = Math.max(0, ...ended.map(({ silenceMs }) => Math.round(silenceMs)));
      const away = Math.max(0, ...ended.map(({ attaches }) => attaches));
      print(
        `  output of ${commands.length} commands, ${bytes} bytes; ${ended.length} terminals, silent for at most ${silence} ms, attached at most ${away} times`,
      );
      return [...ofCommands, ...ended.flatMap(({ failures }) => failures)];
    },
  };
}

const countFile = (folder: string, n: number): string => join(folder, `rounds-of-command-${n}`);

const roundOf = (round: number): string =>
  Array.from({ length: linesAtOnce }, (_, n) => `${round} ${n + 1}\n`).join('');

function sumOfOutput(folder: string, count: number): number {
  const rounds = Array.from({ length: count }, (_, n) => Number(readFileSync(countFile(folder, n), 'utf8')));
  return rounds.reduce((sum, one) => sum + expectedOutput(one).length, 0);
}

const expectedOutput = (rounds: number): string =>
  Array.from({ length: rounds }, (_, n) => roundOf(n + 1)).join('');

/** Starts a command that writes numbered lines, and follows it. Returns a function that checks its output. */
async function startCommand(
  settings: Settings,
  stop: string,
  machine_id: string,
  n: number,
): Promise<() => Promise<string[]>> {
  const count = countFile(settings.folder, n);
  const command = `i=0; while [ ! -e ${stop} ]; do i=$((i+1)); seq -f "$i %.0f" 1 ${linesAtOnce}; sleep 0.5; done; echo $i >${count}`;
  const id = idOf(
    await insist(settings, '/commands', {
      machine_id,
      command,
      wait: 0,
      timeout: 3_600_000,
      queue_for: 60_000,
    }),
    'a long command',
  );
  const followed = followOutput(settings, id);
  return async () => {
    for (let status = ''; !/completed|failed|lost|timeout|cancelled|expired/.test(status); await sleep(300)) {
      const { data } = await get(settings, `/commands/${id}`);
      status = String((data as { status?: unknown }).status);
      if (/failed|lost|timeout|cancelled|expired/.test(status)) return [`long command ${id} is ${status}`];
    }
    const rounds = existsSync(count) ? Number(readFileSync(count, 'utf8')) : 0;
    const expected = expectedOutput(rounds);
    const seen = { followed: await followed, read: await readOutput(settings, id) };
    return Object.entries(seen).flatMap(([how, output]) =>
      output === expected
        ? []
        : [`output of long command ${id}, ${how}: got ${output.length} of ${expected.length} bytes`],
    );
  };
}

const outputUrl = ({ url }: Access, id: string, query: string): string =>
  `${url}/api/v1/commands/${id}/output?stream=stdout${query}`;

async function readOutput(settings: Settings, id: string): Promise<string> {
  for (let tries = 0; ; tries += 1) {
    const headers = { Authorization: `Bearer ${settings.key}`, Connection: 'close' };
    const answer = await fetch(outputUrl(settings, id, ''), { headers }).catch(() => undefined);
    if (answer?.ok) return await answer.text();
    if (tries > 60) return `not answered: ${answer?.status}`;
    await sleep(500);
  }
}

/** Follows the output of a command to its end. After a lost connection, continues at the same byte. */
async function followOutput(settings: Settings, id: string): Promise<string> {
  const chunks: Buffer[] = [];
  let length = 0;
  for (;;) {
    try {
      const headers = { Authorization: `Bearer ${settings.key}`, Connection: 'close' };
      const answer = await fetch(outputUrl(settings, id, `&follow=true&offset=${length}`), { headers });
      if (answer.ok) {
        if (Number(answer.headers.get('x-output-offset')) !== length) return 'a gap in the followed output';
        const body: AsyncIterable<Uint8Array> = answer.body ?? Readable.from([]);
        for await (const chunk of body) {
          chunks.push(Buffer.from(chunk));
          length += chunk.length;
        }
        return Buffer.concat(chunks).toString();
      }
    } catch {
      // The broker was killed. The next request goes to another broker, and continues at the same byte.
    }
    await sleep(200);
  }
}

interface EndedTerminal {
  failures: string[];
  /** How each attachment to this terminal ended. Used in the messages of failed checks. */
  endings: string[];
  silenceMs: number;
  attaches: number;
}

/**
 * Opens a terminal that prints numbers, and attaches again after each lost connection. The returned function types a
 * last word, and checks the output.
 */
async function startTerminal(
  settings: Settings,
  stop: string,
  machine_id: string,
): Promise<() => Promise<EndedTerminal>> {
  const script = `stty -echo; i=0; while [ ! -e ${stop} ]; do i=$((i+1)); echo "tick $i"; sleep 0.25; done; read word; echo "word $word after $i"`;
  const { graceMs = defaultGraceMs } = settings;
  const body = { machine_id, shell: '/bin/sh', args: ['-c', script], grace_period: graceMs };
  const session_id = idOf(await insist(settings, '/sessions', body), 'a terminal');
  const client = new Client({ baseUrl: settings.url, apiKey: settings.key, retries: 0 });
  const result: EndedTerminal = { failures: [], endings: [], silenceMs: 0, attaches: 0 };
  let text = '';
  let offset = 0;
  let heardAt = performance.now();
  const attachOnce = async (): Promise<boolean> => {
    const terminal = await client.sessions.terminal(await client.sessions.attach({ session_id, offset }));
    result.attaches += 1;
    if (terminal.offset !== offset) result.failures.push(`terminal ${session_id} has a gap at ${offset}`);
    for await (const chunk of terminal.output) {
      result.silenceMs = Math.max(result.silenceMs, performance.now() - heardAt);
      heardAt = performance.now();
      text += Buffer.from(chunk).toString();
      offset += chunk.length;
    }
    const { why } = await terminal.ended;
    result.endings.push(why);
    return why === 'ended';
  };
  const reading = (async () => {
    for (;;) {
      try {
        if (await attachOnce()) return;
      } catch (error) {
        result.endings.push(String(error));
        if (result.endings.at(-2) === result.endings.at(-1)) result.endings.pop();
        if (isOver(error)) return;
      }
      await sleep(200);
    }
  })();
  return async () => {
    await typeAtEnd(client, session_id);
    await Promise.race([reading, sleep(60_000)]);
    const ticks = [...text.matchAll(/tick (\d+)/g)].map(([, n]) => Number(n));
    const wrong = ticks.findIndex((tick, n) => tick !== n + 1);
    if (wrong >= 0)
      result.failures.push(
        `terminal ${session_id} printed tick ${ticks[wrong]} instead of tick ${wrong + 1}`,
      );
    if (!text.includes(`word typed after ${ticks.length}`)) {
      const { status, reason } = await client.sessions.get({ session_id });
      const last = JSON.stringify(text.slice(-40));
      result.failures.push(
        `terminal ${session_id} did not print the typed word at its end: ${last}, ${status} ${reason}, ${result.endings.join(', ')}`,
      );
    }
    if (result.silenceMs > graceMs)
      result.failures.push(`terminal ${session_id} was without output for longer than its grace period`);
    return result;
  };
}

/** True if a broker refused the request because the session has ended. */
const isOver = (error: unknown): boolean =>
  error instanceof FarhandError && /session_not_found|session_ended|conflict/.test(error.code);

/** Types a word in a terminal from a second client. */
async function typeAtEnd(client: Client, session_id: string): Promise<void> {
  for (let tries = 0; tries < 50; tries += 1) {
    try {
      const terminal = await client.sessions.terminal(await client.sessions.attach({ session_id }));
      await terminal.write('typed\n');
      for await (const chunk of terminal.output) if (Buffer.from(chunk).includes('word typed')) break;
      terminal.detach();
      return;
    } catch {
      await sleep(200);
    }
  }
}
