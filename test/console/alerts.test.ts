// The console's pages about alerts: a rule that opens an alert at once, the alert in the list and at its machine, the
// channel that sends it, and a maintenance window.
import { expect } from 'vitest';
import { soon } from '../alerts-fixture.ts';
import { startReceiver } from '../webhook-receivers.ts';
import { browserTest, newLogin, startMachine, startWithConsole } from './browser.ts';

browserTest('a rule is refused with the reason, then tested, created, changed and deleted', async () => {
  const system = await startWithConsole();
  await startMachine(system, 'web-1', 'web');
  await startMachine(system, 'db-1', 'db');
  const { page, faults, open } = await newLogin(system);
  await open('/alerts/rules');
  await page.getByText('Nothing is watched yet').waitFor();
  await page.getByRole('button', { name: 'New rule' }).first().click();
  await page.getByLabel('Name', { exact: true }).fill('memory');
  await page.getByLabel('Open an alert when').selectOption('memory');
  await page.getByLabel('Above, in %').fill('0');
  await page.getByText(/the rule would now open alerts for .*web-1 \(\d+ %\)/).waitFor();
  await page.getByLabel('Only machines tagged').fill('web');
  await page.getByText(/the rule would now open alerts for web-1 \(\d+ %\)\./).waitFor();
  await page.getByLabel('Above, in %').fill('100');
  await page.getByText('the rule would open no alert now').waitFor();
  await page.getByRole('button', { name: 'Create' }).click();
  await page.getByRole('alert').getByText('must be below 100').waitFor();
  await page.getByLabel('Above, in %').fill('0');
  await page.getByLabel('Alert after the condition has lasted').selectOption('60000');
  await page.getByRole('button', { name: 'Create' }).click();
  const row = page.getByRole('row', { name: /memory/ });
  await row.getByText('memory over 0 % for 1 min; resolves at 0 %').waitFor();
  await row.getByText('tagged web').waitFor();
  await page.getByRole('button', { name: 'Turn off memory' }).click();
  await row.getByText('off', { exact: true }).waitFor();
  await page.getByRole('button', { name: 'Change memory' }).click();
  await page.getByLabel('Repeat it').selectOption('900000');
  await page.getByRole('button', { name: 'Save' }).click();
  const rules = async () => (await system.client.alertRules.list()).items;
  await expect
    .poll(rules)
    .toMatchObject([
      { kind: 'memory', above: 0, for: 60_000, tags: ['web'], repeat_every: 900_000, enabled: false },
    ]);
  await page.getByRole('button', { name: 'Delete memory' }).click();
  await page.getByRole('button', { name: 'Delete the rule' }).click();
  await page.getByText('Nothing is watched yet').waitFor();
  expect(faults).toEqual([]);
});

browserTest('a rule about disks names the file system that it watches', async () => {
  const system = await startWithConsole();
  const { page, faults, open } = await newLogin(system);
  await open('/alerts/rules');
  await page.getByRole('button', { name: 'New rule' }).first().click();
  await page.getByLabel('Name', { exact: true }).fill('full');
  await page.getByLabel('Open an alert when').selectOption('disk');
  await page.getByText('the rule would open no alert now').waitFor();
  await page.getByLabel('Mount point, or * for the fullest file system').fill('/srv');
  await page.getByText('the rule would').waitFor({ state: 'detached' });
  await page.getByRole('button', { name: 'Create' }).click();
  const row = page.getByRole('row', { name: /full/ });
  await row.getByText('disk at /srv over 90 % for 5 min; resolves at 81 %').waitFor();
  await page.getByRole('button', { name: 'Change full' }).click();
  await page.getByLabel('Mount point, or * for the fullest file system').fill('*');
  await page.getByRole('button', { name: 'Save' }).click();
  await row.getByText('any disk over 90 % for 5 min; resolves at 81 %').waitFor();
  expect((await system.client.alertRules.list()).items).toMatchObject([{ kind: 'disk', mount: '*' }]);
  expect(faults).toEqual([]);
});

browserTest('an alert appears by itself, on its machine too, and is acknowledged with a note', async () => {
  const system = await startWithConsole();
  const machine = await startMachine(system, 'web-1', 'web');
  const { page, faults, open } = await newLogin(system);
  await open('/alerts');
  await page.getByText('No alert is open').waitFor();
  await system.client.alertRules.create({ name: 'memory', kind: 'memory', above: 0, for: 0 });
  await page.getByRole('button', { name: /^Acknowledge: memory usage of web-1/ }).click();
  await page.getByLabel('Note').fill('more is ordered');
  await page.getByRole('button', { name: 'Acknowledge', exact: true }).click();
  await page.getByText('No alert is open').waitFor();
  await page.getByRole('button', { name: 'Acknowledged' }).click();
  await page.getByRole('row', { name: /more is ordered/ }).waitFor();
  await system.client.alertRules.create({ name: 'again', kind: 'memory', above: 0, for: 0 });
  await open(`/machines/${machine}`);
  await page.getByText(/memory usage of web-1 is .*, opened/).waitFor();
  await page.getByRole('link', { name: 'Maintenance' }).click();
  await page.getByRole('list', { name: 'Chosen machines' }).getByText('web-1').waitFor();
  await page.getByLabel('Name', { exact: true }).fill('updates');
  await page.getByRole('button', { name: 'Create' }).click();
  await page
    .getByRole('row', { name: /updates/ })
    .getByText('now')
    .waitFor();
  const { items } = await system.client.maintenanceWindows.list();
  expect(items).toMatchObject([
    { name: 'updates', machine_ids: [machine], active_until: expect.any(String) },
  ]);
  await open(`/machines/${machine}`);
  await page.getByText('In maintenance').waitFor();
  // After a day the window is over. The open page notices it by its clock.
  await page.evaluate('(before => { Date.now = () => before() + 864e5; })(Date.now)');
  await page.getByText('In maintenance').waitFor({ state: 'detached' });
  expect(faults).toEqual([]);
});

browserTest('a channel is created and tested; its log has what was sent, and sends it again', async () => {
  const receiver = await startReceiver();
  const system = await startWithConsole(['--webhook-allow', '127.0.0.0/8'], { alerts: soon });
  const { page, faults, open } = await newLogin(system);
  await open('/alerts/channels');
  await page.getByText('No channel sends alerts yet').waitFor();
  await page.getByRole('button', { name: 'New channel' }).first().click();
  await page.getByLabel('Name', { exact: true }).fill('on call');
  await page.getByLabel('Address').fill(`http://127.0.0.1:${receiver.port}/services/T000/XXXX`);
  await page.getByRole('button', { name: 'Create' }).click();
  await page.getByText(`http://127.0.0.1:${receiver.port}/…`).waitFor();
  await page.getByRole('button', { name: 'Send a test' }).click();
  await page.getByText('Slack accepted the test').waitFor();
  expect(await receiver.heard(1)).toHaveLength(1);
  await system.client.alertRules.create({ name: 'memory', kind: 'memory', above: 0, for: 0 });
  await startMachine(system, 'web-1');
  await receiver.heard(2);
  await page.getByText('alert.notified').click();
  await page.getByText(/answer 200 in/).waitFor();
  await page.getByRole('button', { name: 'Send again' }).click();
  await receiver.heard(3);
  await page.getByRole('button', { name: 'Turn off' }).click();
  await page.getByRole('button', { name: 'Turn on' }).waitFor();
  await page.getByRole('button', { name: 'Delete' }).click();
  await page.getByRole('button', { name: 'Delete the channel' }).click();
  await page.getByText('No channel sends alerts yet').waitFor();
  expect(faults).toEqual([]);
});

browserTest('a key that may only read sees alerts and rules, and no buttons or channels', async () => {
  const system = await startWithConsole();
  await system.client.alertRules.create({ name: 'memory', kind: 'memory', above: 0, for: 0 });
  await startMachine(system, 'web-1');
  const { key } = await system.keyed(['machines:read']);
  const { page, faults, open } = await newLogin(system, { key });
  await open('/alerts');
  await page.getByRole('row', { name: /memory usage of web-1/ }).waitFor();
  expect(await page.getByRole('button', { name: /Acknowledge:/ }).count()).toBe(0);
  expect(await page.getByRole('link', { name: 'Channels' }).count()).toBe(0);
  await page.getByRole('link', { name: 'Rules' }).click();
  const row = page.getByRole('row', { name: /memory over 0 %/ });
  await row.waitFor();
  expect(await row.getByRole('button').count()).toBe(0);
  expect(faults).toEqual([]);
});

browserTest(
  'a value at which alerts end follows the limit if it is the default, and can be emptied',
  async () => {
    const system = await startWithConsole();
    const { client } = system;
    await client.alertRules.create({ name: 'memory', kind: 'memory', above: 90 });
    const { page, faults, open } = await newLogin(system);
    await open('/alerts/rules');
    const change = async (fields: Record<string, string>): Promise<void> => {
      await page.getByRole('button', { name: 'Change memory' }).click();
      for (const [label, value] of Object.entries(fields)) await page.getByLabel(label).fill(value);
      await page.getByRole('button', { name: 'Save' }).click();
      await page.getByRole('dialog').waitFor({ state: 'detached' });
    };
    const recover = async () => (await client.alertRules.list()).items[0]?.recover;
    await change({ 'Above, in %': '70' });
    await expect.poll(recover).toBe(63);
    await change({ 'Resolve at, in %': '50' });
    await expect.poll(recover).toBe(50);
    await change({ 'Resolve at, in %': '' });
    await expect.poll(recover).toBe(63);
    expect(faults).toEqual([]);
  },
);

browserTest('Ctrl Enter sends no rule without a threshold, as the button does not', async () => {
  const system = await startWithConsole();
  const { page, open } = await newLogin(system);
  await open('/alerts/rules');
  await page.getByRole('button', { name: 'New rule' }).click();
  await page.getByRole('textbox', { name: 'Name' }).fill('cpu');
  await page.getByLabel('Open an alert when').selectOption('cpu');
  await page.getByLabel(/^Above/).fill('');
  await page.keyboard.press('Control+Enter');
  await page.getByLabel(/^Above/).fill('95');
  await page.keyboard.press('Control+Enter');
  await page.getByText('CPU over 95 %').waitFor();
  const { items } = await system.client.alertRules.list();
  expect(items.map(({ above }) => above)).toEqual([95]);
});
