// The console's list of machines: it updates itself, transfers little, and has its filters in the address.
import type { Locator } from 'playwright-core';
import { expect } from 'vitest';
import { shared } from '../close-after-tests.ts';
import {
  browserTest,
  newCookie,
  newLogin,
  newWindowWith,
  restart,
  setVisibility,
  startMachine,
  startWithConsole,
} from './browser.ts';

/** A broker with three online machines. */
const fleet = shared(async () => {
  const system = await startWithConsole();
  await Promise.all([
    system.agent({ name: 'web-1', tags: 'web' }),
    system.agent({ name: 'db-1', tags: 'db' }),
    system.agent({ name: 'needle-7' }),
  ]);
  return system;
});

browserTest('machines appear, change and go offline by themselves', async () => {
  const system = await startWithConsole();
  const { page, faults } = await newLogin(system);
  await page.getByText('No machine has joined yet').waitFor();
  const agent = await system.agent({ name: 'web-1', tags: 'web' });
  await page.getByRole('link', { name: 'web-1' }).waitFor();
  const row = page.getByRole('row', { name: /web-1/ });
  await row.getByText('online').waitFor();
  await row.getByText(/\d+ %/).first().waitFor();
  await agent.close();
  await row.getByText('offline').waitFor();
  expect(faults).toEqual([]);
});

browserTest('the page of a machine follows edits of its name and tags by others', async () => {
  const system = await startWithConsole();
  const machine_id = await startMachine(system, 'web-1', 'web');
  const { page, faults, load } = await newLogin(system);
  await load(`/machines/${machine_id}`);
  await page.getByText(/ cores?$/).waitFor();
  await system.client.machines.update({ machine_id, name: 'web-2', tags: ['web', 'eu'] });
  await page.getByRole('heading', { name: /^web-2.*eu/, level: 1 }).waitFor();
  expect(faults).toEqual([]);
});

browserTest('search, filters and order are in the address and survive a reload', async () => {
  const { page } = await newLogin(await fleet());
  await page.getByRole('link', { name: 'db-1' }).waitFor();
  await page.keyboard.press('/');
  // The field updates the address while the test types. That update must not undo what is typed meanwhile.
  await page.keyboard.type('WEB', { delay: 125 });
  await page.getByRole('link', { name: 'db-1' }).waitFor({ state: 'detached' });
  await page.waitForURL(/\?q=WEB$/);
  await page.getByRole('columnheader', { name: 'CPU' }).getByRole('button').click();
  await page.waitForURL(/sort=/);
  await page.reload();
  await page.getByRole('link', { name: 'web-1' }).waitFor();
  expect(await page.getByRole('columnheader', { name: 'CPU' }).getAttribute('aria-sort')).toBe('descending');
  expect(await page.getByRole('link', { name: 'db-1' }).count()).toBe(0);
});

browserTest('the first load is six requests, 60 KB of script and 10 KB of style', async () => {
  const system = await fleet();
  // A change of status is recorded as an event two seconds later, and this event makes an open page load its list
  // again. So the test waits for these events before it counts requests.
  const isSettled = async (): Promise<boolean> => {
    const { items: machines } = await system.client.machines.list();
    const { items: events } = await system.client.events.list({ limit: 100, sort: '-created_at' });
    return machines.every(({ id, status }) => {
      const last = events.find(({ type, data }) => type.endsWith('line') && data.machine_id === id);
      return last?.type === `machine.${status}`;
    });
  };
  await expect.poll(isSettled).toBe(true);
  // Counts the requests of a new window. In an earlier window, late answers would be counted too.
  const { page, open } = await newWindowWith(await newCookie(system), system);
  const client = await page.context().newCDPSession(page);
  await client.send('Network.enable');
  await client.send('Network.setCacheDisabled', { cacheDisabled: true });
  // A slow CPU must not cause more requests, such as a second live stream for a page that is drawn late.
  await client.send('Emulation.setCPUThrottlingRate', { rate: 20 });
  const types = new Map<string, string>();
  const sizes: Record<string, number> = {};
  client.on('Network.responseReceived', ({ requestId, type, response }) => {
    // Leaves out the menu's request for other brokers, for which the page does not wait.
    if (!response.url.includes('/brokers?')) types.set(requestId, type);
  });
  client.on('Network.loadingFinished', ({ requestId, encodedDataLength }) => {
    const type = types.get(requestId) ?? '';
    sizes[type] = (sizes[type] ?? 0) + encodedDataLength;
  });
  await open('/machines');
  await page.getByRole('link', { name: 'web-1' }).waitFor();
  await expect.poll(() => types.size).toBe(6);
  // One of the six requests is the live stream. It also carries changed data, so changes cause no further request.
  const [machine] = (await system.client.machines.list({ name: 'needle-7' })).items;
  const machine_id = machine?.id ?? '';
  await system.client.machines.update({ machine_id, name: 'renamed' });
  await page.getByRole('link', { name: 'renamed' }).waitFor();
  await system.client.machines.update({ machine_id, name: 'needle-7' });
  await page.getByRole('link', { name: 'needle-7' }).waitFor();
  expect(types.size, [...types.values()].join()).toBe(6);
  expect(sizes.Script).toBeLessThan(60_000);
  expect(sizes.Stylesheet).toBeLessThan(10_000);
});

browserTest('a command runs on the selected machines, and its output arrives', async () => {
  const { page, faults } = await newLogin(await fleet());
  await page.getByLabel('Select web-1').check();
  await page.getByLabel('Select db-1').check();
  await page.getByRole('link', { name: 'Run a command' }).click();
  await page.getByLabel('Command').fill('echo "<b>hi</b>"; exit 4');
  await page.keyboard.press('Control+Enter');
  await page.getByRole('heading', { name: 'Batch' }).waitFor();
  await page.getByText('exit 4').nth(1).waitFor();
  await page.getByRole('link', { name: 'db-1' }).click();
  await page.getByText('<b>hi</b>').last().waitFor();
  expect(faults).toEqual([]);
});

browserTest('the palette finds a machine and opens it, by keys alone, and returns the focus', async () => {
  const { page } = await newLogin(await fleet());
  const link = page.getByRole('link', { name: 'needle-7' });
  await link.focus();
  await page.keyboard.press('Control+k');
  await page.getByRole('dialog', { name: 'Search' }).waitFor();
  await page.keyboard.press('Escape');
  await page.locator('a:focus', { hasText: 'needle-7' }).waitFor();
  await page.keyboard.press('Control+k');
  await page.getByRole('dialog', { name: 'Search' }).waitFor();
  await page.keyboard.type('need');
  await page.getByRole('option', { name: /needle-7/ }).waitFor();
  await page.keyboard.press('Enter');
  await page.getByRole('heading', { name: /needle-7/ }).waitFor();
});

browserTest('after a restart of the broker the page is live again by itself', async () => {
  const system = await startWithConsole();
  await system.agent({ name: 'web-1' });
  const { page } = await newLogin(system);
  const row = page.getByRole('row', { name: /web-1/ });
  await row.getByText('online').waitFor();
  await system.broker.close();
  await page.getByText('The page may be out of date').waitFor();
  await restart(system);
  await page.getByText('The page may be out of date').waitFor({ state: 'detached' });
  await row.getByText('online').waitFor();
  await system.agent({ name: 'web-2' });
  await page.getByRole('link', { name: 'web-2' }).waitFor();
});

browserTest(
  'the page of a machine that does not exist has nothing of the machine before, and Run takes only the machine of its link',
  async () => {
    const system = await fleet();
    const { items } = await system.client.machines.list({ sort: 'name' });
    const [db, , web] = items;
    const { page, faults, load } = await newLogin(system);
    await page.getByLabel('Select web-1').check();
    await page.getByRole('link', { name: 'db-1' }).click();
    await page.getByRole('heading', { name: 'db-1', level: 1 }).waitFor();
    await page.getByRole('link', { name: 'Run', exact: true }).last().click();
    await page.getByRole('heading', { name: 'Run a command' }).waitFor();
    await page.getByRole('button', { name: 'Run', exact: true }).waitFor();
    expect(new URL(page.url()).searchParams.get('machine')).toBe(db?.id);
    await page.getByText('web-1').waitFor({ state: 'detached' });

    await load(`/machines/${web?.id}`);
    await page.route(`**/api/v1/machines/${db?.id}`, (route) =>
      route.fulfill({
        status: 404,
        json: { error: { code: 'machine_not_found', message: 'gone', details: {} } },
      }),
    );
    await page.evaluate(`history.pushState(null, '', '/console/machines/${db?.id}')`);
    await page.evaluate(`dispatchEvent(new PopStateEvent('popstate'))`);
    await page.getByRole('heading', { name: 'Machine', level: 1 }).waitFor();
    expect(await page.getByRole('button', { name: 'Remove' }).count()).toBe(0);
    expect(faults).toEqual([]);
  },
);

browserTest(
  'a tab in the background has no live stream, and reads everything again in the foreground',
  async () => {
    const system = await startWithConsole();
    const { page, faults } = await newLogin(system);
    // A tab that is opened in the background is hidden from the start, so it gets no visibilitychange event.
    await page.addInitScript({ content: setVisibility('hidden') });
    // The first page may still be opening a stream, which must not be counted.
    const address = page.url();
    await page.goto('about:blank');
    let streams = 0;
    page.on('request', (request) => {
      if (request.url().includes('/live')) streams += 1;
    });
    await page.goto(address);
    await page.getByText('No machine has joined yet').waitFor();
    await system.agent({ name: 'web-1' });
    expect(streams).toBe(0);
    await page.evaluate(setVisibility('visible'));
    await page.getByRole('link', { name: 'web-1' }).waitFor();
    const ended = page.waitForEvent('requestfailed', (request) => request.url().includes('/live'));
    await page.evaluate(setVisibility('hidden'));
    await ended;
    await system.agent({ name: 'web-2' });
    await page.evaluate(setVisibility('visible'));
    await page.getByRole('link', { name: 'web-2' }).waitFor();
    expect(faults).toEqual([]);
  },
);

browserTest('on a narrow phone the state is in view beside a long name of a machine', async () => {
  const system = await startWithConsole();
  const id = await startMachine(system, 'build-worker-for-the-long-term-branch-in-frankfurt-17', 'web,eu');
  await system.client.commands.create({ machine_id: id, command: 'true' });
  const { page, faults, load } = await newLogin(system, { width: 375 });
  await page.setViewportSize({ width: 360, height: 740 });
  const rightEnd = async (locator: Locator): Promise<number> => {
    const box = await locator.boundingBox();
    return box ? box.x + box.width : Number.POSITIVE_INFINITY;
  };
  await load(`/machines/${id}`);
  expect(await rightEnd(page.getByText('online'))).toBeLessThan(360);
  await load('/machines?view=cards');
  expect(await rightEnd(page.getByRole('listitem').getByText('online'))).toBeLessThan(360);
  // Buttons beside a title go below it before the title is cut.
  await system.client.savedCommands.create({ name: 'uptime', argv: ['uptime'] });
  await page.setViewportSize({ width: 390, height: 740 });
  await load('/saved-commands');
  await page.getByRole('link', { name: 'Save a command' }).waitFor();
  const isCut = await page.evaluate<boolean>(
    `(({ scrollWidth, clientWidth }) => scrollWidth > clientWidth)(document.querySelector('h1 .cut'))`,
  );
  expect(isCut).toBe(false);
  await page.setViewportSize({ width: 360, height: 740 });
  await load('/commands');
  await page.getByRole('link', { name: /^build-worker/ }).waitFor();
  const frame = await rightEnd(page.getByRole('region', { name: 'Commands' }));
  expect(await rightEnd(page.getByRole('row').getByText('completed'))).toBeLessThan(frame);
  expect(faults).toEqual([]);
});
