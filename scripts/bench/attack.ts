// Attacks a broker in several ways. Measures the memory of the broker, and how long a well-behaved client waits for
// answers.
//
//   npx node scripts/bench/attack.ts                            takes eight minutes
//   npx node scripts/bench/attack.ts --seconds 3 --rest 5 --only "rapid reset"
//
// The attacker runs on the same machine, so it also uses CPU that the broker needs.
import { Agent, get } from 'node:http';
import { setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { assaults } from './attack/attacker-process.ts';
import { p50AndP99, Table } from './compare-programs-in-turns.ts';
import { bench, cost, type Farhand, program, startFarhand } from './start-and-measure-programs.ts';

const everyMs = 20;
const readTimeoutMs = 5_000;

const { values } = parseArgs({
  options: {
    seconds: { type: 'string', default: '5' },
    rest: { type: 'string', default: '30' },
    only: { type: 'string', default: '' },
  },
});

/**
 * Sends one read request over a persistent connection. Returns its duration in milliseconds, or `readTimeoutMs` if the
 * request fails or is not answered in time.
 */
function read({ http, key }: Farhand, agent: Agent): Promise<number> {
  const begun = performance.now();
  return new Promise((resolve) => {
    const headers = { Authorization: `Bearer ${key}` };
    const asked = get(`${http}/api/v1/machines`, { agent, headers, timeout: readTimeoutMs }, (answer) => {
      answer.resume().once('end', () => resolve(performance.now() - begun));
    });
    asked.once('timeout', () => asked.destroy());
    asked.once('error', () => resolve(readTimeoutMs));
  });
}

interface Felt {
  times: number[];
  peak: number;
}

/**
 * Sends read requests to the broker for a number of seconds. Each is sent at a fixed time, even if earlier ones are not
 * answered yet.
 */
async function reading(farhand: Farhand, seconds: number): Promise<Felt> {
  const agent = new Agent({ keepAlive: true });
  const reads: Promise<number>[] = [];
  let peak = 0;
  const end = performance.now() + seconds * 1_000;
  for (let due = performance.now(); due < end; due += everyMs) {
    await sleep(Math.max(0, due - performance.now()));
    reads.push(read(farhand, agent));
    peak = Math.max(peak, cost(farhand.broker.pid).rss);
  }
  const times = (await Promise.all(reads)).sort((a, b) => a - b);
  agent.destroy();
  return { times, peak };
}

function endpoint(address: string): { host: string; port: number } {
  const { hostname: host, port } = new URL(address.includes('://') ? address : `tcp://${address}`);
  return { host, port: Number(port) };
}

await bench(async (folder) => {
  const farhand = await startFarhand(folder);
  const seconds = Number(values.seconds);
  const table = new Table([
    'attack',
    'read requests during the attack: p50 / p99',
    'RSS of the broker before the attack / its peak',
    'RSS after a rest',
  ]);
  const target = { http: endpoint(farhand.http), grpc: endpoint(farhand.grpc), key: farhand.key };
  const row = (name: string, { times, peak }: Felt, before: number): void => {
    const after = cost(farhand.broker.pid).rss;
    const felt = p50AndP99(times);
    const [was, most, is] = [before, peak, after].map((rss) => `${Math.round(rss)}`);
    table.row(name, felt, `${was} / ${most} MiB`, `${is} MiB`);
    console.error(`${name}: ${felt}, ${was}, ${most}, ${is} MiB`);
  };
  // Waits until the broker has released the memory of its start, so that the first row does not include it.
  await sleep(Number(values.rest) * 1_000);
  row('none', await reading(farhand, seconds), cost(farhand.broker.pid).rss);
  for (const name of Object.keys(assaults).filter((one) => one.includes(values.only))) {
    const before = cost(farhand.broker.pid).rss;
    const attacker = await program(
      'scripts/bench/attack/attacker-process.ts',
      [name, JSON.stringify(target)],
      'attacking',
    );
    const felt = await reading(farhand, seconds);
    process.kill(-attacker.pid, 'SIGKILL');
    await sleep(Number(values.rest) * 1_000);
    row(name, felt, before);
  }
  table.print();
});
