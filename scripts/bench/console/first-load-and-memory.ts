// Measures how many bytes the first load transfers, and how much memory the console costs the broker.
import { readdirSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { consoleFolder } from '../../build-console.ts';
import type { BrokerProcess } from '../fleet/broker-process.ts';
import type { ConsoleBench } from './broker-tab-and-limits.ts';

/** Milliseconds at rest after which the broker has returned its unused memory. */
const restMs = 22_000;
const joinedMs = 3_000;

export async function measureLoads({ tab, figures }: ConsoleBench): Promise<void> {
  // The machines have just joined, and the open page then reads its list again. Waits for this request, which must not
  // count.
  await sleep(joinedMs);
  await tab.page.goto('about:blank');
  const client = await tab.page.context().newCDPSession(tab.page);
  await client.send('Network.enable');
  await client.send('Network.setCacheDisabled', { cacheDisabled: true });
  const requests = new Map<string, { type: string; bytes: number; path: string }>();
  client.on('Network.responseReceived', ({ requestId, type, response: { url } }) =>
    requests.set(requestId, { type, bytes: 0, path: new URL(url).pathname }),
  );
  client.on('Network.loadingFinished', ({ requestId, encodedDataLength }) => {
    const request = requests.get(requestId);
    if (request) request.bytes = encodedDataLength;
  });
  await tab.goto('/machines');
  await tab.firstRows();
  await sleep(1_000);
  await client.detach();
  const kilobytes = (type: string): number =>
    [...requests.values()].filter((one) => one.type === type).reduce((sum, { bytes }) => sum + bytes, 0) /
    1_000;
  figures.line(`requests: ${[...requests.values()].map(({ path }) => path).join(' ')}`);
  figures.most('first load of Machines: requests', requests.size, 6, 'requests');
  figures.most('first load of Machines: scripts', kilobytes('Script'), 60, 'KB');
  figures.most('first load of Machines: style sheets', kilobytes('Stylesheet'), 10, 'KB');
  const assets = join(consoleFolder, 'assets');
  const all = readdirSync(assets).filter((name) => name.endsWith('.js.gz'));
  const sum = all.reduce((bytes, name) => bytes + statSync(join(assets, name)).size, 0) / 1_000;
  figures.most('scripts of all pages together, gzip', sum, 340, 'KB');
}

const tour = [
  '/machines',
  '/inventory',
  '/run',
  '/commands',
  '/batches',
  '/join',
  '/schedules',
  '/events',
  '/webhooks',
  '/audit',
  '/keys',
  '/profile',
];

/** A second broker with one machine, for comparison. No browser connects to it. */
export interface Control {
  broker: BrokerProcess;
  /** Id of the only machine that is linked to this broker. */
  machine: string;
}

/**
 * Measures how much memory the console costs a broker: the growth of one broker, minus that of a second broker, which
 * gets the same API requests without a browser.
 */
export async function measureBrokerMemory(
  { broker, figures, real }: Omit<ConsoleBench, 'tab'>,
  newTab: () => Promise<ConsoleBench['tab']>,
  control: Control,
): Promise<void> {
  const brokers = [broker, control.broker];
  await sleep(restMs);
  const before = brokers.map((one) => one.memory());
  const tab = await newTab();
  /**
   * The API requests of the browser: one array for each page. Afterwards they are sent to the second broker, all
   * requests of a page at the same time.
   */
  const asked: string[][] = [];
  tab.page.on('request', (request) => {
    const { pathname, search } = new URL(request.url());
    const isList = request.method() === 'GET' && pathname.startsWith('/api/') && !pathname.endsWith('/live');
    if (isList) asked.at(-1)?.push(pathname + search);
  });
  const files = `/machines/${real.id}/files?path=${encodeURIComponent(real.folder)}`;
  for (const path of [...tour, `/machines/${real.id}`, files, `/machines/${real.id}/terminals`]) {
    asked.push([]);
    await tab.goto(path);
    await tab.page.waitForLoadState('networkidle', { timeout: 2_000 }).catch(() => undefined);
  }
  await tab.close();
  const headers = { authorization: `Bearer ${control.broker.key}` };
  const ask = async (path: string): Promise<void> => {
    const answer = await fetch(control.broker.http + path.replaceAll(real.id, control.machine), { headers });
    await answer.arrayBuffer();
  };
  for (const paths of asked) await Promise.all(paths.map(ask));
  await sleep(restMs);
  const [withConsole = 0, without = 0] = brokers.map((one, n) => one.memory() - (before[n] ?? 0));
  figures.line(
    `broker: ${withConsole.toFixed(1)} MiB more after a browser opened all pages, ${without.toFixed(1)} MiB more after the same requests without a browser`,
  );
  figures.most(
    'private memory of the broker at rest: growth when a browser opens all pages, minus growth by the same requests without a browser',
    withConsole - without,
    5,
    'MiB',
  );
}
