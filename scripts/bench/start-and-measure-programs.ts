// Functions that all benches share: they start and measure programs. All started programs end with the bench.
import { type ChildProcess, spawn } from 'node:child_process';
import { mkdtempSync, readdirSync, readFileSync, readlinkSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { withBroker } from '../../broker/cli/connect-to-broker.ts';
import { Farhand as Client } from '../../shared/sdk/index.ts';
import { agentFlags, agentVariables } from '../agent-memory-settings.ts';

export interface Running {
  pid: number;
  /** The log line with which the program reported its start. */
  line: Record<string, string>;
}

export interface Farhand {
  broker: Running;
  agent: Running;
  http: string;
  grpc: string;
  key: string;
  token: string;
}

export const root = join(import.meta.dirname, '../..');
const children = new Set<ChildProcess>();
/** True once the bench ends. No program is started after that. */
let ending = false;
const patienceMs = 5_000;
const longestRunMs = 15 * 60_000;

/**
 * Runs a bench in a temporary folder. When the bench ends, fails or is stopped, ends all of its programs and removes
 * the folder.
 */
export async function bench(main: (folder: string) => Promise<void>): Promise<void> {
  const folder = mkdtempSync(join(tmpdir(), 'farhand-bench-'));
  const logged = Promise.withResolvers<never>();
  for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP'] as const) {
    process.once(signal, () => logged.reject(new Error(`ended by ${signal}`)));
  }
  try {
    // The path must be safe, because it becomes part of commands and addresses.
    if (!/^[\w/.-]+$/.test(folder))
      throw new Error(
        `${folder}: set TMPDIR to a directory whose path has only letters, digits and the signs / _ . -`,
      );
    await Promise.race([main(folder), logged.promise]);
  } catch (error) {
    console.error(error instanceof Error ? error.message : error);
    process.exitCode = 1;
  } finally {
    ending = true;
    await Promise.all([...children].map(end));
    rmSync(folder, { recursive: true, force: true });
  }
  // The process exits explicitly, because interrupted work may have left timers and sockets open.
  process.exit();
}

/** Registers a child, so that it ends with the bench. The child must be the leader of its own process group. */
function keep<Child extends ChildProcess>(child: Child): Child {
  children.add(child);
  child.once('close', () => children.delete(child));
  return child;
}

async function end(child: ChildProcess): Promise<void> {
  const closed = new Promise<void>((resolve) => void child.once('close', () => resolve()));
  signalGroup(child, 'SIGTERM');
  const timer = setTimeout(() => signalGroup(child, 'SIGKILL'), patienceMs);
  if (children.has(child)) await closed;
  clearTimeout(timer);
}

function signalGroup(child: ChildProcess, signal: NodeJS.Signals): void {
  try {
    if (child.pid) process.kill(-child.pid, signal);
  } catch {
    // The process has already ended.
  }
}

/** Starts a program of a checkout. Resolves with its first log line that has this message. */
export function program(
  main: string,
  args: string[],
  message: string,
  checkout: string = root,
): Promise<Running> {
  return logged([process.execPath, join(checkout, main)], args, message);
}

/** Starts a command. Resolves with its first log line that has this message. */
function logged([command = '', ...words]: string[], args: string[], message: string): Promise<Running> {
  return until(command, [...words, ...args], (text) => {
    // Our programs log flat JSON objects, but Node itself may write plain text, such as warnings.
    const line = text.startsWith('{') ? (JSON.parse(text) as Record<string, string>) : {};
    return line.msg === message ? line : undefined;
  });
}

/**
 * Starts a program. Calls `match` for each line of its stderr, and resolves with the first value that `match` returns.
 */
export function until(
  command: string,
  args: string[],
  match: (text: string) => Record<string, string> | undefined,
): Promise<Running> {
  if (ending) return never();
  const child = keep(spawn(command, args, { stdio: ['ignore', 'ignore', 'pipe'], detached: true }));
  return new Promise((resolve, reject) => {
    let last = '';
    // stderr is read to its end, because later lines could otherwise fill the pipe.
    createInterface({ input: child.stderr }).on('line', (text) => {
      last = text;
      const line = match(text);
      if (line) resolve({ pid: child.pid ?? 0, line });
    });
    child.once('error', reject);
    child.once('close', () => reject(new Error(`${command} ${args[0]} ended before it was up: ${last}`)));
  });
}

/** Runs a shell command to its end. Returns the duration of the whole process. Rejects if the command fails. */
export function run(command: string): Promise<{ seconds: number; output: string }> {
  if (ending) return never();
  const started = process.hrtime.bigint();
  const child = keep(spawn('sh', ['-c', command], { stdio: ['ignore', 'pipe', 'pipe'], detached: true }));
  const heard = { stdout: '', stderr: '' };
  for (const name of ['stdout', 'stderr'] as const) {
    child[name].setEncoding('utf8').on('data', (text: string) => {
      heard[name] += text;
    });
  }
  const timer = setTimeout(() => signalGroup(child, 'SIGKILL'), longestRunMs);
  return new Promise((resolve, reject) => {
    child.once('error', reject);
    child.once('close', (code, signal) => {
      clearTimeout(timer);
      if (ending) return;
      const seconds = Number(process.hrtime.bigint() - started) / 1e9;
      if (code === 0) return resolve({ seconds, output: heard.stdout });
      const said = `${heard.stderr} ${heard.stdout}`.replaceAll(/\s+/g, ' ').trim();
      reject(new Error(`ended with ${signal ?? code}: ${said.slice(0, 300)}`));
    });
  });
}

const never = <T>(): Promise<T> => new Promise(() => undefined);

/** Creates an admin key and a join token at the broker of this data directory. */
export function firstSecrets(dataDir: string, uses: number): Promise<{ key: string; token: string }> {
  return withBroker({ dataDir, url: undefined, apiKey: undefined }, async (client) => ({
    key: (await client.keys.create({ name: 'bench', scopes: ['admin'] })).key,
    token: (await client.joinTokens.create({ uses })).token,
  }));
}

/** The program and arguments that start broker and agent. */
export interface Commands {
  broker: string[];
  agent: string[];
}

/** Returns the commands that start both programs from the source of a checkout, as `npm start` does. */
export function fromSource(checkout: string = root): Commands {
  const variables = Object.entries(agentVariables).map(([name, value]) => `${name}=${value}`);
  return {
    broker: [process.execPath, join(checkout, 'broker/main.ts')],
    agent: ['env', ...variables, process.execPath, ...agentFlags, join(checkout, 'agent/main.ts')],
  };
}

/** Starts a broker, with `more` flags, and its first agent. The returned key has the scope admin. */
export async function startFarhand(
  folder: string,
  commands: Commands = fromSource(),
  more: readonly string[] = [],
): Promise<Farhand> {
  const dataDir = join(folder, 'broker');
  const flags = ['--data-dir', dataDir, '--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0', ...more];
  const broker = await logged(commands.broker, flags, 'broker is up');
  const { http = '', grpc = '' } = broker.line;
  const made = await firstSecrets(dataDir, 100);
  return {
    broker,
    agent: await startAgent(folder, 'agent', grpc, made.token, commands),
    http,
    grpc,
    ...made,
  };
}

/** Starts one more agent, with this name. `broker` is the address of the broker, or of a proxy in front of it. */
export function startAgent(
  folder: string,
  name: string,
  broker: string,
  token: string,
  commands: Commands = fromSource(),
): Promise<Running> {
  const flags = ['--broker', broker, '--join-token', token, '--data-dir', join(folder, name), '--name', name];
  return logged(commands.agent, flags, 'linked');
}

/** Returns the id of the nth machine that joined, counted from 0. */
export async function machineId({ http, key }: Farhand, nth: number): Promise<string> {
  const { items } = await new Client({ baseUrl: http, apiKey: key, retries: 0 }).machines.list({});
  const id = items.toSorted((a, b) => a.created_at.localeCompare(b.created_at))[nth]?.id;
  if (!id) throw new Error(`there is no machine number ${nth}`);
  return id;
}

/** Returns the Node processes that a program has started. */
export function helpers({ pid }: Running): Running[] {
  const children = readdirSync(`/proc/${pid}/task`).flatMap((thread) =>
    readFileSync(`/proc/${pid}/task/${thread}/children`, 'utf8').split(' '),
  );
  return children
    .filter((child) => child !== '' && executable(child) === executable(pid))
    .map((child) => ({ pid: Number(child), line: {} }));
}

function executable(pid: number | string): string | undefined {
  try {
    return readlinkSync(`/proc/${pid}/exe`);
  } catch {
    // The process has already ended.
    return undefined;
  }
}

/** Returns the resident MiB of a process, and the CPU seconds that it has used so far. */
export function cost(pid: number): { rss: number; cpu: number } {
  const fields = readFileSync(`/proc/${pid}/stat`, 'utf8')
    .replace(/^.*\) /, '')
    .split(' ');
  return {
    rss: mebibytes(pid, 'VmRSS'),
    cpu: (Number(fields[11]) + Number(fields[12])) / 100,
  };
}

/** Returns the MiB of memory that a process shares with no other one (proc(5), smaps_rollup). */
export function privateMebibytes(pid: number): number {
  const text = readFileSync(`/proc/${pid}/smaps_rollup`, 'utf8');
  return (
    [...text.matchAll(/^Private_(?:Clean|Dirty):\s+(\d+)/gm)].reduce((sum, [, kib]) => sum + Number(kib), 0) /
    1024
  );
}

export function mebibytes(pid: number, field: 'VmRSS' | 'VmHWM' | 'RssAnon'): number {
  const status = readFileSync(`/proc/${pid}/status`, 'utf8');
  return Number(new RegExp(`${field}:\\s+(\\d+)`).exec(status)?.[1]) / 1024;
}

/** Calls `once` `count` times, one after another. Returns the durations in milliseconds, shortest first. */
export async function timed(count: number, once: () => Promise<unknown>): Promise<number[]> {
  const times: number[] = [];
  for (let n = 0; n < count; n += 1) {
    const started = performance.now();
    await once();
    times.push(performance.now() - started);
  }
  return times.sort((a, b) => a - b);
}

/** Returns a quantile of a sorted list. `share` is from 0 to 1; 0.5 returns the median. */
export const at = (sorted: number[], share: number): number =>
  sorted[Math.floor(sorted.length * share)] ?? Number.NaN;

export const median = (values: number[]): number =>
  at(
    values.toSorted((a, b) => a - b),
    0.5,
  );
