// Lists of several pages: their rows after a change.
import { expect } from 'vitest';
import { browserTest, newLogin, startWithConsole } from './browser.ts';

const numbers = Array.from({ length: 60 }, (_, n) => String(n).padStart(2, '0'));

browserTest('a rule changed on the second page of the list stays in view, with its new state', async () => {
  const system = await startWithConsole();
  for (const n of numbers)
    await system.client.alertRules.create({ name: `rule-${n}`, kind: 'memory', above: 90, for: 0 });
  const { page, faults, open } = await newLogin(system);
  await open('/alerts/rules');
  await page.getByRole('button', { name: 'More' }).click();
  await page.getByRole('button', { name: 'Turn off rule-59' }).click();
  await page.getByRole('button', { name: 'Turn on rule-59' }).waitFor();
  await page.getByRole('button', { name: 'Change rule-58' }).click();
  await page.getByLabel('Name', { exact: true }).fill('rule-58b');
  await page.getByRole('button', { name: 'Save' }).click();
  await page.getByRole('row', { name: /rule-58b/ }).waitFor();
  await page.getByRole('button', { name: 'Delete rule-57' }).click();
  await page.getByRole('button', { name: 'Delete the rule' }).click();
  await page.getByRole('row', { name: /rule-57/ }).waitFor({ state: 'detached' });
  const rows = page.getByRole('row', { name: /rule-/ });
  await expect.poll(() => rows.count()).toBe(59);
  await page.getByRole('button', { name: 'Delete rule-00' }).click();
  await page.getByRole('button', { name: 'Delete the rule' }).click();
  await page.getByRole('row', { name: /rule-00/ }).waitFor({ state: 'detached' });
  await expect.poll(() => rows.count()).toBe(58);
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
