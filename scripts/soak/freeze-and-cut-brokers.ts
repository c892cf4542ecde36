// Freezes brokers, cuts their connections, kills their database and revokes keys under load, and checks the outcome of
// each step.
//
//   npx node scripts/soak/freeze-and-cut-brokers.ts --out scripts/soak/results/freeze-and-cut-brokers.txt
//   npx node scripts/soak/freeze-and-cut-brokers.ts --only revoke,restart-database --agents 3 --simulated 0
//
// Steps: vanish, freeze, cut-from-database, cut-from-peers, restart-database, revoke.
// After the last step, check-promises.ts checks the three brokers. Needs Debian's package postgresql.

import { appendFileSync, mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { bench } from '../bench/start-and-measure-programs.ts';
import { checkAll } from './check-promises.ts';
import { steps } from './fault-steps.ts';
import { startLongRunning } from './long-commands-and-terminals.ts';
import { startLoad } from './mixed-load.ts';
import { type System, startSystem } from './three-brokers.ts';
import { startReceiver } from './webhook-receiver.ts';

const { values } = parseArgs({
  options: {
    only: { type: 'string', default: Object.keys(steps).join(',') },
    agents: { type: 'string', default: '10' },
    simulated: { type: 'string', default: '300' },
    out: { type: 'string' },
  },
});

const settleMs = 180_000;
/** Milliseconds of undisturbed load before each step. */
const betweenMs = 5_000;
/** Longest time to wait for the links of all machines before a step, in milliseconds. */
const linkedMs = 90_000;
/**
 * `grace_period` of the terminals, in milliseconds. Terminals must survive steps that last longer than the default of
 * 30 s.
 */
const graceMs = 300_000;

/** Waits until every machine has a link, because the previous step may have moved machines to other brokers. */
async function untilAllLinked({ postgres }: System): Promise<void> {
  for (const until = Date.now() + linkedMs; Date.now() < until; await sleep(500)) {
    const left = await postgres.query('SELECT 1 FROM owners WHERE link_id IS NULL LIMIT 1');
    if (left.length === 0) return;
  }
  throw new Error(`some machines have no link after ${linkedMs} ms`);
}

await bench(async (parent) => {
  const print = (line: string): void => {
    console.log(line);
    if (values.out) appendFileSync(values.out, `${line}\n`);
  };
  const folder = join(parent, 'soak');
  mkdirSync(folder);
  const [agents, simulated] = [Number(values.agents), Number(values.simulated)];
  print(`3 brokers, ${agents} real and ${simulated} simulated agents`);
  const system = await startSystem({ folder, agents, simulated, hasProxies: true });
  const receiver = await startReceiver();
  try {
    const { proxy, key, real, fleet, postgres } = system;
    const access = { url: proxy.url, key, folder };
    const long = await startLongRunning({ ...access, machines: real, graceMs });
    const machines = { real, simulated: fleet?.machineIds ?? [] };
    const load = await startLoad({ ...access, ...machines, hook: receiver.url });
    const failures: string[] = [];
    for (const name of values.only.split(',')) {
      const step = steps[name];
      if (!step)
        throw new Error(`--only: there is no step ${name}; the steps are ${Object.keys(steps).join(', ')}`);
      await sleep(betweenMs);
      await untilAllLinked(system);
      print(name);
      const found = await step(system, print).catch((error: unknown) => [`${name}: ${String(error)}`]);
      for (const failure of found) print(`  FAILED ${failure}`);
      failures.push(...found);
    }
    print('after all steps');
    const ofLong = await long.end(print);
    await load.stop(settleMs);
    const checks = { query: postgres.query, fleet, delivered: receiver.ids, settleMs, print };
    const atEnd = [...(await checkAll(load, checks)), ...ofLong];
    for (const failure of atEnd) print(`  FAILED ${failure}`);
    failures.push(...atEnd);
    if (failures.length > 0) throw new Error(`${failures.length} checks failed`);
    print('all checks passed');
  } finally {
    receiver.close();
    await system.close();
  }
});
