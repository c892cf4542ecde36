// The console's pages of saved commands: one is created with typed parameters, run on machines, changed and deleted.
import { expect } from 'vitest';
import { browserTest, newLogin, startMachine, startWithConsole } from './browser.ts';

browserTest('a saved command is made with typed parameters, run on tags, and deleted', async () => {
  const system = await startWithConsole();
  await startMachine(system, 'web-1', 'web');
  const { page, faults, open } = await newLogin(system);
  await open('/saved-commands');
  await page.getByText('No command is saved yet').waitFor();
  await page.getByRole('link', { name: 'Save a command' }).first().click();
  await page.getByLabel('Name', { exact: true }).fill('greet');
  const line = page.getByLabel('Program and arguments');
  await line.fill(`printf '%s=%s\\n {{word}}`);
  await page.getByRole('button', { name: 'Create' }).click();
  await page.getByRole('alert').getByText('a quotation mark that is not closed').waitFor();
  await line.fill(`printf '%s=%s\\n' {{word}} "{{count}}"`);
  const word = page.getByRole('group', { name: 'Parameter word' });
  await word.getByLabel('Type').selectOption('enum');
  await word.getByLabel('Values, one per line').fill('hello\n<b>hi</b>');
  const count = page.getByRole('group', { name: 'Parameter count' });
  await count.getByLabel('Type').selectOption('integer');
  await count.getByLabel('Largest').fill('3');
  await count.getByLabel('Default').fill('4');
  await page.getByRole('button', { name: 'Create' }).click();
  await page.getByRole('alert').getByText('must be at most 3').waitFor();
  await count.getByLabel('Default').fill('2');
  await page.getByRole('button', { name: 'Create' }).click();
  await page.getByRole('row', { name: /count/ }).getByText('A whole number from 0 to 3').waitFor();
  const { items } = await system.client.savedCommands.list();
  expect(items).toMatchObject([
    {
      argv: ['printf', '%s=%s\\n', '{{word}}', '{{count}}'],
      parameters: [
        { name: 'word', type: 'enum', values: ['hello', '<b>hi</b>'], required: true },
        { name: 'count', type: 'integer', max: 3, default: '2', required: false },
      ],
    },
  ]);
  await page.getByRole('link', { name: 'Run', exact: true }).last().click();
  await page.getByRole('button', { name: 'Tags' }).click();
  await page.getByLabel('Tags', { exact: true }).fill('web');
  await page.getByLabel('word').selectOption('<b>hi</b>');
  await page.getByLabel('count').fill('9');
  await page.getByRole('button', { name: 'Run on all of them' }).click();
  await page.getByRole('alert').getByText('must be at most 3').waitFor();
  await page.getByLabel('count').fill('');
  await page.getByRole('button', { name: 'Run on all of them' }).click();
  await page.getByRole('heading', { name: 'Batch' }).waitFor();
  await page.getByText('<b>hi</b>=2').waitFor();
  await open('/saved-commands');
  await page.getByRole('link', { name: 'greet', exact: true }).click();
  await page.getByRole('button', { name: 'Delete' }).click();
  await page.getByRole('button', { name: 'Delete the saved command' }).click();
  await page.getByText('No command is saved yet').waitFor();
  expect(faults).toEqual([]);
});

browserTest('the form changes only the fields that the user has edited', async () => {
  const system = await startWithConsole();
  const argv = [
    'env',
    '',
    "it's",
    'two words\nand a line',
    '"quoted"',
    'back\\slash',
    '--to={{to}}',
    '{{left}}',
  ];
  const before = await system.client.savedCommands.create({
    name: 'every form',
    argv,
    parameters: [
      { name: 'to', type: 'path', pattern: '/srv/.*', description: 'where' },
      { name: 'left', type: 'boolean', required: false },
      { name: 'unused', type: 'integer', min: -1, default: '1' },
    ],
    timeout: 1_500,
    user: 'root',
    cwd: '/',
    description: 'all of it',
  });
  const { page, faults, open } = await newLogin(system);
  await open(`/saved-commands/${before.id}/edit`);
  await page.getByLabel('Name', { exact: true }).fill('renamed');
  await page.getByRole('button', { name: 'Save' }).click();
  await page.getByRole('heading', { name: 'renamed' }).waitFor();
  const after = await system.client.savedCommands.get({ saved_command_id: before.id });
  expect(after).toEqual({ ...before, name: 'renamed', updated_at: after.updated_at });
  expect(faults).toEqual([]);
});

browserTest(
  'a key that is limited to machines runs saved commands, and has no buttons to change them',
  async () => {
    const system = await startWithConsole();
    await startMachine(system, 'web-1', 'web');
    const { id } = await system.client.savedCommands.create({ name: 'greet', argv: ['echo', 'greetings'] });
    const { key } = await system.keyed(['machines:read', 'commands:read', 'commands:execute'], {
      tags: ['web'],
    });
    const { page, faults, open } = await newLogin(system, { key });
    await open('/saved-commands');
    await page.getByRole('link', { name: 'Run greet' }).waitFor();
    expect(await page.getByRole('link', { name: 'Save a command' }).count()).toBe(0);
    await open(`/saved-commands/${id}`);
    await page.getByText('echo greetings').waitFor();
    expect(await page.getByRole('button', { name: 'Delete' }).count()).toBe(0);
    expect(await page.getByRole('link', { name: /Edit|Schedule/ }).count()).toBe(0);
    await page.getByRole('link', { name: 'Run', exact: true }).last().click();
    await page.getByRole('combobox', { name: 'Add a machine' }).fill('web');
    await page.getByRole('option', { name: /web-1/ }).click();
    await page.getByRole('button', { name: 'Run', exact: true }).click();
    await page.getByRole('heading', { name: 'Batch' }).waitFor();
    await page.getByText('greetings', { exact: true }).waitFor();
    expect(faults).toEqual([]);
  },
);

browserTest('a timeout or limit that is not a number is refused, and nothing is saved', async () => {
  const system = await startWithConsole();
  const { page, open } = await newLogin(system);
  await open('/saved-commands/new');
  await page.getByRole('textbox', { name: 'Name' }).fill('wait');
  await page.getByLabel('Program and arguments').fill('sleep {{n}}');
  await page.getByLabel('Type').selectOption('integer');
  await page.getByLabel('Timeout in seconds').fill('10m');
  await page.keyboard.press('Control+Enter');
  await page.getByRole('alert').getByText('The timeout must be a number').waitFor();
  await page.getByLabel('Timeout in seconds').fill('600');
  await page.getByLabel('Largest').fill('1,000');
  await page.keyboard.press('Control+Enter');
  await page.getByRole('alert').getByText('The largest n must be a number').waitFor();
  expect((await system.client.savedCommands.list()).total).toBe(0);
});
