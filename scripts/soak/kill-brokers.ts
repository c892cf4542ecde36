// Kills each of three brokers on one PostgreSQL database with kill -9 under mixed load, and checks their promises.
//
//   npx node scripts/soak/kill-brokers.ts --seeds 1,2,3 --out scripts/soak/results/kill-brokers.txt
//
// For each seed, it starts three brokers, agents that know all of them, and clients behind a proxy that gives each
// connection to the next broker. It kills each broker once, in an order and at times that follow from the seed, and
// starts it again. Then it checks that no command ran twice (each writes a line on its machine), that no answered
// change is lost, that each time of a schedule has one row, that a follower that moves between brokers got each
// event once and in order, and that each event of a webhook was delivered at least once. Needs Debian's package
// postgresql. Everything is on loopback, in a temporary folder.

import { once } from 'node:events';
import { appendFileSync, copyFileSync, existsSync, mkdirSync } from 'node:fs';
import { createServer as createHttpServer } from 'node:http';
import { type AddressInfo, createServer } from 'node:net';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import {
  bench,
  firstSecrets,
  program,
  type Running,
  startAgent,
} from '../bench/start-and-measure-programs.ts';
import { checkAll, startLoad } from './load-and-checks.ts';
import { startPostgres } from './postgres-server.ts';
import { startRoundRobin } from './round-robin-proxy.ts';

const { values } = parseArgs({
  options: {
    seeds: { type: 'string', default: '1' },
    agents: { type: 'string', default: '6' },
    out: { type: 'string' },
  },
});

const brokerCount = 3;
const settleMs = 120_000;

/** Returns a function with the same random numbers for the same seed (mulberry32). */
function randomOf(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4_294_967_296;
  };
}

async function freePort(): Promise<number> {
  const server = createServer().listen(0, '127.0.0.1');
  await once(server, 'listening');
  // A server that listens on a host and port has an address of this type.
  const { port } = server.address() as AddressInfo;
  server.close();
  await once(server, 'close');
  return port;
}

/** Starts a receiver of webhooks. Returns its URL and the ids of the events that it got. */
async function startReceiver() {
  const ids: string[] = [];
  const server = createHttpServer((request, response) => {
    const chunks: Buffer[] = [];
    request.on('data', (chunk: Buffer) => chunks.push(chunk));
    request.on('end', () => {
      const event = JSON.parse(Buffer.concat(chunks).toString()) as { id: string };
      ids.push(event.id);
      response.end();
    });
  });
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address() as AddressInfo;
  return { url: `http://127.0.0.1:${port}/`, ids, close: () => void server.close() };
}

interface Broker {
  http: string;
  grpc: string;
  running: Running;
  start(): Promise<void>;
}

async function createBroker(folder: string, database: string, first?: string): Promise<Broker> {
  const [http, grpc, peer] = [await freePort(), await freePort(), await freePort()].map(
    (port) => `127.0.0.1:${port}`,
  );
  mkdirSync(folder, { recursive: true });
  for (const name of ['authority.json', 'webhooks.key'])
    if (first && existsSync(join(first, name))) copyFileSync(join(first, name), join(folder, name));
  const flags = ['--data-dir', folder, '--http', http ?? '', '--grpc', grpc ?? '', '--log-level', 'warn'];
  const shared = ['--database-url', database, '--peer-listen', peer ?? '', '--webhook-allow', '127.0.0.0/8'];
  const broker: Broker = {
    ...{ http: http ?? '', grpc: grpc ?? '', running: { pid: 0, line: {} } },
    async start() {
      broker.running = await program('broker/main.ts', [...flags.slice(0, -2), ...shared], 'broker is up');
    },
  };
  await broker.start();
  return broker;
}

/** Kills and starts each broker once. */
async function killEach(brokers: readonly Broker[], random: () => number, print: (line: string) => void) {
  const order = brokers.map((broker, n) => ({ broker, n, at: random() })).sort((a, b) => a.at - b.at);
  for (const { broker, n } of order) {
    await sleep(4_000 + random() * 5_000);
    process.kill(broker.running.pid, 'SIGKILL');
    const downMs = 1_000 + random() * 14_000;
    print(`  broker ${n} killed, started again after ${Math.round(downMs)} ms`);
    await sleep(downMs);
    await broker.start();
  }
  await sleep(5_000);
}

async function soak(seed: number, folder: string, print: (line: string) => void): Promise<string[]> {
  mkdirSync(folder);
  const postgres = await startPostgres(folder);
  const closers: (() => void)[] = [];
  try {
    const first = join(folder, 'broker-0');
    const brokers = [await createBroker(first, postgres.url)];
    for (let n = 1; n < brokerCount; n += 1)
      brokers.push(await createBroker(join(folder, `broker-${n}`), postgres.url, first));
    closers.push(() => {
      for (const { running } of brokers) process.kill(running.pid, 'SIGKILL');
    });
    const { key, token } = await firstSecrets(first, 1_000);
    const proxy = await startRoundRobin(brokers.map(({ http }) => http));
    const receiver = await startReceiver();
    closers.push(proxy.close, receiver.close);
    const addresses = brokers.map(({ grpc }) => grpc).join(',');
    const names = Array.from({ length: Number(values.agents) }, (_, n) => `agent-${n}`);
    await Promise.all(names.map((name) => startAgent(folder, name, addresses, token)));
    const load = await startLoad({ url: proxy.url, key, folder, hook: receiver.url });
    await killEach(brokers, randomOf(seed), print);
    await load.stop(settleMs);
    return await checkAll(load, { query: postgres.query, delivered: receiver.ids, settleMs, print });
  } finally {
    for (const close of closers) close();
    await postgres.stop();
  }
}

await bench(async (folder) => {
  const { out } = values;
  const print = (line: string): void => {
    console.log(line);
    if (out) appendFileSync(out, `${line}\n`);
  };
  let failed = 0;
  for (const seed of values.seeds.split(',').map(Number)) {
    print(`seed ${seed}: ${brokerCount} brokers, ${values.agents} agents`);
    const failures = await soak(seed, join(folder, `seed-${seed}`), print);
    for (const failure of failures) print(`  FAILED ${failure}`);
    failed += failures.length;
  }
  if (failed > 0) throw new Error(`${failed} checks failed`);
  print('all checks passed');
});
