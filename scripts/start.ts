// `npm start`: runs a broker and one agent on this machine, and prints an API key and a first call to paste.
//
// - With `--watch` (npm run dev), a program is restarted when its sources change.
// - All other flags are passed to the broker.
import { type ChildProcess, spawn } from 'node:child_process';
import { existsSync, mkdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { connect } from 'node:net';
import { userInfo } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { Agent, fetch as undiciFetch } from 'undici';
import { withSocket } from '../broker/cli/call-or-start-local-broker.ts';
import { type BrokerSettings, brokerSettings } from '../broker/settings-schema.ts';
import { nodeIsGood, wrongNode } from '../shared/program-start-and-end.ts';
import { readIdentity } from '../shared/read-agent-identity.ts';
import { readSettings } from '../shared/read-settings.ts';
import { Farhand } from '../shared/sdk/index.ts';
import { agentFlags, agentVariables } from './agent-memory-settings.ts';

const root = join(import.meta.dirname, '..');
const data = join(root, 'data');
const keyName = 'npm-start';
const keyFile = join(data, 'npm-start.key');
const patienceMs = 30_000;
const answerMs = 5_000;

const watch = process.argv.includes('--watch');
const own = ['--data-dir', join(data, 'broker'), '--grpc', '127.0.0.1:8421', '--log-level', 'warn'];
const argv = [...own, ...process.argv.slice(2).filter((word) => word !== '--watch')];
const children: ChildProcess[] = [];
const isHelp = argv.includes('--help');
let stopping = false;

interface Settings {
  flags?: string[];
  variables?: Record<string, string>;
}

function run(main: string, args: string[], { flags = [], variables = {} }: Settings = {}): void {
  const words = [...flags, ...(watch ? ['--watch'] : []), join(root, main), ...args];
  const child = spawn(process.execPath, words, {
    stdio: 'inherit',
    env: { ...process.env, ...variables },
  });
  child.once('exit', (code, signal) => {
    if (!stopping && !isHelp) print(`${main} ended with ${code ?? signal}`);
    stop(code ?? 1);
  });
  children.push(child);
}

function stop(code: number): void {
  if (stopping) return;
  stopping = true;
  process.exitCode = code;
  // The agent stops first, so that the broker still receives its last message.
  for (const child of children.reverse()) child.kill('SIGTERM');
}

function print(text: string): void {
  process.stderr.write(`npm start: ${text}\n`);
}

/** Repeats `look` until it returns a value. Throws after `patienceMs`, or when this program stops. */
async function until<T>(look: () => Promise<T | undefined>): Promise<T> {
  const deadline = Date.now() + patienceMs;
  while (!stopping && Date.now() < deadline) {
    const found = await look().catch(() => undefined);
    if (found !== undefined) return found;
    await sleep(100);
  }
  throw new Error(
    stopping
      ? 'stopped'
      : `broker and agent did not start within ${patienceMs / 1000} s; see the messages above`,
  );
}

interface OwnKey {
  id: string;
  key: string;
}

/**
 * Returns the API key of the previous start if it is still valid. A new key would replace it, and the schedules that it
 * created would stop.
 */
async function lastKey(baseUrl: string, ca: string[]): Promise<OwnKey | undefined> {
  const [apiKey] = fileOf(existsSync(keyFile) ? keyFile : undefined);
  if (apiKey === undefined) return undefined;
  // Only the certificate of this broker is accepted. Its host name is not checked, because the broker runs on the same
  // machine.
  const connect = { ca, allowPartialTrustChain: true, checkServerIdentity: () => undefined };
  const dispatcher = new Agent({ connect });
  const withCa = ((to: string, init: object) =>
    undiciFetch(to, {
      ...init,
      dispatcher,
      signal: AbortSignal.timeout(answerMs),
    })) as unknown as typeof fetch;
  const known = new Farhand({ baseUrl, apiKey, fetch: withCa }).keys.me();
  return known
    .then(
      ({ id }) => ({ id, key: apiKey }),
      () => undefined,
    )
    .finally(() => void dispatcher.close());
}

function fileOf(path: string | undefined): string[] {
  return path === undefined ? [] : [readFileSync(path, 'utf8')];
}

/** Creates an API key. Revokes older keys of the same name, so that they do not accumulate. */
async function freshKey(client: Farhand): Promise<OwnKey> {
  const { items } = await client.keys.list({ limit: 100 });
  for (const { id, name } of items) if (name === keyName) await client.keys.remove({ key_id: id });
  const { id, key } = await client.keys.create({ name: keyName, scopes: ['admin'] });
  rmSync(keyFile, { force: true });
  writeFileSync(keyFile, key, { mode: 0o600 });
  return { id, key };
}

/** Resolves to true if a broker listens on a socket file. */
function isLive(socket: string): Promise<boolean> {
  return new Promise((resolve) => {
    const asked = connect(socket);
    asked.once('connect', () => resolve(true)).once('error', () => resolve(false));
    asked.once('connect', () => asked.destroy());
  });
}

async function main(settings: BrokerSettings): Promise<void> {
  mkdirSync(data, { recursive: true, mode: 0o700 });
  const dataDir = settings.data_dir;
  // Calls the broker through its socket file. If the broker has ended, another program may listen on its HTTP address.
  const asked = <T>(use: Parameters<typeof withSocket<T>>[1]): Promise<T> =>
    withSocket(dataDir, use, { mustRun: true });
  const socket = join(dataDir, 'broker.sock');
  if (await isLive(socket)) throw new Error(`a broker runs on ${dataDir} already; stop that broker first`);
  await buildPages();
  run('broker/main.ts', argv);
  await until(async () => ((await isLive(socket)) ? true : undefined));
  await until(() => asked((client) => client.service.readyz()));
  const secured = settings.tls || settings.tls_cert !== undefined;
  const url = `${secured ? 'https' : 'http'}://${settings.http.host}:${settings.http.port}`;
  const info = await asked((client) => client.service.info());
  const ca = await asked((client) => client.service.ca());
  const { id, key } = (await lastKey(url, [ca, ...fileOf(settings.tls_cert)])) ?? (await asked(freshKey));
  const { token } = await asked((client) => client.joinTokens.create({ name: keyName }));
  const agentData = join(data, 'agent');
  const grpc = `${settings.grpc.host}:${settings.grpc.port}`;
  // The token is passed in an environment variable, because every user of the machine can read arguments.
  const agentArgs = ['--broker', grpc, '--data-dir', agentData, '--log-level', 'warn'];
  const variables = { ...agentVariables, FARHAND_JOIN_TOKEN: token };
  run('agent/main.ts', agentArgs, { flags: agentFlags, variables });
  // The broker may also have other machines, so the demo agent's own identity is read.
  const machineId = await until(async () => {
    const machine_id = (await readIdentity(agentData))?.machine_id;
    if (!machine_id) return undefined;
    const { status } = await asked((client) => client.machines.get({ machine_id }));
    return status === 'online' ? machine_id : undefined;
  });
  const { ticket } = await asked((_client, post) => post<{ ticket: string }>(`/local/login-tickets/${id}`));
  process.stdout.write(greeting(url, ticket, info.tls_pin, key, machineId));
}

/** Builds the console. If the development packages are missing, the broker runs without it. */
async function buildPages(): Promise<void> {
  try {
    const { buildConsole } = await import('./build-console.ts');
    await buildConsole(undefined, { fast: true });
  } catch (error) {
    print(`the console cannot be built: ${error instanceof Error ? error.message : String(error)}`);
  }
}

function greeting(url: string, ticket: string, pin: string | null, key: string, machineId: string): string {
  // The broker may listen on all addresses (0.0.0.0 or ::). The link names 127.0.0.1, because the ticket works only in
  // a browser on this machine.
  const local = url.replace(/\/\/(0\.0\.0\.0|::|\[::\]):/, '//127.0.0.1:');
  return `
Farhand is up.

  Console    ${local}/console/#ticket=${ticket}
             (logs in once, within 5 minutes, on this machine)
  API        ${url}/api/v1     reference: ${url}/docs
  Key        ${key}
  Machine    ${machineId} (this one)

Paste this:

  ${hasCurl() ? curlLine(url, pin, key, machineId) : cliLine(url, pin, key, machineId)}

!! This demo agent runs as the same user as the broker (${userInfo().username}): a holder of the key above
!! can read and change whatever this user can, the broker's own data included. Install agents under a user of their own.

Ctrl-C stops the broker and the agent.
`;
}

function curlLine(url: string, pin: string | null, key: string, machineId: string): string {
  const pinned = pin === null ? '' : ` -k --pinnedpubkey ${pin}`;
  return `curl -s${pinned} -w '\\n' -H 'Authorization: Bearer ${key}' ${url}/api/v1/machines/${machineId}/status`;
}

/**
 * Returns a command line that does the same as that of curlLine(), but with the CLI of this checkout. For a machine
 * without curl.
 */
function cliLine(url: string, pin: string | null, key: string, machineId: string): string {
  const settings = [`FARHAND_URL=${url}`, `FARHAND_API_KEY=${key}`, ...(pin ? [`FARHAND_PIN=${pin}`] : [])];
  return `${settings.join(' ')} npx node broker/cli/main.ts machines status ${machineId}`;
}

function hasCurl(): boolean {
  return (process.env.PATH ?? '').split(':').some((directory) => existsSync(join(directory, 'curl')));
}

if (!nodeIsGood(process.version)) {
  process.stderr.write(`${wrongNode}\n`);
  process.exit(1);
}
process.once('SIGINT', () => stop(0));
process.once('SIGTERM', () => stop(0));
if (isHelp) run('broker/main.ts', argv);
else
  main(readSettings(brokerSettings, { argv, env: process.env })).catch((error: unknown) => {
    // If the program is already stopping, the reason has been printed.
    if (!stopping) print(error instanceof Error ? error.message : String(error));
    stop(1);
  });
