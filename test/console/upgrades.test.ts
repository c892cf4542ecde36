// The console's pages of upgrades: why a machine cannot be upgraded, the live progress of an upgrade, and cancelling.
import { expect, inject } from 'vitest';
import { startUpgradeSystem } from '../upgrades-fixture.ts';
import { browserTest, newLogin, startMachine, startWithConsole } from './browser.ts';

browserTest(
  'the form says why a machine cannot be upgraded, and the upgrade lists it as skipped',
  async () => {
    const system = await startWithConsole();
    const machine = await startMachine(system, 'web-1', 'web');
    const { page, faults, open } = await newLogin(system);
    await open('/upgrades');
    await page.getByText('No agent was upgraded from here yet').waitFor();
    await open(`/upgrades/new?machine=${machine}`);
    await page.getByText('0 of 1 can be upgraded').waitFor();
    const { upgrade } = await system.client.machines.get({ machine_id: machine, include: 'upgrade' });
    await page.getByText(`web-1: ${upgrade?.message}`).waitFor();
    await page.getByLabel('Machines per wave').fill('0%');
    await page.getByRole('button', { name: 'Upgrade', exact: true }).click();
    await page.getByRole('alert').getByText('must be a number of machines').waitFor();
    await page.getByLabel('Machines per wave').fill('50%');
    await page.getByLabel('Version').fill('9.9.9');
    await page.getByRole('button', { name: 'Upgrade', exact: true }).click();
    await page.getByRole('heading', { name: 'Upgrade to 9.9.9' }).waitFor();
    await page.getByRole('row', { name: /web-1/ }).getByText('skipped').waitFor();
    // No machine was upgraded, so the state has the colour of a warning, as in the list of upgrades.
    await page.locator('h1 .state.warn', { hasText: 'completed' }).waitFor();
    const { items } = await system.client.upgrades.list();
    expect(items).toMatchObject([{ version: '9.9.9', wave: '50%', pause: 60_000, max_failures: 0 }]);
    expect(faults).toEqual([]);
  },
);

browserTest('the form says how many machines it has not checked', async () => {
  const system = await startWithConsole();
  const { page, faults, open } = await newLogin(system);
  const upgrade = { possible: false, reason: 'not_supported', message: 'it cannot replace itself' };
  await page.route('**/api/v1/machines?*tags=web*', (route) => {
    const data = [{ id: 'mach_1', name: 'web-1', upgrade }];
    return route.fulfill({ json: { data, meta: { total: 150, limit: 100, offset: 0, has_more: true } } });
  });
  await open('/upgrades/new');
  await page.getByRole('button', { name: 'Tags' }).click();
  await page.getByLabel('Tags', { exact: true }).fill('web');
  await page.getByText('0 of 1 can be upgraded').waitFor();
  await page.getByText('Not checked: 149').waitFor();
  expect(faults).toEqual([]);
});

browserTest('the progress of each machine appears by itself, and the rest is cancelled', async () => {
  const system = await startUpgradeSystem({ tuning: { console: inject('consoleFolder') } });
  await system.upload('9.0.0');
  const [first, second] = [await system.machine('web-1'), await system.machine('web-2')];
  const { id } = await system.upgrade({ machine_ids: [first.id, second.id], wave: '1', pause: 60_000 });
  const { page, faults, open } = await newLogin(system);
  await open(`/upgrades/${id}`);
  const row = (name: string) => page.getByRole('row', { name: new RegExp(name) });
  await page.getByText('Wave 1 of 2').waitFor();
  await row('web-2').getByText('waiting').waitFor();
  await first.upgrade();
  await row('web-1').getByText('upgraded').waitFor();
  await page.getByText('1 of 2', { exact: true }).waitFor();
  await page.getByRole('button', { name: 'Cancel' }).click();
  await page.getByRole('button', { name: 'Cancel the upgrade' }).click();
  await row('web-2').getByText('cancelled').waitFor();
  await page.getByRole('button', { name: 'Upgraded' }).click();
  await row('web-2').waitFor({ state: 'detached' });
  await row('web-1').waitFor();
  await open('/upgrades');
  await page
    .getByRole('row', { name: /9\.0\.0/ })
    .getByText('cancelled')
    .first()
    .waitFor();
  expect(faults).toEqual([]);
});
