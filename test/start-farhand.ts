// Starts a real broker on free ports and real agents, with temporary data directories. All end with the test.
import { EventEmitter, once } from 'node:events';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { agentSettings } from '../agent/settings-schema.ts';
import { type Agent, startAgent } from '../agent/start.ts';
import { withBroker } from '../broker/cli/connect-to-broker.ts';
import { brokerSettings } from '../broker/settings-schema.ts';
import { type Broker, startBroker, type Tuning } from '../broker/start/index.ts';
import type { Scope } from '../shared/api/route.ts';
import { createLogger } from '../shared/logger.ts';
import { readSettings } from '../shared/read-settings.ts';
import { Farhand } from '../shared/sdk/index.ts';
import { atEnd } from './close-after-tests.ts';
import { freeAddress } from './find-free-ports.ts';
import { keepAgentSilent, keepBrokerSilent, listening, overhear, remember } from './find-leaked-secrets.ts';
import { brokerCount, databaseFlags } from './start-postgres.ts';
import {
  type BrokerOptions,
  type StartedBrokers,
  startSeveralBrokers,
} from './three-brokers-behind-proxy.ts';

export const quiet = createLogger('test', process.env.TEST_LOG === 'debug' ? 'debug' : 'silent');

/** Makes a folder in the temporary folder of the run, or in `parent`. Removes it at the end of the test. */
export function temporaryFolder(name: string, parent = tmpdir()): string {
  const folder = mkdtempSync(join(parent, `farhand-${name}-`));
  atEnd(() => rmSync(folder, { recursive: true, force: true }));
  return folder;
}

export interface AgentHandle extends Agent {
  dataDir: string;
  /** The lines of the agent's log so far. */
  logged: readonly string[];
  /** Resolves the next time that the link is established (true) or lost (false). */
  linked(state: boolean): Promise<void>;
}

export interface AgentOptions {
  name?: string;
  tags?: string;
  dataDir?: string;
  /** HOST:PORT of a proxy. The agent connects to it instead of the broker. */
  through?: string;
  joinToken?: string;
  flags?: string[];
}

export interface TestSystem {
  broker: Broker;
  dataDir: string;
  url: string;
  grpc: string;
  key: string;
  /** Lines of the broker's log. */
  log: readonly string[];
  /** A client with an admin key. */
  client: Farhand;
  joinToken(): Promise<string>;
  /** Starts a real agent. Resolves when it is linked. */
  agent(params?: AgentOptions): Promise<AgentHandle>;
  /** Creates a key with these scopes. Resolves with the key and a client that uses it. */
  keyed(
    scopes: Scope[],
    limits?: { machine_ids?: string[]; tags?: string[] },
  ): Promise<{ key: string; client: Farhand }>;
  /** Makes an HTTP call. `path` is the part after /api/v1. */
  call(method: string, path: string, options?: CallOptions): Promise<Answer>;
}

export interface CallOptions {
  key?: string | null;
  body?: unknown;
  headers?: Record<string, string>;
  signal?: AbortSignal;
}

export interface Answer {
  status: number;
  headers: Headers;
  // The tests read answers as a script would, without the types of the API.
  // biome-ignore lint/suspicious/noExplicitAny: JSON of any shape
  body: any;
}

/** Returns the status and the error code of a refusal. */
export const statusAndCode = ({ status, body }: Answer): unknown[] => [status, body.error?.code];

/** Starts a broker. Closes it at the end of the test. It can be started again at the same addresses. */
export async function startFarhand(
  params: { dataDir?: string; tuning?: Tuning; flags?: string[] } = {},
): Promise<TestSystem> {
  const dataDir = params.dataDir ?? temporaryFolder('broker');
  const given = params.flags ?? [];
  const isOnOwnDatabase = given.includes('--database-url');
  const flags = isOnOwnDatabase ? given : [...(await databaseFlags(dataDir)), ...given];
  const silence = keepBrokerSilent(dataDir);
  atEnd(() => silence.afterwards());
  const { log, lines } = silence;
  const { tuning } = params;
  const isSeveral = brokerCount > 1 && !isOnOwnDatabase && !tuning?.cluster;
  const start = isSeveral ? startSeveralBrokers : startOneBroker;
  const addresses = { http: await freeAddress(), grpc: await freeAddress() };
  const started = await start({ dataDir, ...addresses, flags, tuning, log });
  const { broker, urls } = started;
  atEnd(() => silence.meanwhile());
  const { url = '', grpc = '' } = broker;
  let agents = 0;
  const { key } = await withBroker({ dataDir, url: undefined, apiKey: undefined }, (local) =>
    local.keys.create({ name: 'test', scopes: ['admin'] }),
  );
  remember('the first key', key);
  // A client without retries, so that tests see every answer.
  const client = new Farhand({ baseUrl: url, apiKey: key, retries: 0, fetch: listening });
  const joinToken = async (): Promise<string> => (await client.joinTokens.create({ uses: 1 })).token;
  return {
    broker,
    dataDir,
    url,
    grpc,
    key,
    log: lines,
    client,
    joinToken,
    async agent(agent = {}) {
      const address = started.grpc[agents++ % started.grpc.length] ?? grpc;
      const linked = await startOneAgent(address, agent, agent.joinToken ?? (await joinToken()));
      if (urls.length > 1) await untilAllKnow(urls, key, linked.machineId);
      return linked;
    },
    async keyed(scopes, limits = {}) {
      const made = await client.keys.create({ name: 'limited', scopes, ...limits });
      const settings = { baseUrl: url, apiKey: made.key, retries: 0, fetch: listening };
      return { key: made.key, client: new Farhand(settings) };
    },
    call: (method, path, options = {}) => call(`${url}/api/v1${path}`, method, { key, ...options }),
  };
}

/** Starts a broker and one agent. */
export async function startWithAgent(params: AgentOptions = {}) {
  const system = await startFarhand();
  const agent = await system.agent(params);
  return { system, agent, machine_id: agent.machineId };
}

/** Starts a broker on these addresses. Addresses in `flags` take precedence. */
async function startOneBroker(options: BrokerOptions): Promise<StartedBrokers> {
  const { dataDir, http, grpc, flags, tuning, log } = options;
  const argv = ['--data-dir', dataDir, '--http', http, '--grpc', grpc, ...flags];
  const broker = await startBroker(readSettings(brokerSettings, { argv, env: {} }), log, tuning);
  atEnd(() => broker.close());
  return { broker, urls: [broker.url ?? ''], grpc: [broker.grpc ?? ''] };
}

/** Waits until each of several brokers lists the machine as online. */
async function untilAllKnow(urls: readonly string[], key: string, machineId: string): Promise<void> {
  for (const url of urls) {
    const look = async () =>
      (await call(`${url}/api/v1/machines/${machineId}`, 'GET', { key })).body.data?.status;
    while ((await look()) !== 'online') await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

/** Starts a real agent on a data directory. Resolves when it is linked. */
async function startOneAgent(grpc: string, params: AgentOptions, joinToken: string): Promise<AgentHandle> {
  const dataDir = params.dataDir ?? temporaryFolder('agent');
  const argv = ['--broker', params.through ?? grpc, '--data-dir', dataDir, '--join-token', joinToken];
  if (params.name) argv.push('--name', params.name);
  if (params.tags) argv.push('--tags', params.tags);
  const settings = readSettings(agentSettings, { argv: [...argv, ...(params.flags ?? [])], env: {} });
  const changes = new EventEmitter<{ linked: []; lost: [] }>();
  const linked = async (state: boolean): Promise<void> => {
    await once(changes, state ? 'linked' : 'lost');
  };
  const first = linked(true);
  const silence = keepAgentSilent(dataDir);
  atEnd(() => silence.afterwards());
  const agent = await startAgent(settings, silence.log, (state) => {
    changes.emit(state ? 'linked' : 'lost');
  });
  atEnd(() => agent.close());
  silence.begin();
  await Promise.race([first, agent.ended]);
  return { ...agent, dataDir, linked, logged: silence.lines };
}

/** Makes one HTTP call. With `key: null` it sends no key. */
export async function call(
  url: string,
  method: string,
  { key, body, headers, signal }: CallOptions = {},
): Promise<Answer> {
  const response = await fetch(url, {
    method,
    headers: {
      ...(key && { Authorization: `Bearer ${key}` }),
      ...(body !== undefined && { 'Content-Type': 'application/json' }),
      ...headers,
    },
    ...(body !== undefined && { body: typeof body === 'string' ? body : JSON.stringify(body) }),
    ...(signal && { signal }),
  });
  const text = await response.text();
  overhear(method, { asked: body, status: response.status, received: text });
  const json = response.headers.get('content-type')?.includes('application/json');
  return { status: response.status, headers: response.headers, body: json ? JSON.parse(text) : text };
}
