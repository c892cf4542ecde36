// Lists: the rows of several pages after a change, and filters that are in the address.
import type { Page } from 'playwright-core';
import { expect } from 'vitest';
import { joinScripted } from '../scripted-agent.ts';
import { browserTest, newLogin, startMachine, startWithConsole } from './browser.ts';

const numbers = Array.from({ length: 60 }, (_, n) => String(n).padStart(2, '0'));

/** Starts with 60 alert rules, whose list is open with both of its pages. */
async function startWithSixtyRules() {
  const system = await startWithConsole();
  for (const n of numbers)
    await system.client.alertRules.create({ name: `rule-${n}`, kind: 'memory', above: 90, for: 0 });
  const { page, faults, open } = await newLogin(system);
  await open('/alerts/rules');
  await page.getByRole('button', { name: 'More' }).click();
  return { page, faults };
}

/** Deletes a rule, and waits until its row has left the list. */
async function deleteRule(page: Page, name: string): Promise<void> {
  await page.getByRole('button', { name: `Delete ${name}` }).click();
  await page.getByRole('button', { name: 'Delete the rule' }).click();
  await page.getByRole('row', { name }).waitFor({ state: 'detached' });
}

browserTest('a rule changed on the second page of the list stays in view, with its new state', async () => {
  const { page, faults } = await startWithSixtyRules();
  await page.getByRole('button', { name: 'Turn off rule-59' }).click();
  await page.getByRole('button', { name: 'Turn on rule-59' }).waitFor();
  await page.getByRole('button', { name: 'Change rule-58' }).click();
  await page.getByLabel('Name', { exact: true }).fill('rule-58b');
  await page.getByRole('button', { name: 'Save' }).click();
  await page.getByRole('row', { name: /rule-58b/ }).waitFor();
  await deleteRule(page, 'rule-57');
  const rows = page.getByRole('row', { name: /rule-/ });
  await expect.poll(() => rows.count()).toBe(59);
  await deleteRule(page, 'rule-00');
  await expect.poll(() => rows.count()).toBe(58);
  expect(faults).toEqual([]);
});

browserTest('a list that cannot be loaded again says so, and its button loads it', async () => {
  const { page, faults } = await startWithSixtyRules();
  await page.getByRole('row', { name: /rule-59/ }).waitFor();
  const list = /alerts\/rules\?/;
  await page.route(list, (route) => route.fulfill({ status: 404, body: '{}' }));
  await page.getByRole('button', { name: 'Delete rule-00' }).click();
  await page.getByRole('button', { name: 'Delete the rule' }).click();
  await page.getByText('This data may be out of date').waitFor();
  await page.unroute(list);
  await page.getByRole('button', { name: 'Try again' }).click();
  await page.getByRole('row', { name: /rule-00/ }).waitFor({ state: 'detached' });
  expect(faults).toEqual([]);
});

browserTest(
  'a list of keys has all its loaded rows after a key was created and another revoked',
  async () => {
    const system = await startWithConsole();
    for (const n of numbers) await system.client.keys.create({ name: `key-${n}`, scopes: ['machines:read'] });
    const { page, faults, open } = await newLogin(system);
    await open('/keys');
    await page.getByRole('button', { name: 'More' }).click();
    const rows = page.getByRole('row', { name: /key-/ });
    await expect.poll(() => rows.count()).toBe(60);
    await page.getByRole('button', { name: 'New key' }).click();
    await page.getByLabel('Name', { exact: true }).fill('key-00b');
    await page.getByRole('button', { name: 'Create' }).click();
    await page.getByRole('button', { name: 'Done' }).click();
    await page.getByRole('row', { name: /key-00b/ }).waitFor();
    await expect.poll(() => rows.count()).toBe(61);
    await page.getByRole('button', { name: 'Revoke key-59' }).click();
    await page.getByRole('button', { name: 'Revoke the key' }).click();
    await page.getByRole('row', { name: /key-59/ }).waitFor({ state: 'detached' });
    await expect.poll(() => rows.count()).toBe(60);
    expect(faults).toEqual([]);
  },
);

browserTest('commands are filtered by status and machine, and the address has the filters', async () => {
  const system = await startWithConsole();
  const [web, db] = [await startMachine(system, 'web-1'), await startMachine(system, 'db-1')];
  const run = (machine_id: string, command: string) => system.client.commands.create({ machine_id, command });
  await run(web, 'echo web');
  await run(web, 'echo wrong; false');
  await run(db, 'echo db');
  const { page, faults, open } = await newLogin(system);
  const row = (name: RegExp) => page.getByRole('row', { name });
  await open('/commands');
  await row(/echo db/).waitFor();
  await page.getByRole('combobox', { name: 'Machine' }).fill('web');
  await page.getByRole('option', { name: /web-1/ }).click();
  await row(/echo db/).waitFor({ state: 'detached' });
  await page.getByLabel('Status').selectOption('Completed');
  await row(/echo wrong/).waitFor({ state: 'detached' });
  await row(/echo web/).waitFor();
  await page.reload();
  await row(/echo web/).waitFor();
  expect(await page.getByRole('row').count()).toBe(2);
  await page.getByLabel('Status').selectOption('Timed out');
  await page.getByText('No command matches the filters').waitFor();
  await page.getByLabel('Status').selectOption('Any status');
  await page.getByRole('button', { name: 'Deselect web-1' }).click();
  await row(/echo db/).waitFor();
  await open(`/machines/${web}/commands`);
  await row(/echo web/).waitFor();
  await page.getByLabel('Status').selectOption('Failed');
  await row(/echo web/).waitFor({ state: 'detached' });
  await row(/echo wrong/).waitFor();
  expect(faults).toEqual([]);
});

browserTest('the audit log is filtered by key and machine', async () => {
  const system = await startWithConsole();
  const [web, db] = [await startMachine(system, 'web-1'), await startMachine(system, 'db-1')];
  const deploy = await system.client.keys.create({ name: 'deploy', scopes: ['admin'] });
  for (const machine_id of [web, db]) {
    await system.client.commands.create({ machine_id, command: 'true' });
    const body = { machine_id, command: 'true' };
    await system.call('POST', '/commands', { key: deploy.key, body });
  }
  const { page, faults, open } = await newLogin(system);
  await open('/audit');
  const rows = page.getByRole('row', { name: /commands\.create/ });
  await expect.poll(() => rows.count()).toBe(4);
  await page.getByLabel('Key, by its full name').fill('deploy');
  await expect.poll(() => rows.count()).toBe(2);
  await page.getByRole('combobox', { name: 'Machine' }).fill('db');
  await page.getByRole('option', { name: /db-1/ }).click();
  await expect.poll(() => rows.count()).toBe(1);
  await page.reload();
  await expect.poll(() => rows.count()).toBe(1);
  await rows.filter({ hasText: 'deploy' }).filter({ hasText: 'db-1' }).waitFor();
  await page.getByLabel('Key, by its full name').fill('no-such-key');
  await page.getByText('Nothing that matches is recorded').waitFor();
  expect(faults).toEqual([]);
});

browserTest(
  'a list appears although each load of it takes longer than the time between two events',
  async () => {
    const system = await startWithConsole();
    const { machineId: machine_id } = await joinScripted(system, 'web-1');
    const { page, open, faults } = await newLogin(system);
    const row = page.getByRole('row', { name: /make it/ }).first();
    await page.route('**/api/v1/commands?**', async (route) => {
      const response = await route.fetch({ headers: { authorization: `Bearer ${system.key}` } });
      setTimeout(() => void route.fulfill({ response }).catch(() => {}), 2_500);
    });
    await open('/commands');
    let isThere = false;
    const seen = row.waitFor().finally(() => {
      isThere = true;
    });
    while (!isThere) {
      const { id } = await system.client.commands.create({
        ...{ machine_id, command: 'make it', queue_for: 60_000, wait: 0 },
      });
      await system.client.commands.cancel({ command_id: id });
    }
    await seen;
    expect(faults).toEqual([]);
  },
);

browserTest(
  'a page loads its data again if its first live stream opened only at a later attempt',
  async () => {
    const system = await startWithConsole();
    const machine_id = await startMachine(system, 'web-1');
    const { page, open } = await newLogin(system);
    let isBlocked = true;
    await page.route('**/api/v1/live**', (route) => (isBlocked ? route.abort() : route.continue()));
    await open(`/machines/${machine_id}`);
    await page.getByRole('heading', { name: /web-1/, level: 1 }).waitFor();
    await page.getByText('The page may be out of date').waitFor();
    await system.client.machines.update({ machine_id, name: 'web-2' });
    isBlocked = false;
    await page.getByRole('heading', { name: /web-2/, level: 1 }).waitFor();
  },
);
