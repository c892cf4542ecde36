// What the first load transfers, and what the console costs the broker in memory.
import { readdirSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { consoleFolder } from '../../console.ts';
import type { World } from './world.ts';

/** After 15 s of rest the broker returns what it has used. */
const restMs = 22_000;
const joinedMs = 3_000;

export async function measureLoads({ tab, figures }: World): Promise<void> {
  // Machines that have just joined are read again.
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
  figures.most('the same: script', kilobytes('Script'), 60, 'KB');
  figures.most('the same: style', kilobytes('Stylesheet'), 10, 'KB');
  const assets = join(consoleFolder, 'assets');
  const all = readdirSync(assets).filter((name) => name.endsWith('.js.gz'));
  const sum = all.reduce((bytes, name) => bytes + statSync(join(assets, name)).size, 0) / 1_000;
  figures.most('scripts of all pages together, gzip', sum, 340, 'KB');
}

const tour = [
  '/machines',
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

/** Memory of the broker at rest before the first login, and after a tour of the pages. */
export async function measureBrokerMemory(
  world: Omit<World, 'tab'>,
  newTab: () => Promise<World['tab']>,
): Promise<void> {
  const { broker, figures, real } = world;
  await sleep(restMs);
  const before = broker.memory();
  const tab = await newTab();
  const files = `/machines/${real.id}/files?path=${encodeURIComponent(real.folder)}`;
  for (const path of [...tour, `/machines/${real.id}`, files, `/machines/${real.id}/terminals`]) {
    await tab.goto(path);
    await tab.page.waitForLoadState('networkidle', { timeout: 2_000 }).catch(() => undefined);
  }
  await tab.goto('/machines');
  await sleep(restMs);
  const open = broker.memory();
  await tab.close();
  await sleep(restMs);
  const after = broker.memory();
  figures.line(
    `broker: ${before.toFixed(1)} MiB before, ${open.toFixed(1)} with an open page, ${after.toFixed(1)} after`,
  );
  figures.most(
    'private memory of the broker at rest: after a tour of all pages, over before',
    after - before,
    5,
    'MiB',
  );
  figures.row('the same, while the page of machines is open', `${(open - before).toFixed(1)} MiB`);
}
