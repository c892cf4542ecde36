// Compares commands on PostgreSQL with commands on SQLite, and requests to a machine's own broker with requests through
// another broker.
//
//   npx node scripts/bench/postgresql.ts
//
// Needs Debian's package postgresql, from which it starts a server of its own.
import { copyFileSync, mkdirSync, truncateSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { Pool } from 'undici';
import { type PostgresServer, startPostgres } from '../soak/postgres-server.ts';
import {
  at,
  bench,
  cost,
  fromSource,
  machineId,
  median,
  program,
  type Running,
  startFarhand,
  timed,
} from './start-and-measure-programs.ts';

const statCalls = 300;
const trueCalls = 80;
const rounds = 5;
const bytes = 1024 ** 3;
const downloads = 3;

interface Ask {
  method: 'GET' | 'POST';
  path: string;
  body?: string;
}

/**
 * A machine, and a broker that gets requests about it. The machine is linked to this broker, or this broker forwards
 * the requests to the broker of the machine.
 */
interface Way {
  send(ask: Ask): Promise<void>;
  machine: string;
  broker: Running;
  agent: Running;
}

/** Returns a function that sends a request over one connection, and reads the answer to its end. */
function asker(url: string, key: string) {
  const pool = new Pool(url, { connections: 1 });
  return async (ask: Ask): Promise<void> => {
    const headers = { authorization: `Bearer ${key}`, 'content-type': 'application/json' };
    const { statusCode, body } = await pool.request({ ...ask, path: `/api/v1${ask.path}`, headers });
    if (statusCode > 299) throw new Error(`${ask.path} answered ${statusCode}: ${await body.text()}`);
    for await (const _chunk of body);
  };
}

/** Starts a broker with one agent. */
async function startWay(folder: string, flags: readonly string[] = []) {
  const started = await startFarhand(folder, fromSource(), flags);
  const { http, key, broker, agent } = started;
  const way: Way = { send: asker(http, key), machine: await machineId(started, 0), broker, agent };
  return { way, key };
}

async function startWays(folder: string, postgres: PostgresServer): Promise<Record<string, Way>> {
  await postgres.query('CREATE DATABASE shared');
  const { way: sqlite } = await startWay(join(folder, 'sqlite'));
  const alone = await startWay(join(folder, 'alone'), ['--database-url', postgres.urlAt(postgres.address)]);
  const url = postgres.urlAt(postgres.address).replace('/postgres?', '/shared?');
  const shared = ['--database-url', url, '--peer-listen', '127.0.0.1:0'];
  const owner = await startWay(join(folder, 'owner'), shared);
  const front = join(folder, 'front');
  mkdirSync(front);
  for (const name of ['authority.json', 'webhooks.key'])
    copyFileSync(join(folder, 'owner/broker', name), join(front, name));
  const flags = ['--data-dir', front, '--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0', ...shared];
  const broker = await program('broker/main.ts', flags, 'broker is up');
  const forwarded = { ...owner.way, send: asker(broker.line.http ?? '', owner.key), broker };
  return { sqlite, postgres: alone.way, local: owner.way, forwarded };
}

/**
 * Measures each way in several rounds of `calls` requests. Each round yields a p50 in milliseconds. Returns the median
 * of these p50s, by way.
 */
async function measure(
  ways: Record<string, Way>,
  calls: number,
  askOf: (way: Way) => Ask,
): Promise<Record<string, number>> {
  const times: Record<string, number[]> = Object.fromEntries(Object.keys(ways).map((name) => [name, []]));
  for (let n = 0; n <= rounds; n += 1)
    for (const [name, way] of Object.entries(ways)) {
      const p50 = at(await timed(calls, () => way.send(askOf(way))), 0.5);
      // The first round is for warming up.
      if (n > 0) times[name]?.push(p50);
    }
  return Object.fromEntries(Object.entries(times).map(([name, all]) => [name, median(all)]));
}

function print(what: string, over: string, times: Record<string, number>, than: string): void {
  const [one = 0, other = 0] = [times[over], times[than]];
  const text = `${one.toFixed(2)} ms ${over}, ${other.toFixed(2)} ms ${than}`;
  console.log(`${what}: p50 ${text}, ratio ${(one / other).toFixed(2)}`);
}

async function download(
  ways: Record<string, Way>,
  programs: Record<string, Running>,
  file: string,
): Promise<void> {
  const names = Object.keys(ways);
  const speeds: Record<string, number[]> = Object.fromEntries(names.map((name) => [name, []]));
  const used: Record<string, Record<string, number>> = Object.fromEntries(names.map((name) => [name, {}]));
  const cpuOf = () => Object.entries(programs).map(([name, { pid }]) => [name, cost(pid).cpu] as const);
  for (let n = 0; n < downloads; n += 1)
    for (const [name, { send, machine }] of Object.entries(ways)) {
      const before = Object.fromEntries(cpuOf());
      const path = `/machines/${machine}/files/download?path=${file}`;
      const [ms = 0] = await timed(1, () => send({ method: 'GET', path }));
      speeds[name]?.push(bytes / 1024 ** 2 / (ms / 1000));
      const sums = used[name] ?? {};
      for (const [one, cpu] of cpuOf()) sums[one] = (sums[one] ?? 0) + (cpu - (before[one] ?? 0)) / downloads;
    }
  for (const [name, speed] of Object.entries(speeds)) {
    const cpu = Object.entries(used[name] ?? {}).map(([one, seconds]) => `${one} ${seconds.toFixed(2)}`);
    console.log(`1 GiB ${name}: ${Math.round(median(speed))} MiB/s, CPU seconds: ${cpu.join(', ')}`);
  }
  const ratios = (speeds.forwarded ?? []).map((speed, n) => speed / (speeds.local?.[n] ?? 0));
  console.log(
    `1 GiB: speed of a forwarded download divided by that of a local one: ${median(ratios).toFixed(2)} (${ratios.map((one) => one.toFixed(2)).join(', ')})`,
  );
}

async function measureAll(folder: string, all: Record<string, Way>): Promise<void> {
  const { local, forwarded } = all;
  if (!local || !forwarded) throw new Error('two brokers are needed');
  const stat = ({ machine }: Way): Ask => ({
    method: 'GET',
    path: `/machines/${machine}/files/stat?path=/etc`,
  });
  print('stat', 'forwarded', await measure({ local, forwarded }, statCalls, stat), 'local');
  const times = await measure(all, trueCalls, ({ machine }) => ({
    method: 'POST',
    path: '/commands',
    body: JSON.stringify({ machine_id: machine, command: 'true', wait: 10_000 }),
  }));
  print('true', 'forwarded', times, 'local');
  print('true', 'postgres', times, 'sqlite');
  print('true', 'local', times, 'sqlite');
  const file = join(folder, 'file');
  writeFileSync(file, '');
  truncateSync(file, bytes);
  const programs = { owner: local.broker, front: forwarded.broker, agent: local.agent };
  await download({ local, forwarded }, programs, file);
}

await bench(async (folder) => {
  const postgres = await startPostgres(folder);
  try {
    await measureAll(folder, await startWays(folder, postgres));
  } finally {
    await postgres.stop();
  }
});
