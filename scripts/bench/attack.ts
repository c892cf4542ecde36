// Attacks a broker in several ways. Measures the memory of the broker, and how long a well-behaved client waits for
// answers.
//
//   npx node scripts/bench/attack.ts                            takes eight minutes
//   npx node scripts/bench/attack.ts --seconds 3 --rest 5 --only "rapid reset"
//
// The attacker runs on the same machine, so it also uses CPU that the broker needs.
import { setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { assaults } from './attack/attacker-process.ts';
import { Table } from './compare-programs-in-turns.ts';
import { type Probed, Prober } from './fleet/http-load.ts';
import { describeProbe } from './fleet/print-figures.ts';
import { bench, cost, type Farhand, program, startFarhand } from './start-and-measure-programs.ts';

const everyMs = 20;

const { values } = parseArgs({
  options: {
    seconds: { type: 'string', default: '5' },
    rest: { type: 'string', default: '30' },
    only: { type: 'string', default: '' },
  },
});

interface Felt {
  probed: Probed;
  peak: number;
}

/** Sends read requests to the broker for a number of seconds. Also measures the highest memory of the broker. */
async function reading({ http, key, broker }: Farhand, seconds: number): Promise<Felt> {
  const prober = new Prober(http, '/api/v1/machines', key);
  let peak = 0;
  for (const end = performance.now() + seconds * 1_000; performance.now() < end; await sleep(everyMs))
    peak = Math.max(peak, cost(broker.pid).rss);
  return { probed: await prober.stop(), peak };
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
    'read requests during the attack',
    'RSS of the broker before the attack / its peak',
    'RSS after a rest',
  ]);
  const target = { http: endpoint(farhand.http), grpc: endpoint(farhand.grpc), key: farhand.key };
  const row = (name: string, { probed, peak }: Felt, before: number): void => {
    const after = cost(farhand.broker.pid).rss;
    const felt = describeProbe(probed);
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
