// Keys that may change objects but not read them: the answers to their changes reveal no output and no environment.
import { expect, test } from 'vitest';
import type { Scope } from '../shared/api/route.ts';
import { storedState } from './read-stored-state.ts';
import { startWithAgent } from './start-farhand.ts';
import { waitFor } from './wait-for.ts';

test('an empty change changes nothing, not even the key that owns the schedule, and reveals no environment', async () => {
  const { system, machine_id } = await startWithAgent();
  const params = { machine_id, name: 'yearly', command: 'true', cron: '@yearly', env: { PIN: '1234' } };
  const { id: schedule_id, requested_by } = await system.client.schedules.create(params);
  const { id: webhook_id } = await system.client.webhooks.create({
    url: 'https://receiver.invalid/',
    events: ['machine.*'],
  });
  const scopes: Scope[] = ['machines:write', 'schedules:write', 'webhooks:write', 'files:write'];
  const { key } = await system.keyed([...scopes, 'machines:read', 'commands:execute']);
  const before = await storedState(system.dataDir);
  for (const [path, by = key] of [
    [`/machines/${machine_id}`],
    [`/schedules/${schedule_id}`],
    [`/webhooks/${webhook_id}`],
    [`/api-keys/${(await system.client.keys.me()).id}`, system.key],
  ] as const) {
    const { status, body } = await system.call('PATCH', path, { key: by, body: {} });
    expect([path, status, body.data?.env ?? null]).toEqual([path, 200, null]);
  }
  const { schedules, webhooks, keys } = await storedState(system.dataDir);
  expect([schedules, keys]).toEqual([before.schedules, before.keys]);
  expect(webhooks).toMatchObject(
    before.webhooks.map(({ updated_at: _, ...one }: { updated_at: string }) => one),
  );
  const path = `/machines/${machine_id}/files`;
  const refused = await system.call('PATCH', path, { key, body: { path: '/' } });
  expect([refused.status, refused.body.error?.code]).toEqual([422, 'validation_failed']);
  expect((await system.client.schedules.get({ schedule_id })).requested_by).toBe(requested_by);
});

test('a key that may not read schedules may change what a schedule runs, or where, only together with env', async () => {
  const { system, machine_id } = await startWithAgent();
  const params = {
    machine_id,
    name: 'yearly',
    command: 'true',
    cron: '@yearly',
    env: { PIN: 'hidden-4711' },
  };
  const schedule = await system.client.schedules.create(params);
  const bare = await system.client.schedules.create({ ...params, env: undefined });
  const writer = await system.keyed(['schedules:write', 'commands:execute']);
  const patch = (id: string, body: object, key = writer.key) =>
    system.call('PATCH', `/schedules/${id}`, { key, body });
  for (const change of [
    { command: 'env' },
    { user: 'nobody' },
    { cwd: '/tmp' },
    { machine_id },
    { user: null },
  ]) {
    for (const { id } of [schedule, bare]) {
      const { status, body } = await patch(id, { name: 'x', ...change });
      expect([change, status, body.error?.details.issues?.[0].path]).toEqual([change, 422, 'env']);
    }
  }
  const unchanged = await system.client.schedules.get({ schedule_id: schedule.id });
  expect(unchanged).toMatchObject({ name: 'yearly', command: 'true', env: params.env });
  expect((await patch(schedule.id, { name: 'x', cron: '@monthly', timeout: 60_000 })).status).toBe(200);
  expect((await patch(bare.id, { command: 'false', env: { OWN: '1' } })).body.data.env).toEqual({ OWN: '1' });
  const reader = await system.keyed(['schedules:write', 'schedules:read', 'commands:execute']);
  expect((await patch(schedule.id, { cwd: '/' }, reader.key)).body.data.env).toEqual(params.env);
  expect((await patch(schedule.id, { command: 'env', env: null })).status).toBe(200);
  const { command_id } = await writer.client.schedules.run({ schedule_id: schedule.id });
  await waitFor(async () => {
    const { status, stdout } = await system.client.commands.get({ command_id });
    expect([status, stdout]).toEqual(['completed', expect.not.stringContaining('hidden-4711')]);
  });
});

test('a key that may not read schedules sees only an environment that it set itself', async () => {
  const { system, machine_id } = await startWithAgent();
  const params = { machine_id, name: 'yearly', command: 'true', cron: '@yearly', env: { PIN: '1234' } };
  const { id: schedule_id } = await system.client.schedules.create(params);
  const writer = await system.keyed(['schedules:write', 'commands:execute']);
  const reader = await system.keyed(['schedules:write', 'schedules:read', 'commands:execute']);
  expect((await writer.client.schedules.update({ schedule_id, name: 'x' })).env).toBeNull();
  expect((await reader.client.schedules.update({ schedule_id, name: 'y' })).env).toEqual({ PIN: '1234' });
  const own = { PIN: '5678' };
  expect((await writer.client.schedules.update({ schedule_id, env: own })).env).toEqual(own);
  expect((await system.client.schedules.get({ schedule_id })).env).toEqual(own);
});

test('a key that may not read commands sees only the output of commands that it ran itself', async () => {
  const { system, machine_id } = await startWithAgent();
  const { client } = await system.keyed(['commands:execute']);
  const run = { machine_id, command: 'echo out; echo err >&2' };
  const foreign = await system.client.commands.create(run);
  const own = await client.commands.create(run);
  expect(own.stdout).toBe('out\n');
  const outputs = async (command_id: string) => {
    const { status, stdout, stderr, stdout_bytes, stdout_truncated } = await client.commands.cancel({
      command_id,
    });
    return [status, stdout, stderr, stdout_bytes, stdout_truncated];
  };
  expect(await outputs(own.id)).toEqual(['completed', 'out\n', 'err\n', 4, false]);
  expect(await outputs(foreign.id)).toEqual(['completed', '', '', 4, true]);
  const { id: batch_id } = await system.client.batches.create({
    machine_ids: [machine_id],
    command: 'echo out',
  });
  expect((await client.batches.cancel({ batch_id })).results).toMatchObject([
    { status: 'completed', stdout: '' },
  ]);
  const reader = await system.keyed(['commands:execute', 'commands:read']);
  expect((await reader.client.batches.cancel({ batch_id })).results).toMatchObject([{ stdout: 'out\n' }]);
  const batch = await client.batches.create({ machine_ids: [machine_id], command: 'echo out' });
  expect(batch.results).toMatchObject([{ stdout: 'out\n' }]);
});
