// The console's pages of schedules: the form for machines or tags, commands or saved commands, times or a path, and the
// history of runs.
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect } from 'vitest';
import { temporaryFolder } from '../start-farhand.ts';
import { browserTest, newLogin, startMachine, startWithConsole } from './browser.ts';

browserTest(
  'a schedule of tags runs a saved command, and its history names machines and the batch',
  async () => {
    const system = await startWithConsole();
    const { client } = system;
    for (const name of ['web-1', 'web-2']) await startMachine(system, name, 'web');
    const saved = await client.savedCommands.create({
      name: 'greet',
      argv: ['echo', 'hello {{who}}'],
      parameters: [{ name: 'who', type: 'string' }],
    });
    const { page, faults, open } = await newLogin(system);
    await open('/schedules');
    await page.getByText('Nothing is scheduled').waitFor();
    await page.getByRole('link', { name: 'New schedule' }).first().click();
    await page.getByLabel('Name', { exact: true }).fill('greetings');
    await page.getByRole('button', { name: 'Tags' }).click();
    await page.getByLabel('Tags', { exact: true }).fill('web');
    await page.getByText('2 machines have web now').waitFor();
    await page.getByRole('button', { name: 'Saved command' }).click();
    await page.getByLabel('Saved command').selectOption('greet');
    await page.getByLabel('who').fill('-n');
    await page.getByRole('button', { name: 'Create' }).click();
    await page.getByRole('alert').getByText('must not be empty or begin with -').waitFor();
    await page.getByLabel('who').fill('<i>all</i>');
    await page.getByRole('button', { name: 'Create' }).click();
    await page.getByText("greet who='<i>all</i>'").waitFor();
    const { items } = await client.schedules.list();
    expect(items).toMatchObject([
      { tags: ['web'], machine_id: null, saved_command_id: saved.id, parameters: { who: '<i>all</i>' } },
    ]);
    await page.getByRole('button', { name: 'Run now' }).click();
    for (const name of ['web-1', 'web-2'])
      await page
        .getByRole('row', { name: new RegExp(name) })
        .getByText('hello <i>all</i>')
        .waitFor();
    await page.getByRole('link', { name: 'batch' }).first().click();
    await page.getByText('2 of 2').first().waitFor();
    await open('/schedules');
    await page
      .getByRole('row', { name: /greetings/ })
      .getByText('web', { exact: true })
      .waitFor();
    expect(faults).toEqual([]);
  },
);

browserTest('the settings replace tags by a machine, and a saved command by a command line', async () => {
  const system = await startWithConsole();
  const { client } = system;
  const machine_id = await startMachine(system, 'web-1', 'web');
  const saved = await client.savedCommands.create({ name: 'greet', argv: ['echo', 'hello'] });
  const { id } = await client.schedules.create({
    ...{ name: 'greetings', cron: '@daily', tags: ['web'] },
    saved_command_id: saved.id,
  });
  const { page, faults, open } = await newLogin(system);
  await open(`/schedules/${id}/settings`);
  await page.getByRole('button', { name: 'Machine', exact: true }).click();
  await page.getByRole('combobox', { name: 'Machine' }).fill('web');
  await page.getByRole('option', { name: /web-1/ }).click();
  await page.getByRole('button', { name: 'Command', exact: true }).click();
  await page.getByRole('textbox', { name: 'Command' }).fill('uptime');
  await page.getByRole('button', { name: 'Save', exact: true }).click();
  await page.getByText('The schedule is saved').waitFor();
  expect(await client.schedules.get({ schedule_id: id })).toMatchObject({
    ...{ machine_id, tags: null, command: 'uptime', saved_command_id: null, parameters: null },
  });
  expect(faults).toEqual([]);
});

browserTest('a schedule of tags keeps the rights of its key until a user replaces them', async () => {
  const system = await startWithConsole();
  const other = await system.keyed([
    'schedules:write',
    'files:read',
    'schedules:read',
    'commands:execute',
    'machines:read',
  ]);
  const tagged = { name: 'greetings', tags: ['web'], command: 'true' };
  const { id, requested_by } = await other.client.schedules.create({ ...tagged, cron: '@daily' });
  const watching = await other.client.schedules.create({ ...tagged, on_change: { path: '/etc/hosts' } });
  const { page, faults, open } = await newLogin(system);
  await open(`/schedules/${watching.id}/settings`);
  await page.getByLabel('Name', { exact: true }).fill('renamed');
  await page.getByRole('button', { name: 'Save', exact: true }).click();
  await page.getByRole('heading', { name: 'renamed', level: 1 }).waitFor();
  const renamed = await system.client.schedules.get({ schedule_id: watching.id });
  expect(renamed).toMatchObject({ requested_by, on_change: watching.on_change });
  await page.getByLabel('Path on the machine').fill('/etc/hostname');
  await page.getByRole('button', { name: 'Save', exact: true }).click();
  await page.getByLabel('Give the schedule the rights of my key').waitFor({ state: 'detached' });
  const moved = await system.client.schedules.get({ schedule_id: watching.id });
  expect(moved).toMatchObject({ requested_by: (await system.client.keys.me()).id, tags: ['web'] });
  await open(`/schedules/${id}/settings`);
  const save = async (name: string): Promise<string> => {
    await page.getByLabel('Name', { exact: true }).fill(name);
    await page.getByRole('button', { name: 'Save', exact: true }).click();
    await page.getByRole('heading', { name, level: 1 }).waitFor();
    return (await system.client.schedules.get({ schedule_id: id })).requested_by;
  };
  expect(await save('first')).toBe(requested_by);
  await page.getByLabel('Give the schedule the rights of my key').check();
  expect(await save('second')).toBe((await system.client.keys.me()).id);
  await page.getByLabel('Give the schedule the rights of my key').waitFor({ state: 'detached' });
  expect(faults).toEqual([]);
});

browserTest('a schedule runs when a path changes, and in its settings a time replaces the path', async () => {
  const system = await startWithConsole();
  const { client } = system;
  await startMachine(system, 'web-1');
  const file = join(temporaryFolder('watched'), 'app.conf');
  const { page, faults, open } = await newLogin(system);
  await open('/schedules/new');
  await page.getByLabel('Name', { exact: true }).fill('reload');
  await page.getByRole('combobox', { name: 'Machine' }).fill('web');
  await page.getByRole('option', { name: /web-1/ }).click();
  await page.getByRole('textbox', { name: 'Command' }).fill('echo reloaded');
  await page.getByRole('button', { name: 'When a path changes' }).click();
  await page.getByLabel('Path on the machine').fill(file);
  await page.getByLabel('Run after this many seconds without a change').fill('0.1');
  await page.getByRole('button', { name: 'Create' }).click();
  await page.getByRole('alert').getByText('settle').waitFor();
  await page.getByLabel('Run after this many seconds without a change').fill('1');
  await page.getByRole('button', { name: 'Create' }).click();
  await page.getByRole('heading', { name: 'reload' }).waitFor();
  const [made] = (await client.schedules.list()).items;
  expect(made).toMatchObject({ cron: null, on_change: { path: file, recursive: false, settle: 1_000 } });
  // Repeated, because the watch begins some time after the schedule was created.
  const write = async (): Promise<number> => {
    writeFileSync(file, `${performance.now()}`);
    return (await client.schedules.history({ schedule_id: made?.id ?? '' })).total;
  };
  await expect.poll(write, { interval: 3_000 }).toBeGreaterThan(0);
  await page
    .getByRole('row', { name: /change/ })
    .getByText('reloaded')
    .first()
    .waitFor();
  await open('/schedules');
  await page
    .getByRole('row', { name: /reload/ })
    .getByText(file)
    .waitFor();
  await open(`/schedules/${made?.id}/settings`);
  await page.getByRole('button', { name: 'At set times' }).click();
  await page.getByLabel('Cron expression').fill('@hourly');
  await page.getByRole('button', { name: 'Save', exact: true }).click();
  await page.getByText('The schedule is saved').waitFor();
  const after = await client.schedules.get({ schedule_id: made?.id ?? '' });
  expect(after).toMatchObject({ cron: '@hourly', on_change: null, catch_up: 'none' });
  expect(faults).toEqual([]);
});

browserTest(
  'turning a schedule off keeps what was typed; a double-click runs it once and keeps the focus',
  async () => {
    const system = await startWithConsole();
    const { client } = system;
    const machine_id = await startMachine(system, 'web-1');
    const { id } = await client.schedules.create({
      machine_id,
      name: 'job',
      cron: '@yearly',
      command: 'true',
    });
    const { page, faults, open } = await newLogin(system);
    await open(`/schedules/${id}/settings`);
    await page.getByLabel('Name', { exact: true }).fill('renamed');
    await page.getByRole('button', { name: 'Turn off' }).click();
    await page.getByRole('button', { name: 'Turn on' }).waitFor();
    expect(await page.getByLabel('Name', { exact: true }).inputValue()).toBe('renamed');
    await page.getByRole('button', { name: 'Run now' }).dblclick();
    await page.getByText('job is started').waitFor();
    await page.locator('button:focus', { hasText: 'Run now' }).waitFor();
    await expect.poll(async () => (await client.schedules.history({ schedule_id: id })).total).toBe(1);
    const reader = await system.keyed(['schedules:read', 'machines:read', 'commands:read']);
    const other = await newLogin(system, { key: reader.key });
    await other.load(`/schedules/${id}/settings`);
    expect(await other.page.getByRole('button', { name: 'Save' }).count()).toBe(0);
    expect([...faults, ...other.faults]).toEqual([]);
  },
);
