// Measures the console in Chromium, and compares the figures with their limits.
//
//   npx node scripts/bench/console.ts --out scripts/bench/results/console.txt     all parts, 4 to 5 minutes
//   npx node scripts/bench/console.ts --only actions,terminal
//
// Parts: memory, loads, slow, actions, uploads, terminal, fleet (10,000 machines; needs `ulimit -n 20000`).
// Needs Linux and Debian's package chromium.
//
// Machines are simulated, except the one for files and terminals. Browser, broker and agents share the same cores.
import { mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { parseArgs } from 'node:util';
import type { Browser } from 'playwright-core';
import { Farhand as Client } from '../../shared/sdk/index.ts';
import { buildConsole } from '../build-console.ts';
import { type ConsoleBench, Limits } from './console/broker-tab-and-limits.ts';
import { measureBrokerMemory, measureLoads } from './console/first-load-and-memory.ts';
import { act } from './console/key-and-click-times.ts';
import { measureLargeFleet, measureSlowPage } from './console/machines-page.ts';
import { launchChromium, Tab } from './console/measured-tab.ts';
import { floodTerminal } from './console/terminal.ts';
import { uploadFiles } from './console/uploads.ts';
import { BrokerProcess } from './fleet/broker-process.ts';
import { FleetOfAgents } from './fleet/fleet-of-agents.ts';
import { bench, startAgent } from './start-and-measure-programs.ts';

const { values } = parseArgs({
  options: {
    only: { type: 'string', default: 'memory,loads,slow,actions,uploads,terminal,fleet' },
    scale: { type: 'string', default: '10000' },
    out: { type: 'string' },
  },
});
const wanted = values.only.split(',');
const large = Number(values.scale);
const few = 100;

/** The parts of this bench that run with a hundred machines, in this order. */
const parts: [name: string, measure: (consoleBench: ConsoleBench) => Promise<void>][] = [
  ['loads', measureLoads],
  ['slow', measureSlowPage],
  ['actions', act],
  ['uploads', uploadFiles],
  ['terminal', floodTerminal],
];

async function main(folder: string): Promise<void> {
  const figures = new Limits(values.out);
  figures.line(`${new Date().toISOString()} node ${process.version} ${process.argv.slice(2).join(' ')}`);
  await buildConsole();
  const browser = await launchChromium();
  figures.line(`Chromium ${browser.version()}`);
  try {
    if (wanted.some((name) => name !== 'fleet')) await measureFew(folder, figures, browser);
    if (wanted.includes('fleet')) await measureMany(folder, figures, browser);
  } finally {
    await browser.close();
  }
  figures.print();
}

async function measureFew(folder: string, figures: Limits, browser: Browser): Promise<void> {
  const broker = await BrokerProcess.start({ dataDir: join(folder, 'few'), machines: few + 1 });
  const writable = join(folder, 'writable');
  mkdirSync(writable);
  const { id, agent } = await startMachine(folder, 'real', broker);
  const real = { id, folder: writable };
  const newTab = (): Promise<Tab> => Tab.open(browser, broker.http, broker.key);
  const consoleBench = { broker, figures, machines: few, real, folder };
  if (wanted.includes('memory')) await measureMemory(consoleBench, newTab).catch(failed(figures, 'memory'));
  const agents = await FleetOfAgents.start({
    brokers: [broker.grpc],
    agents: few,
    joinToken: broker.joinToken,
  });
  try {
    for (const [name, measure] of parts) {
      if (!wanted.includes(name)) continue;
      const tab = await newTab();
      await measure({ ...consoleBench, tab }).catch(failed(figures, name));
      await tab.close();
    }
  } finally {
    await agents.close();
    process.kill(agent.pid);
    await broker.stop('SIGTERM');
  }
}

async function startMachine(folder: string, name: string, { http, grpc, key, joinToken }: BrokerProcess) {
  const agent = await startAgent(folder, name, grpc, joinToken);
  const { items } = await new Client({ baseUrl: http, apiKey: key, retries: 0 }).machines.list({ name });
  return { id: items[0]?.id ?? '', agent };
}

async function measureMemory(
  consoleBench: Omit<ConsoleBench, 'tab'>,
  newTab: () => Promise<Tab>,
): Promise<void> {
  const dataDir = join(consoleBench.folder, 'control');
  const broker = await BrokerProcess.start({ dataDir, machines: 1 });
  const { id, agent } = await startMachine(consoleBench.folder, 'control-machine', broker);
  try {
    await measureBrokerMemory(consoleBench, newTab, { broker, machine: id });
  } finally {
    process.kill(agent.pid);
    await broker.stop('SIGTERM');
  }
}

async function measureMany(folder: string, figures: Limits, browser: Browser): Promise<void> {
  const broker = await BrokerProcess.start({ dataDir: join(folder, 'many'), machines: large });
  const agents = await FleetOfAgents.start({
    brokers: [broker.grpc],
    agents: large,
    joinToken: broker.joinToken,
  });
  try {
    const tab = await Tab.open(browser, broker.http, broker.key);
    const consoleBench = { broker, figures, machines: large, real: { id: '', folder }, folder, tab };
    await measureLargeFleet(consoleBench).catch(failed(figures, 'fleet'));
    await tab.close();
  } finally {
    await agents.close();
  }
}

const failed =
  (figures: Limits, part: string) =>
  (error: unknown): void =>
    figures.failure(part, error);

await bench(main);
