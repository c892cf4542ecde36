// Live updates: one stream of changes, with only those that the key may read.
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, onTestFinished, test } from 'vitest';
import { refusalIn } from './all-routes.ts';
import { leapingClock } from './commands-fixture.ts';
import { startFarhand, startWithAgent, type TestSystem, temporaryFolder } from './start-farhand.ts';

interface Update {
  event: string;
  // biome-ignore lint/suspicious/noExplicitAny: JSON of any shape
  data: any;
}

/** Follows a stream of updates in the background. */
async function follow(system: TestSystem, topics: string, key = system.key) {
  const ending = new AbortController();
  onTestFinished(() => ending.abort());
  const response = await fetch(`${system.url}/api/v1/live?topics=${topics}`, {
    headers: { Authorization: `Bearer ${key}` },
    signal: ending.signal,
  });
  expect(response.status).toBe(200);
  const updates: Update[] = [];
  let open = true;
  const read = async (): Promise<void> => {
    let text = '';
    for await (const chunk of response.body!.pipeThrough(new TextDecoderStream())) {
      const events = `${text}${chunk}`.split('\n\n');
      text = events.pop() ?? '';
      for (const one of events) {
        const [, event = '', data = 'null'] = /^event: (.*)\ndata: (.*)$/.exec(one) ?? [];
        if (event) updates.push({ event, data: JSON.parse(data) });
      }
    }
  };
  void read()
    .catch(() => {})
    .finally(() => {
      open = false;
    });
  return { updates, isOpen: () => open, close: () => ending.abort() };
}

type Stream = Awaited<ReturnType<typeof follow>>;
const seen = (stream: Stream, event: string) =>
  stream.updates.filter((one) => one.event === event).map(({ data }) => data);
const machinesIn = (stream: Stream) => seen(stream, 'machines').flatMap(({ machines = [] }) => machines);
const removedIn = (stream: Stream) => seen(stream, 'machines').flatMap(({ removed = [] }) => removed);

describe('a stream is refused', () => {
  test('for topics that do not exist, name no id or name too many', async () => {
    const system = await startFarhand();
    const many = Array.from({ length: 21 }, () => 'machines').join();
    for (const topics of [
      '',
      'x',
      'machines,',
      'commands:',
      'batches',
      'batches:',
      'machines:mach_1',
      'events:*',
      'commands:a:b',
      many,
    ])
      expect([topics, refusalIn(await system.call('GET', `/live?topics=${topics}`))]).toEqual([
        topics,
        '400 invalid_request',
      ]);
    expect(refusalIn(await system.call('GET', '/live'))).toBe('400 invalid_request');
  });

  test('for a topic without its scope, and for what is on a machine that the key may not use', async () => {
    const { system, machine_id } = await startWithAgent();
    const { id } = await system.client.commands.create({ machine_id, command: 'true' });
    const { id: batch } = await system.client.batches.create({ machine_ids: [machine_id], command: 'true' });
    const { key: reader } = await system.keyed(['machines:read']);
    const { key: limited } = await system.keyed(['commands:read'], { tags: ['web'] });
    const outcome = async (topics: string, key = system.key) =>
      refusalIn(await system.call('GET', `/live?topics=${topics}`, { key }));
    expect(await outcome(`machines,commands:${id}`, reader)).toBe('403 forbidden');
    expect(await outcome('events', limited)).toBe('403 forbidden');
    expect(await outcome('commands', reader)).toBe('403 forbidden');
    expect(await outcome(`commands:${id}`, limited)).toBe('403 forbidden');
    expect(await outcome(`batches:${batch}`, limited)).toBe('403 forbidden');
    expect([await outcome('commands:cmd_x'), await outcome('batches:batch_x')]).toEqual([
      '404 command_not_found',
      '404 batch_not_found',
    ]);
  });
});

test('machines that join, report, are renamed, go offline or are removed are sent with their last report', async () => {
  const system = await startFarhand();
  const live = await follow(system, 'machines');
  await expect.poll(() => live.updates[0]).toEqual({ event: 'ready', data: {} });
  const agent = await system.agent({ name: 'web-1' });
  const id = agent.machineId;
  const last = () => machinesIn(live).findLast((machine) => machine.id === id);
  await expect.poll(() => last()?.status).toBe('online');
  await expect.poll(() => last()?.latest?.memory.total).toBeGreaterThan(0);
  await system.client.machines.update({ machine_id: id, name: 'web-2', tags: ['eu'] });
  await expect.poll(() => [last()?.name, last()?.tags]).toEqual(['web-2', ['eu']]);
  await agent.close();
  await expect.poll(() => last()?.status).toBe('offline');
  await system.client.machines.remove({ machine_id: id });
  await expect.poll(() => removedIn(live)).toEqual([id]);
});

test('a key limited by tag follows only its machines, also when their tags change', async () => {
  const system = await startFarhand();
  const { machineId: mine } = await system.agent({ tags: 'web' });
  const { machineId: other } = await system.agent({ tags: 'db' });
  const third = await system.agent({ tags: 'db' });
  const { key } = await system.keyed(['machines:read'], { tags: ['web'] });
  const live = await follow(system, 'machines', key);
  const ids = () => new Set(machinesIn(live).map(({ id }) => id));
  await system.client.machines.update({ machine_id: other, name: 'hidden' });
  await third.close();
  await system.client.machines.update({ machine_id: mine, name: 'seen' });
  await expect.poll(ids).toEqual(new Set([mine]));
  await system.client.machines.update({ machine_id: other, tags: ['web'] });
  await expect.poll(ids).toEqual(new Set([mine, other]));
  await system.client.machines.update({ machine_id: mine, tags: ['db'] });
  await expect.poll(() => removedIn(live)).toEqual([mine]);
});

test('events, a command and a batch are sent in one stream; command and batch with each state from start to end', async () => {
  const { system, machine_id } = await startWithAgent();
  const command = await system.client.commands.create({ machine_id, command: 'cat', input: true, wait: 0 });
  const batch = await system.client.batches.create({ machine_ids: [machine_id], command: 'true', wait: 0 });
  const live = await follow(system, `events,commands:${command.id},batches:${batch.id}`);
  await expect.poll(() => seen(live, 'command').at(-1)?.command.status).toBe('running');
  await system.client.commands.input({ command_id: command.id, data: 'hello', end: true });
  await expect
    .poll(() => seen(live, 'command').at(-1)?.command)
    .toMatchObject({ status: 'completed', stdout: 'hello' });
  await expect.poll(() => seen(live, 'batch').at(-1)?.batch).toMatchObject({ status: 'completed', total: 1 });
  const ended = () =>
    seen(live, 'event')
      .filter(({ event }) => event.type === 'command.completed')
      .map(({ event }) => event.data.command_id);
  await expect.poll(ended).toContain(command.id);
  expect(live.isOpen()).toBe(true);
});

test('a batch is sent again when its member starts and when its member ends', async () => {
  const { system, machine_id } = await startWithAgent();
  const gate = join(temporaryFolder('gate'), 'open');
  const command = `until [ -e ${gate} ]; do sleep 0.05; done`;
  const batch = await system.client.batches.create({ machine_ids: [machine_id], command, wait: 0 });
  const live = await follow(system, `batches:${batch.id}`);
  await expect.poll(() => seen(live, 'batch').at(-1)?.batch.counts.running).toBe(1);
  writeFileSync(gate, '');
  await expect.poll(() => seen(live, 'batch').at(-1)?.batch.status).toBe('completed');
});

test('a stream ends when its key loses the scope of a topic, and not when it loses another', async () => {
  const system = await startFarhand();
  const { key } = await system.keyed(['machines:read', 'files:read']);
  const { key_id } = { key_id: (await system.call('GET', '/auth/me', { key })).body.data.id };
  const machines = await follow(system, 'machines', key);
  const events = await follow(system, 'events', key);
  await system.client.keys.update({ key_id, scopes: ['machines:read'] });
  await system.agent({ name: 'web-1' });
  await expect.poll(() => machinesIn(machines).length).toBeGreaterThan(0);
  expect([machines.isOpen(), events.isOpen()]).toEqual([true, true]);
  await system.client.keys.update({ key_id, scopes: ['files:read'] });
  await expect.poll(() => [machines.isOpen(), events.isOpen()]).toEqual([false, false]);
});

test('commands are named when they are created, start and end, to keys that may use their machine', async () => {
  const { system, agent, machine_id } = await startWithAgent({ tags: 'web' });
  const { key } = await system.keyed(['commands:read'], { tags: ['web'] });
  const { key: other } = await system.keyed(['commands:read'], { tags: ['db'] });
  const [live, none] = [await follow(system, 'commands', key), await follow(system, 'commands', other)];
  const times = (stream: Stream, id: string) =>
    seen(stream, 'commands').filter(({ commands }) => commands.includes(id)).length;
  const { id: first } = await system.client.commands.create({
    machine_id,
    command: 'cat',
    input: true,
    wait: 0,
  });
  await expect.poll(() => times(live, first)).toBeGreaterThan(0);
  const before = times(live, first);
  await system.client.commands.cancel({ command_id: first });
  await expect.poll(() => times(live, first)).toBeGreaterThan(before);
  await agent.close();
  const { id: queued } = await system.client.commands.create({
    ...{ machine_id, command: 'true', wait: 0, queue_for: 60_000 },
  });
  await expect.poll(() => times(live, queued)).toBe(1);
  await system.client.machines.update({ machine_id, tags: ['db'] });
  await system.client.commands.cancel({ command_id: queued });
  await expect.poll(() => times(none, queued)).toBe(1);
  expect([times(live, queued), times(none, first)]).toEqual([1, 0]);
});

test('a stream whose key has expired does not make the commands of others fail', async () => {
  const clock = leapingClock();
  const { system, machine_id } = await startWithAgent();
  const expires_at = new Date(Date.now() + 3_600_000).toISOString();
  const { key } = await system.client.keys.create({ name: 'brief', scopes: ['commands:read'], expires_at });
  const live = await follow(system, 'commands', key);
  // The wall clock leaps, so the timer that ends the stream is late.
  clock.set(Date.now() + 7_200_000);
  const { status, stdout } = await system.client.commands.create({ machine_id, command: 'echo out' });
  expect([status, stdout]).toEqual(['completed', 'out\n']);
  await expect.poll(live.isOpen).toBe(false);
});

test('a stream ends with its key, and when the broker stops', async () => {
  const system = await startFarhand();
  const { key } = await system.keyed(['machines:read']);
  const live = await follow(system, 'machines', key);
  const other = await follow(system, 'machines');
  const { id } = (await system.call('GET', '/auth/me', { key })).body.data;
  await system.client.keys.remove({ key_id: id });
  await expect.poll(live.isOpen).toBe(false);
  expect(other.isOpen()).toBe(true);
  await system.broker.close();
  await expect.poll(other.isOpen).toBe(false);
});
