// Measures one broker and a fleet of simulated agents: lists, changes, commands, cost at rest, return of all agents.
//
//   npx node scripts/bench/fleet.ts                                     100 machines, all parts
//   npx node scripts/bench/fleet.ts --scale 10000 --only rest,kill,batch --profile
//   npx node scripts/bench/fleet.ts --only history --rows 1000000 --out scripts/bench/results/history.txt
//
// Parts: cold, rest, lists, patch, at-once, batch, small-files, kill, cut, minute, history.
// Needs Linux, and `ulimit -n 20000` for 10,000 machines. Uses Debian's openssh-server if installed.
//
// The agents use the same cores as the broker, at a lower priority, and share no code with the broker but the protos.
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { Farhand as Client } from '../../shared/sdk/index.ts';
import { BrokerProcess } from './fleet/broker-process.ts';
import { runAtOnce, runColdCommands, runCommands } from './fleet/commands.ts';
import type { Fleet, FleetSettings } from './fleet/fleet-context.ts';
import { FleetOfAgents } from './fleet/fleet-of-agents.ts';
import { listHistory } from './fleet/history-lists.ts';
import {
  measureRest,
  restAfterInterruptions,
  returnAfterCut,
  returnAfterKill,
} from './fleet/links-at-rest-and-return.ts';
import { listMachines, patchMachine } from './fleet/list-and-patch-machines.ts';
import { Figures } from './fleet/print-figures.ts';
import { readSmallFiles } from './fleet/small-files.ts';
import { bench } from './start-and-measure-programs.ts';

const { values } = parseArgs({
  options: {
    scale: { type: 'string', default: '100' },
    only: {
      type: 'string',
      default: 'cold,rest,lists,patch,at-once,batch,small-files,kill,cut,minute,history',
    },
    seconds: { type: 'string', default: '1.5' },
    rest: { type: 'string', default: '15' },
    rows: { type: 'string', default: '1000000' },
    profile: { type: 'boolean', default: false },
    out: { type: 'string' },
  },
});

const baseMs = 22_000;

/**
 * The parts that need a fleet, in their order. `cold` and `rest` come first, because the load of other parts changes
 * their results.
 */
const parts: [name: string, measure: (fleet: Fleet) => Promise<void>][] = [
  ['cold', runColdCommands],
  ['rest', measureRest],
  ['lists', listMachines],
  ['patch', patchMachine],
  ['at-once', runAtOnce],
  ['batch', runCommands],
  ['small-files', readSmallFiles],
  ['kill', returnAfterKill],
  ['cut', returnAfterCut],
  ['minute', restAfterInterruptions],
];

const settings: FleetSettings = {
  scale: Number(values.scale),
  seconds: Number(values.seconds),
  restSeconds: Number(values.rest),
};
const wanted = values.only.split(',');

async function main(folder: string): Promise<void> {
  const figures = new Figures(values.out);
  figures.line(`${new Date().toISOString()} node ${process.version} ${process.argv.slice(2).join(' ')}`);
  if (wanted.includes('history')) {
    await listHistory(join(folder, 'history'), figures, Number(values.rows)).catch((error: unknown) =>
      figures.failure('history', error),
    );
  }
  if (parts.some(([name]) => wanted.includes(name))) await measureFleet(folder, figures);
  figures.print();
}

async function measureFleet(folder: string, figures: Figures): Promise<void> {
  const broker = await BrokerProcess.start({
    dataDir: join(folder, 'broker'),
    machines: settings.scale,
    profiled: values.profile,
  });
  // Waits until the broker has freed the memory that only its start needed, which takes 15 s at rest. `baseMiB` must
  // not include that memory.
  await sleep(baseMs);
  const baseMiB = broker.memory();
  const begun = performance.now();
  const agents = await FleetOfAgents.start({
    brokers: [broker.grpc],
    agents: settings.scale,
    joinToken: broker.joinToken,
  });
  try {
    const seconds = (performance.now() - begun) / 1000;
    figures.row(`${settings.scale} machines enrol and link`, `${seconds.toFixed(1)} s`);
    const client = new Client({ baseUrl: broker.http, apiKey: broker.key, retries: 0 });
    const fleet: Fleet = { broker, agents, client, figures, settings, baseMiB, folder };
    for (const [name, measure] of parts) {
      if (!wanted.includes(name)) continue;
      await profiled(name, fleet, measure).catch((error: unknown) => figures.failure(name, error));
    }
  } finally {
    await agents.close();
  }
}

/**
 * Parts that call profile() themselves. Some of them restart the broker, and others profile only a section of their
 * work.
 */
const ownProfiles = ['rest', 'batch', 'kill', 'cut'];

async function profiled(name: string, fleet: Fleet, measure: (fleet: Fleet) => Promise<void>): Promise<void> {
  if (ownProfiles.includes(name)) return measure(fleet);
  fleet.figures.profile(name, await fleet.broker.profile(() => measure(fleet)));
}

await bench(main);
