// Kills each of three brokers on one PostgreSQL database with kill -9 under mixed load, and checks what they promise.
//
//   npx node scripts/soak/kill-brokers.ts --seeds 1-20 --out scripts/soak/results/kill-brokers.txt
//   npx node scripts/soak/kill-brokers.ts --agents 30 --simulated 3000
//
// A seed decides the order and the times of the kills. Needs Debian's package postgresql.
// The promises are those in check-promises.ts, and:
// - Agents are linked again in time.
// - Commands and terminals continue, and none of their output is missing.

import { appendFileSync, mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { bench } from '../bench/start-and-measure-programs.ts';
import { checkAll } from './check-promises.ts';
import { startLongRunning } from './long-commands-and-terminals.ts';
import { checkRelinks, measureRelinks, type Relinks } from './measure-relinks.ts';
import { startLoad } from './mixed-load.ts';
import { type System, startSystem } from './three-brokers.ts';
import { startReceiver } from './webhook-receiver.ts';

const { values } = parseArgs({
  options: {
    seeds: { type: 'string', default: '1' },
    agents: { type: 'string', default: '10' },
    simulated: { type: 'string', default: '300' },
    /** HH:MM in local time, after which no further seed is started. */
    until: { type: 'string' },
    out: { type: 'string' },
  },
});

const settleMs = 120_000;
/** Milliseconds within which 99 % of the agents of a killed broker must have a new link. */
const relinkMs = 20_000;
/** Milliseconds for which links are observed after a kill. */
const mostMs = 90_000;

type Print = (line: string) => void;

/** Returns a random number generator (mulberry32). The same seed gives the same numbers. */
function randomOf(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4_294_967_296;
  };
}

/** Parses a list of seeds such as `1,2,5` or `1-20`. */
function seedsOf(text: string): number[] {
  const [from = 0, to] = text.split('-').map(Number);
  return to === undefined
    ? text.split(',').map(Number)
    : Array.from({ length: to - from + 1 }, (_, n) => from + n);
}

/** Kills each broker once, and starts it again. */
async function killEach(
  { brokers, postgres, real }: System,
  random: () => number,
  print: Print,
): Promise<Relinks[]> {
  const order = brokers.map((broker) => ({ broker, at: random() })).sort((a, b) => a.at - b.at);
  const measured: Promise<Relinks>[] = [];
  for (const { broker } of order) {
    await sleep(4_000 + random() * 5_000);
    measured.push(
      measureRelinks(postgres, { peer: broker.peer, real, mostMs }, () => broker.signal('SIGKILL')),
    );
    const downMs = 1_000 + random() * 19_000;
    print(`  ${broker.name} killed, started again after ${Math.round(downMs)} ms`);
    await sleep(downMs);
    await broker.start();
  }
  await sleep(5_000);
  return await Promise.all(measured);
}

async function soak(seed: number, folder: string, print: Print): Promise<string[]> {
  mkdirSync(folder);
  const [agents, simulated] = [Number(values.agents), Number(values.simulated)];
  const system = await startSystem({ folder, agents, simulated, hasProxies: false });
  const receiver = await startReceiver();
  try {
    const { proxy, key, real, fleet, postgres } = system;
    const access = { url: proxy.url, key, folder };
    const long = await startLongRunning({ ...access, machines: real });
    const machines = { real, simulated: fleet?.machineIds ?? [] };
    const load = await startLoad({ ...access, ...machines, hook: receiver.url });
    const relinks = await killEach(system, randomOf(seed), print);
    const ofLong = await long.end(print);
    await load.stop(settleMs);
    const checks = { query: postgres.query, fleet, delivered: receiver.ids, settleMs, print };
    return [...(await checkAll(load, checks)), ...ofLong, ...checkRelinks(relinks, relinkMs, print)];
  } finally {
    receiver.close();
    await system.close();
  }
}

/** True once the time of --until has come. */
function isOver(): boolean {
  const { until } = values;
  return until !== undefined && new Date().toTimeString().slice(0, 5) >= until;
}

await bench(async (folder) => {
  const { out } = values;
  const print: Print = (line) => {
    console.log(line);
    if (out) appendFileSync(out, `${line}\n`);
  };
  let failed = 0;
  for (const seed of seedsOf(values.seeds)) {
    if (isOver()) break;
    print(`seed ${seed}: 3 brokers, ${values.agents} real and ${values.simulated} simulated agents`);
    const failures = await soak(seed, join(folder, `seed-${seed}`), print).catch((error: unknown) => [
      error instanceof Error ? error.message : String(error),
    ]);
    for (const failure of failures) print(`  FAILED ${failure}`);
    failed += failures.length;
  }
  if (failed > 0) throw new Error(`${failed} checks failed`);
  print('all checks passed');
});
