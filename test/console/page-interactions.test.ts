// Interactions with pages of the console, such as filling in forms and pressing buttons.
import { mkdirSync, readFileSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect } from 'vitest';
import { shared } from '../close-after-tests.ts';
import { joinScripted } from '../scripted-agent.ts';
import { temporaryFolder } from '../start-farhand.ts';
import { answering, startReceiver } from '../webhook-receivers.ts';
import { browserTest, logIn, newLogin, newWindow, startMachine, startWithConsole } from './browser.ts';

/** A broker with two online machines. */
const fleet = shared(async () => {
  const system = await startWithConsole();
  const machine = await startMachine(system, 'web-1', 'web');
  await startMachine(system, 'db-1', 'db');
  return { ...system, machine };
});

browserTest('cards and columns survive a reload, and cards select machines', async () => {
  const { page, faults } = await newLogin(await fleet());
  await page.getByRole('button', { name: 'Columns' }).click();
  await page.getByLabel('Host name').check();
  await page.getByLabel('Disk', { exact: true }).uncheck();
  await page.getByRole('button', { name: 'Done' }).click();
  await page.reload();
  await page.getByRole('columnheader', { name: 'Host name' }).waitFor();
  expect(await page.getByRole('columnheader', { name: 'Disk' }).count()).toBe(0);
  await page.getByRole('button', { name: 'Cards' }).click();
  await page.reload();
  const card = page.getByRole('listitem').filter({ hasText: 'web-1' });
  await card.getByText(/\d+ %/).first().waitFor();
  await card.getByLabel('Select web-1').check();
  await page.getByText('1 selected').waitFor();
  expect(faults).toEqual([]);
});

browserTest('lists say in words why a machine ran nothing, and which key has expired', async () => {
  const system = await startWithConsole();
  const away = await joinScripted(system, 'away-1');
  const soon = new Date(Date.now() + 2_000).toISOString();
  await system.client.keys.create({ name: 'for-a-moment', scopes: ['machines:read'], expires_at: soon });
  const { id } = await system.client.batches.create({ machine_ids: [away.machineId], command: 'true' });
  const { page, faults, open } = await newLogin(system);
  await open(`/batches/${id}`);
  await page.getByText('The machine was offline.').waitFor();
  await open('/keys');
  await page
    .getByRole('row', { name: /for-a-moment/ })
    .getByText('expired')
    .waitFor();
  expect(faults).toEqual([]);
});

browserTest('select all selects every machine that matches, also those that are not loaded', async () => {
  const system = await startWithConsole();
  const names = Array.from({ length: 130 }, (_, n) => `${n < 120 ? 'web' : 'db'}-${n}`);
  for (let n = 0; n < names.length; n += 10)
    await Promise.all(names.slice(n, n + 10).map((name) => joinScripted(system, name)));
  const { page, open } = await newLogin(system);
  await open('/machines?q=web');
  await page.getByLabel('Select all 120 machines of this list').click();
  await page.getByText('120 selected').waitFor();
  await page.getByRole('link', { name: 'Run a command' }).click();
  await page.getByLabel('Command').fill('true');
  await page.keyboard.press('Control+Enter');
  await page.getByRole('heading', { name: 'Batch' }).waitFor();
  const { items } = await system.client.batches.list();
  expect(items.map(({ total }) => total)).toEqual([120]);
});

browserTest('files are searched, selected, moved to another machine, and get other permissions', async () => {
  const system = await fleet();
  const { machine } = system;
  const folder = temporaryFolder('files');
  mkdirSync(join(folder, 'logs/old'), { recursive: true });
  mkdirSync(join(folder, 'there'));
  for (const name of ['a.txt', 'b.txt', 'logs/old/app.log']) writeFileSync(join(folder, name), name);
  const { page, faults, open } = await newLogin(system);
  await open(`/machines/${machine}/files?path=${encodeURIComponent(folder)}`);
  await page.getByLabel('Search below this folder').fill('APP');
  await page.getByRole('button', { name: 'app.log', exact: true }).waitFor();
  await page.getByRole('button', { name: join(folder, 'logs/old'), exact: true }).click();
  await page.getByRole('button', { name: 'app.log', exact: true }).waitFor();
  await page.goBack();
  await page.getByText('1 found').waitFor();
  await page.getByLabel('Search below this folder').fill('');
  await page.getByRole('button', { name: 'Permissions of a.txt: 0644' }).click();
  await page.getByLabel('Group: write').check();
  await page.getByRole('button', { name: 'Save' }).click();
  await page.getByRole('button', { name: 'Permissions of a.txt: 0664' }).waitFor();
  expect(statSync(join(folder, 'a.txt')).mode & 0o777).toBe(0o664);
  await page.getByLabel('Select a.txt').check();
  await page.getByLabel('Select b.txt').check();
  await page.getByRole('region', { name: 'Selected entries' }).getByRole('button', { name: /Copy/ }).click();
  await page.getByRole('button', { name: 'Move', exact: true }).click();
  await page.getByRole('combobox', { name: 'Another machine' }).fill('db');
  await page.getByRole('option', { name: /db-1/ }).click();
  await page.getByLabel('Folder there').fill(join(folder, 'there'));
  await page.getByRole('button', { name: 'Move', exact: true }).last().click();
  await page.getByText('2 entries moved').waitFor();
  await page.getByRole('button', { name: 'a.txt', exact: true }).waitFor({ state: 'detached' });
  expect(readFileSync(join(folder, 'there/b.txt'), 'utf8')).toBe('b.txt');
  expect(faults).toEqual([]);
});

browserTest('keys alone open, select, rename and delete files', async () => {
  const system = await fleet();
  const { machine } = system;
  const folder = temporaryFolder('files');
  mkdirSync(join(folder, 'a'));
  for (const name of ['a/1', 'a/2', 'a/3']) writeFileSync(join(folder, name), '');
  const { page, open } = await newLogin(system);
  await open(`/machines/${machine}/files?path=${encodeURIComponent(folder)}`);
  const name = (text: string) => page.getByRole('button', { name: text, exact: true });
  await name('a').focus();
  await page.keyboard.press('Enter');
  await name('1').waitFor();
  await expect.poll(() => page.evaluate<string>('document.activeElement.textContent')).toBe('1');
  await page.keyboard.press('F2');
  await page.getByRole('textbox', { name: 'Name' }).fill('0');
  await page.keyboard.press('Enter');
  await name('0').waitFor();
  await name('0').focus();
  await page.keyboard.press('Space');
  await page.keyboard.press('ArrowDown');
  await page.keyboard.press('Space');
  await page.keyboard.press('Delete');
  await page.getByRole('heading', { name: 'Delete 2 entries?' }).waitFor();
  await page.getByRole('button', { name: 'Delete', exact: true }).last().click();
  await name('2').waitFor({ state: 'detached' });
  await name('3').focus();
  await page.keyboard.press('Backspace');
  await name('a').waitFor();
});

browserTest('a terminal lists who is in it, and a phone has Ctrl, Esc and arrows', async () => {
  const system = await fleet();
  const { machine } = system;
  const { page, faults, open } = await newLogin(system, { width: 375 });
  await open(`/machines/${machine}/terminals`);
  await page.getByRole('button', { name: 'Open a terminal' }).click();
  await page.getByText('connected').waitFor();
  const { key } = await system.keyed(['machines:read', 'sessions:read', 'sessions:attach']);
  const watcher = await newWindow(system);
  await logIn(watcher, key);
  await expect.poll(() => page.url()).toMatch(/sess_/);
  await watcher.page.goto(`${page.url()}?observe`);
  await page.getByLabel('2 in this terminal').click();
  const list = page.getByRole('list', { name: 'In this terminal' });
  expect(await list.getByRole('listitem').allTextContents()).toEqual([
    expect.stringMatching(/you.*types/),
    expect.stringMatching(/watches/),
  ]);
  await page.locator('.screen').click();
  await page.keyboard.type('cat');
  await page.keyboard.press('Enter');
  await page.getByRole('button', { name: 'Ctrl', exact: true }).click();
  await page.keyboard.type('c');
  await page.locator('.xterm-rows').getByText('^C').waitFor();
  for (const name of ['Escape', 'Tab', 'Up', 'Left']) await page.getByRole('button', { name }).waitFor();
  // The button Up is pressed repeatedly, until the shell has its prompt and recalls the line.
  const linesWithCat = async () => {
    await page.getByRole('button', { name: 'Up', exact: true }).click();
    return page.locator('.xterm-rows').getByText(/cat/).count();
  };
  await expect.poll(linesWithCat).toBeGreaterThan(1);
  await watcher.page.close();
  await page.getByLabel('1 in this terminal').waitFor();
  expect([...faults, ...watcher.faults]).toEqual([]);
});

browserTest('an inventory finds a package on its machine, and machines by their package', async () => {
  const { machine, ...system } = await fleet();
  const { page, faults, open } = await newLogin(system);
  await open(`/machines/${machine}/inventory`);
  await page.getByLabel('Search packages').fill('no-such-package');
  await page.getByText('No package has no-such-package in its name').waitFor();
  await page.getByLabel('Search packages').fill('bash');
  const { packages, kernel } = await system.client.inventory.get({ machine_id: machine });
  const version = packages.find(({ name }) => name === 'bash')?.version ?? 'no bash';
  await page.getByRole('row', { name: `bash ${version}`, exact: true }).waitFor();
  await page.getByText(kernel).first().waitFor();
  await open('/inventory?package=bash');
  await page.getByRole('row', { name: /web-1/ }).getByText(version).waitFor();
  expect(await page.getByRole('link', { name: 'db-1' }).count()).toBe(0);
  await page.getByRole('button', { name: 'Collect now' }).click();
  await page.getByRole('link', { name: 'db-1' }).waitFor();
  await page.getByLabel('Only versions older than').fill('0.1');
  await page.getByText('No machine has an older bash').waitFor();
  expect(faults).toEqual([]);
});

browserTest('a batch has a live card per machine, and runs again where it failed', async () => {
  const system = await startWithConsole();
  const online = await startMachine(system, 'web-1');
  const { machineId: offline } = await joinScripted(system, 'web-2');
  const folder = temporaryFolder('batch');
  const { client } = system;
  const { id } = await client.batches.create({
    machine_ids: [online, offline],
    command: 'echo first; echo second >&2; echo last',
    cwd: folder,
    wait: 0,
  });
  const { page, faults, open } = await newLogin(system);
  await open(`/batches/${id}`);
  const card = (name: string) => page.getByRole('listitem').filter({ hasText: name });
  await card('web-1').getByText('last').waitFor();
  await card('web-1').getByText('exit 0').waitFor();
  expect(await card('web-1').locator('.stderr').textContent()).toBe('second\n');
  await card('web-2').getByText('offline').waitFor();
  await page.getByRole('button', { name: 'Run again on the 1 failed' }).click();
  await page.getByRole('list', { name: 'Selected machines' }).getByText('web-2').waitFor();
  expect(await page.getByLabel('Folder').inputValue()).toBe(folder);
  expect(faults).toEqual([]);
});

browserTest('a command that waits for its machine appears by itself; a button leads to errors', async () => {
  const system = await startWithConsole();
  const online = await startMachine(system, 'web-1');
  const { machineId: machine_id } = await joinScripted(system, 'web-2');
  const { page, faults, open } = await newLogin(system);
  await open('/commands');
  await page.getByText('No command has run yet').waitFor();
  await system.client.commands.create({ machine_id, command: 'make it', queue_for: 60_000, wait: 0 });
  await page
    .getByRole('row', { name: /make it/ })
    .getByText('queued')
    .waitFor();
  const { id } = await system.client.commands.create({
    machine_id: online,
    command: 'seq 1 300; sleep 0.1; echo wrong >&2; sleep 0.1; seq 301 600',
  });
  await open(`/commands/${id}`);
  await page.locator('.output-text').getByText('600').waitFor();
  const isInView = (): Promise<boolean> =>
    page.evaluate<boolean>(`(() => {
      const line = document.querySelector('.stderr').getBoundingClientRect();
      const frame = document.querySelector('.output-text').getBoundingClientRect();
      return line.top >= frame.top - 1 && line.bottom <= frame.bottom;
    })()`);
  await page.evaluate(`document.querySelector('.output-text').scrollTop = 0`);
  expect(await isInView()).toBe(false);
  await page.getByRole('button', { name: 'Next error' }).click();
  expect(await isInView()).toBe(true);
  expect(faults).toEqual([]);
});

browserTest('a list of several pages loses no row when a new item appears', async () => {
  const system = await startWithConsole();
  const { machineId: machine_id } = await joinScripted(system, 'web-1');
  const add = (command: string) =>
    system.client.commands.create({ machine_id, command, queue_for: 60_000, wait: 0 });
  for (let n = 1; n <= 110; n++) await add(`make ${n}`);
  const { page, faults, open } = await newLogin(system);
  await open('/commands');
  await page.getByText('50 of 110').waitFor();
  await page.getByRole('button', { name: 'More' }).click();
  await page.getByText('100 of 110').waitFor();
  await page.getByRole('button', { name: 'More' }).click();
  await page.getByRole('row', { name: /make 1\b/ }).waitFor();
  await add('make new');
  await page.getByRole('row', { name: /make new/ }).waitFor();
  await expect.poll(() => page.getByRole('row', { name: /make / }).count()).toBe(111);
  expect(faults).toEqual([]);
});

browserTest('a key lists the machines that it reaches, and is changed in place', async () => {
  const system = await fleet();
  await system.client.keys.create({ name: 'deploy', scopes: ['files:write'], tags: ['web'] });
  const { page, faults, open } = await newLogin(system);
  await open('/keys');
  await page.getByRole('button', { name: 'deploy', exact: true }).click();
  const dialog = page.getByRole('dialog', { name: 'What deploy may do' });
  await dialog.getByRole('link', { name: 'web-1' }).waitFor();
  expect(await dialog.getByRole('link').allTextContents()).toEqual(['web-1']);
  await dialog.getByText('Write, upload and delete files').waitFor();
  await page.keyboard.press('Escape');
  await page.getByRole('button', { name: 'Change deploy' }).click();
  await page.getByLabel('Only machines tagged').fill('');
  await page.getByRole('combobox', { name: 'And these machines' }).fill('db');
  await page.getByRole('option', { name: /db-1/ }).click();
  await page.getByRole('button', { name: 'Save' }).click();
  await page
    .getByRole('row', { name: /deploy/ })
    .getByText('db-1')
    .waitFor();
  const { items } = await system.client.keys.list({ name: 'deploy' });
  expect(items[0]).toMatchObject({ tags: null, scopes: ['files:write'], machine_ids: [expect.any(String)] });
  // The form sends only what changed in it, so it does not undo a change that came from elsewhere.
  const key_id = items[0]?.id ?? '';
  await page.getByRole('button', { name: 'Change deploy' }).click();
  await system.client.keys.update({ key_id, scopes: ['files:read'] });
  await page.getByLabel('Name', { exact: true }).fill('deployer');
  await page.getByRole('button', { name: 'Save' }).click();
  await page.getByRole('button', { name: 'Change deployer' }).waitFor();
  expect(await system.client.keys.get({ key_id })).toMatchObject({
    name: 'deployer',
    scopes: ['files:read'],
  });
  expect(faults).toEqual([]);
});

browserTest('the rights of a key count all machines with its tag, also more than a thousand', async () => {
  const system = await startWithConsole();
  await system.client.keys.create({ name: 'deploy', scopes: ['files:read'], tags: ['web'] });
  const { page, faults, open } = await newLogin(system);
  const total = 1_050;
  await page.route('**/api/v1/machines?*tags=web*', (route) => {
    const offset = Number(new URL(route.request().url()).searchParams.get('offset'));
    const data = Array.from({ length: Math.min(100, total - offset) }, (_, index) => ({
      id: `mach_${offset + index}`,
      name: `web-${offset + index}`,
    }));
    const meta = { total, limit: 100, offset, has_more: offset + data.length < total };
    return route.fulfill({ json: { data, meta } });
  });
  await open('/keys');
  await page.getByRole('button', { name: 'deploy', exact: true }).click();
  await page.getByText('1,050 now').waitFor();
  await page.getByText('and 950 more').waitFor();
  await page.getByRole('link', { name: 'web-99', exact: true }).waitFor();
  expect(await page.getByRole('link', { name: 'web-100', exact: true }).count()).toBe(0);
  expect(faults).toEqual([]);
});

browserTest('a delivery has its event and the answer; a new secret is on the page once', async () => {
  const receiver = await startReceiver(answering(500, 200));
  const system = await startWithConsole(['--webhook-allow', '127.0.0.0/8', '--webhook-retry', '50ms']);
  const { id } = await system.client.webhooks.create({ url: receiver.url, events: ['machine.*'] });
  await startMachine(system, 'web-1');
  await receiver.heard(2);
  const { page, faults, open } = await newLogin(system);
  await open(`/webhooks/${id}`);
  await page.getByText('machine.registered').click();
  await page.getByText(/answer 500 in .*/).waitFor();
  await page.getByText('What is sent').click();
  await page.getByText('"type": "machine.registered"').waitFor();
  await page.getByRole('button', { name: 'New secret' }).click();
  await page.getByRole('button', { name: 'Replace the secret' }).click();
  await page.getByText(/^whsec_.{44}$/).waitFor();
  await page.getByRole('button', { name: 'Done' }).click();
  expect(await page.getByText(/whsec_/).count()).toBe(0);
  expect(faults).toEqual([]);
});

browserTest(
  'the page of a webhook follows the attempts, and says that the broker turned it off',
  async () => {
    const answered = Promise.withResolvers<void>();
    const receiver = await startReceiver((response, _request, count) => {
      response.statusCode = count === 1 ? 200 : 500;
      void answered.promise.then(() => response.end());
    });
    const flags = ['--webhook-allow', '127.0.0.0/8', '--webhook-retry', '50ms'];
    const system = await startWithConsole(flags);
    const { id } = await system.client.webhooks.create({ url: receiver.url, events: ['command.completed'] });
    const machine_id = await startMachine(system, 'web-1');
    const { page, faults, load } = await newLogin(system);
    await load(`/webhooks/${id}`);
    const list = page.getByRole('list', { name: 'Deliveries' });
    await system.client.commands.create({ machine_id, command: 'true' });
    await list.getByText('pending').waitFor();
    answered.resolve();
    await list.getByText('delivered').waitFor();
    await system.client.commands.create({ machine_id, command: 'true' });
    await list.getByText('failed', { exact: true }).waitFor();
    await page.getByText('The broker turned this webhook off').waitFor();
    await page.getByRole('button', { name: 'Turn on' }).waitFor();
    expect(faults).toEqual([]);
  },
);
