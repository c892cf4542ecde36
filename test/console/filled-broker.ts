// Starts a broker that has content for every page of the console. All names look like markup.
import { expect } from 'vitest';
import { type TestSystem, temporaryFolder } from '../start-farhand.ts';
import { startMachine, startWithConsole } from './browser.ts';

const hostile = '<img src=x onerror=alert(1)>';

interface FilledSystem {
  system: TestSystem;
  /** Paths of all pages below /console. */
  paths: string[];
  /** Paths of pages, each with the names of its buttons that open a dialog. */
  dialogs: (readonly [path: string, buttons: readonly (string | RegExp)[]])[];
}

export async function filledSystem(): Promise<FilledSystem> {
  const system = await startWithConsole();
  const { client } = system;
  // Every value is above 0, so the first report of the machine opens an alert.
  await client.alertRules.create({ name: hostile, kind: 'memory', above: 0, for: 0 });
  await client.alertRules.create({ name: 'gone', kind: 'offline', tags: ['<b>x</b>'], enabled: false });
  const machine_id = await startMachine(system, hostile, '<b>x</b>');
  const folder = temporaryFolder('files');
  const { id: command } = await client.commands.create({
    machine_id,
    command: `echo '${hostile}'; echo no >&2; exit 1`,
  });
  const { id: batch } = await client.batches.create({ machine_ids: [machine_id], command: 'true' });
  const schedule = await client.schedules.create({
    name: hostile,
    machine_id,
    command: 'true',
    cron: '@daily',
  });
  await client.schedules.run({ schedule_id: schedule.id });
  const saved = await client.savedCommands.create({
    name: hostile,
    description: hostile,
    argv: ['echo', hostile, '{{one}}', '{{two}}', '{{three}}'],
    parameters: [
      { name: 'one', type: 'enum', values: [hostile], description: hostile },
      { name: 'two', type: 'integer', max: 9, default: 1 },
      { name: 'three', type: 'path', required: false },
    ],
  });
  const bySavedCommand = await client.schedules.create({
    ...{ name: 'by tags', tags: ['<b>x</b>'], cron: '@weekly' },
    ...{ saved_command_id: saved.id, parameters: { one: hostile } },
  });
  await client.schedules.run({ schedule_id: bySavedCommand.id });
  const onChange = await client.schedules.create({
    ...{ name: 'on change', machine_id, command: 'true' },
    on_change: { path: `${folder}/${hostile.replaceAll('/', '')}`, recursive: true },
  });
  const webhook = await client.webhooks.create({
    url: 'https://example.org/x',
    events: ['*'],
    enabled: false,
  });
  await client.keys.create({ name: hostile, scopes: ['machines:read', 'files:write'], tags: ['<b>x</b>'] });
  await expect.poll(async () => (await client.alerts.list({ status: 'open' })).total).toBe(1);
  const channel = await client.alertChannels.create({
    name: hostile,
    type: 'slack',
    url: 'https://example.org/x',
    enabled: false,
  });
  const window = { name: hostile, duration: 86_400_000 };
  await client.maintenanceWindows.create({ ...window, machine_ids: [machine_id] });
  await client.maintenanceWindows.create({ ...window, tags: ['<b>x</b>'], cron: '@weekly' });
  const { id: upgrade } = await client.upgrades.create({ machine_ids: [machine_id], version: '9.9.9' });
  const machine = `/machines/${machine_id}`;
  const of = (path: string, ...names: string[]): string[] => names.map((name) => `${path}${name}`);
  const paths = [
    ...of('/machines', '', '?q=none'),
    ...of(
      machine,
      '',
      '/inventory',
      '/terminals',
      `/files?path=${folder}`,
      '/files?path=/etc',
      '/commands',
      '/activity',
    ),
    `${machine}/files?path=/etc&edit=/etc/hostname`,
    ...of('', '/run', `/commands/${command}`, '/batches', `/batches/${batch}`),
    ...of('/commands', '', `?status=failed&machine=${machine_id}`),
    ...of('/schedules', '', '/new', `/${schedule.id}`, `/${schedule.id}/settings`),
    ...of(`/schedules/${bySavedCommand.id}`, '', '/settings'),
    ...of(`/schedules/${onChange.id}`, '', '/settings'),
    ...of('/saved-commands', '', '/new', `/${saved.id}`, `/${saved.id}/edit`),
    `/run?saved=${saved.id}`,
    ...of('/webhooks', '', `/${webhook.id}`),
    ...of('/alerts', '', '?status=held', '?status=all', '/rules', '/channels', `/channels/${channel.id}`),
    ...of('/alerts/windows', '', `?machine=${machine_id}`),
    ...of('/upgrades', '', `/${upgrade}`, `/new?machine=${machine_id}`),
    ...of('/inventory', '', '?package=bash&below=9'),
    ...of('', '/events', '/brokers', '/keys', '/join', '/audit', '/profile', '/nothing'),
  ];
  const dialogs = [
    [machine, ['Edit', 'Remove']],
    ['/machines', ['Columns']],
    ['/alerts', [/^Acknowledge: /]],
    ['/alerts/rules', ['New rule', 'Change gone', 'Delete gone']],
    ['/alerts/channels', ['New channel']],
    [`/alerts/channels/${channel.id}`, ['Edit', 'Delete']],
    ['/alerts/windows', ['New window', `Delete ${hostile}`]],
    [`/schedules/${schedule.id}`, ['Delete']],
    [`/saved-commands/${saved.id}`, ['Delete']],
    ['/webhooks', ['New webhook']],
    [`/webhooks/${webhook.id}`, ['Send missed', 'New secret', 'Edit', 'Delete']],
    ['/keys', ['New key', hostile, `Change ${hostile}`]],
  ] as const;
  return { system, paths, dialogs: [...dialogs] };
}
