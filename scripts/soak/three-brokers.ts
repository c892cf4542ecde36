// Starts three brokers on one PostgreSQL database, real and simulated agents, and a proxy for clients.
import { copyFileSync, existsSync, mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { FleetOfAgents } from '../bench/fleet/fleet-of-agents.ts';
import { freePort } from '../bench/listen-on-free-port.ts';
import { firstSecrets, program, type Running, startAgent } from '../bench/start-and-measure-programs.ts';
import { type PostgresServer, startPostgres } from './postgres-server.ts';
import { type StallingProxy, startRoundRobin, startStallingProxy } from './tcp-proxies.ts';

const brokerCount = 3;
/**
 * Maximum number of simulated agents that dial at once. With more, each dial takes over 2 s on a busy machine, and
 * brokers may refuse it.
 */
const dialsAtOnce = 100;
/** Number of real agents that are started at once. */
const atOnce = 5;

export interface SoakBroker {
  name: string;
  /**
   * HOST:PORT for clients (`http`), for agents (`grpc`) and for other brokers (`peer`). If there are proxies, `grpc`
   * and `peer` are addresses of proxies.
   */
  http: string;
  grpc: string;
  peer: string;
  /**
   * TCP proxies for the connections to the database, from agents, and from other brokers. Undefined unless `hasProxies`
   * is set.
   */
  proxies: { database: StallingProxy; grpc: StallingProxy; peer: StallingProxy } | undefined;
  running: Running;
  /** Starts the broker from this repository, or from another checkout. */
  start(checkout?: string): Promise<void>;
  signal(name: NodeJS.Signals): void;
}

export interface System {
  postgres: PostgresServer;
  brokers: SoakBroker[];
  proxy: Awaited<ReturnType<typeof startRoundRobin>>;
  fleet: FleetOfAgents | undefined;
  key: string;
  /** Ids of the machines of real agents. */
  real: string[];
  close(): Promise<void>;
}

interface SystemSettings {
  folder: string;
  agents: number;
  simulated: number;
  /** Puts TCP proxies between each broker and the database, its agents and the other brokers. */
  hasProxies: boolean;
  /** Directory of the checkout from which the brokers are started; by default this repository. */
  checkout?: string | undefined;
}

export async function startSystem(settings: SystemSettings): Promise<System> {
  const { folder, agents, simulated } = settings;
  const postgres = await startPostgres(folder);
  const first = join(folder, 'broker-0');
  const brokers = [await createBroker(settings, postgres, 0)];
  for (let n = 1; n < brokerCount; n += 1) brokers.push(await createBroker(settings, postgres, n, first));
  const { key, token } = await firstSecrets(first, 10_000);
  const proxy = await startRoundRobin(brokers.map(({ http }) => http));
  const addresses = brokers.map(({ grpc }) => grpc);
  const running: Running[] = [];
  for (let n = 0; n < agents; n += atOnce) {
    const names = Array.from({ length: Math.min(atOnce, agents - n) }, (_, index) => `real-${n + index}`);
    const start = (name: string) => startAgent(folder, name, addresses.join(','), token);
    running.push(...(await Promise.all(names.map(start))));
  }
  const rows = await postgres.query("SELECT id FROM documents WHERE collection = 'machines'");
  const fleet =
    simulated === 0
      ? undefined
      : await FleetOfAgents.start({
          ...{ brokers: addresses, agents: simulated, dialsAtOnce, joinToken: token },
          niceness: process.getuid?.() === 0 ? -10 : 0,
        });
  return {
    ...{ postgres, brokers, proxy, fleet, key, real: rows.map(({ id }) => String(id)) },
    async close() {
      await fleet?.close();
      // Each agent leads a process group, which also contains its spawner.
      for (const { pid } of running) process.kill(-pid, 'SIGKILL');
      for (const { signal, proxies } of brokers) {
        signal('SIGKILL');
        for (const one of Object.values(proxies ?? {})) one.close();
      }
      proxy.close();
      await postgres.stop();
    },
  };
}

/** Starts a broker. `first` is the data directory of the broker whose certificate authority and keys it shares. */
async function createBroker(
  { folder: parent, hasProxies, checkout }: SystemSettings,
  postgres: PostgresServer,
  n: number,
  first?: string,
): Promise<SoakBroker> {
  const ports = [await freePort(), await freePort(), await freePort()];
  const [http = '', grpc = '', peer = ''] = ports.map((port) => `127.0.0.1:${port}`);
  const folder = join(parent, `broker-${n}`);
  mkdirSync(folder);
  for (const name of ['authority.json', 'webhooks.key', 'rest-key.json'])
    if (first && existsSync(join(first, name))) copyFileSync(join(first, name), join(folder, name));
  const proxies = hasProxies
    ? {
        database: await startStallingProxy(postgres.address),
        grpc: await startStallingProxy(grpc),
        peer: await startStallingProxy(peer),
      }
    : undefined;
  const seen = { grpc: proxies?.grpc.address ?? grpc, peer: proxies?.peer.address ?? peer };
  const database = postgres.urlAt(proxies?.database.address ?? postgres.address);
  const flags = [
    ...['--data-dir', folder, '--http', http, '--grpc', grpc, '--database-url', database],
    ...['--peer-listen', peer, '--peer-url', `https://${seen.peer}`, '--webhook-allow', '127.0.0.0/8'],
  ];
  const broker: SoakBroker = {
    ...{ name: `broker ${n}`, http, ...seen, proxies, running: { pid: 0, line: {} } },
    async start(from) {
      broker.running = await program('broker/main.ts', flags, 'broker is up', from);
    },
    signal: (name) => void process.kill(broker.running.pid, name),
  };
  await broker.start(checkout);
  return broker;
}
