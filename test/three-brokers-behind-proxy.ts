// With FARHAND_TEST_BROKERS=3, a test that starts a broker gets three brokers on one database, behind a proxy. The
// proxy gives each connection to the next broker. Clients open a connection for each request (test/setup.ts), and
// agents link to one broker after another.
import { copyFileSync, mkdtempSync, readdirSync, rmSync } from 'node:fs';
import { connect, createServer, type Socket } from 'node:net';
import { join } from 'node:path';
import { brokerSettings } from '../broker/settings-schema.ts';
import { type Broker, startBroker, type Tuning } from '../broker/start/index.ts';
import type { Logger } from '../shared/logger.ts';
import { readSettings } from '../shared/read-settings.ts';
import { atEnd } from './close-after-tests.ts';
import { freeAddress } from './find-free-ports.ts';
import { brokerCount } from './start-postgres.ts';

export interface BrokerOptions {
  dataDir: string;
  /** HOST:PORT of the REST API and of the port for agents. With several brokers, `http` is the address of the proxy. */
  http: string;
  grpc: string;
  /** Further settings. `--http` and `--grpc` among them take precedence. */
  flags: readonly string[];
  tuning: Tuning | undefined;
  log: Logger;
}

/** The data directories of several brokers and their addresses for agents. Restarted brokers use them again. */
interface Places {
  folders: readonly string[];
  grpc: readonly string[];
}

/** Data directories and addresses of the brokers that were started together, by the data directory of the first one. */
const placesOf = new Map<string, Places>();

export interface StartedBrokers {
  /** Stands for all of the brokers. Its URL is that of the proxy. */
  broker: Broker;
  urls: readonly string[];
  /** HOST:PORT of each broker for agents. An agent's two connections must reach the same broker. */
  grpc: readonly string[];
}

/** Starts several brokers behind a proxy. */
export async function startSeveralBrokers(options: BrokerOptions): Promise<StartedBrokers> {
  const { dataDir, tuning, log } = options;
  const { http = options.http, rest } = withoutAddresses(options.flags);
  const start = async (folder: string, grpc: string): Promise<Broker> => {
    const ports = ['--http', '127.0.0.1:0', '--grpc', grpc, '--peer-listen', '127.0.0.1:0'];
    const argv = ['--data-dir', folder, ...ports, ...rest];
    const broker = await startBroker(readSettings(brokerSettings, { argv, env: {} }), log, tuning);
    atEnd(() => broker.close());
    return broker;
  };
  const first = await start(dataDir, placesOf.get(dataDir)?.grpc[0] ?? options.grpc);
  const { folders, grpc } = placesOf.get(dataDir) ?? (await placesBeside(options));
  placesOf.set(dataDir, { folders, grpc });
  const others = await Promise.all(folders.slice(1).map((folder, n) => start(folder, grpc[n + 1] ?? '')));
  const brokers = [first, ...others];
  const urls = brokers.map(({ url = '' }) => url);
  const closeProxy = await startRoundRobin(
    http,
    urls.map((url) => new URL(url).host),
  );
  const close = async (): Promise<void> => {
    await Promise.all(brokers.map((one) => one.close()));
    await closeProxy();
  };
  atEnd(close);
  const sessions: Broker['sessions'] = {
    // Asks all brokers, because only the owner of the machine has the ticket.
    redeem: (ticket) => firstOf(brokers, ({ sessions }) => sessions.redeem(ticket)),
    join: (...about) => first.sessions.join(...about),
  };
  const { protocol } = new URL(urls[0] ?? '');
  return { broker: { ...first, url: `${protocol}//${http}`, sessions, close }, urls, grpc };
}

/** Returns the first result that is not undefined. */
function firstOf<T, Result>(all: readonly T[], find: (one: T) => Result | undefined): Result | undefined {
  for (const one of all) {
    const found = find(one);
    if (found !== undefined) return found;
  }
  return undefined;
}

/** Separates the addresses of a broker from its other flags. */
function withoutAddresses(flags: readonly string[]): { http?: string; rest: string[] } {
  const rest = [...flags];
  const take = (name: string): string | undefined => {
    const at = rest.indexOf(name);
    return at < 0 ? undefined : rest.splice(at, 2)[1];
  };
  take('--grpc');
  const http = take('--http');
  return { ...(http !== undefined && { http }), rest };
}

/** Makes the data directories of the other brokers, with the authority and keys of the first broker. */
async function placesBeside({ dataDir, grpc: first }: BrokerOptions): Promise<Places> {
  const names = readdirSync(dataDir).filter((name) => /^(authority\.json|.*\.key|.*-key\.json)$/.test(name));
  const folders = [dataDir];
  const grpc = [first];
  while (folders.length < brokerCount) {
    const folder = mkdtempSync(`${dataDir}-other-`);
    atEnd(() => rmSync(folder, { recursive: true, force: true }));
    for (const name of names) copyFileSync(join(dataDir, name), join(folder, name));
    folders.push(folder);
    grpc.push(await freeAddress());
  }
  return { folders, grpc };
}

/** Starts a proxy that gives each connection to the next target. Resolves with the function that closes it. */
async function startRoundRobin(address: string, targets: readonly string[]): Promise<() => Promise<void>> {
  let next = 0;
  const sockets = new Set<Socket>();
  // A client may end its side of a connection and still read the answer from the other side.
  const halves = { allowHalfOpen: true };
  const server = createServer(halves, (near) => {
    const [host = '', port] = (targets[next++ % targets.length] ?? '').split(':');
    const far = connect({ port: Number(port), host, ...halves });
    for (const [one, other] of [
      [near, far],
      [far, near],
    ] as const) {
      sockets.add(one);
      one.setNoDelay(true);
      one.on('error', () => one.destroy());
      one.once('close', () => sockets.delete(one));
      one.pipe(other);
    }
    near.once('close', () => far.destroy());
    // A broker may close its connection right after an answer. The connection to the client is then ended without a
    // reset, because the client may not have read the answer yet.
    far.once('close', () => near.end().resume());
  });
  const [host, port] = address.split(':');
  await new Promise<void>((resolve) => server.listen(Number(port), host, resolve));
  return async () => {
    for (const socket of sockets) socket.destroy();
    if (server.listening) await new Promise((resolve) => server.close(resolve));
  };
}
