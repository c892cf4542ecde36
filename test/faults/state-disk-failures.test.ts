// Disks that fail for a while. A change is either refused and undone, or committed and written to the history within
// seconds.
import { existsSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { type FileHandle, open } from 'node:fs/promises';
import { join } from 'node:path';
import { DatabaseSync } from 'node:sqlite';
import { describe, expect, onTestFinished, test, vi } from 'vitest';
import type { EventType } from '../../shared/api/events.ts';
import { leapingClock } from '../commands-fixture.ts';
import { startFarhand, type TestSystem } from '../start-farhand.ts';
import { waitFor } from '../wait-for.ts';
import { startReceiver, startWebhookSystem } from '../webhook-receivers.ts';

const names = (dataDir: string, file = 'state.json'): string[] =>
  JSON.parse(readFileSync(join(dataDir, file), 'utf8')).join_tokens.map((one: { name: string }) => one.name);

/**
 * Locks history.db as another program would, so that the broker cannot write to it. Returns a function that releases
 * the lock.
 */
function lockHistory({ dataDir }: TestSystem): () => void {
  const other = new DatabaseSync(join(dataDir, 'history.db'));
  onTestFinished(() => void (other.isOpen && other.close()));
  other.exec('BEGIN IMMEDIATE');
  return () => other.close();
}

/**
 * Makes the next `count` calls of fsync on directories fail, as on a broken disk. Returns a function that returns the
 * number of failures left.
 */
async function breakDirectorySyncs(count: number): Promise<() => number> {
  const some = await open('/', 'r');
  const prototype = Object.getPrototypeOf(some) as FileHandle;
  await some.close();
  const { sync } = prototype;
  let left = count;
  const broken = vi.spyOn(prototype, 'sync').mockImplementation(async function (this: FileHandle) {
    if (left > 0 && (await this.stat()).isDirectory()) {
      left -= 1;
      throw Object.assign(new Error('EIO: i/o error, fsync'), { code: 'EIO', errno: -5, syscall: 'fsync' });
    }
    return sync.call(this);
  });
  onTestFinished(() => broken.mockRestore());
  return () => left;
}

/** Polls while the clock leaps forward, so that delayed retries run soon. */
const leapUntil = (clock: { leap(ms: number): void }, look: () => Promise<void> | void): Promise<void> =>
  waitFor(
    async () => {
      clock.leap(250);
      await look();
    },
    { interval: 20 },
  );

describe('while history cannot be written', () => {
  test('a change of a file is reported as carried out, but not stored as an event', async () => {
    const system = await startFarhand();
    const { machineId } = await system.agent();
    const [gone, written] = [join(system.dataDir, '../gone'), join(system.dataDir, '../written')];
    writeFileSync(gone, '');
    const release = lockHistory(system);
    const answers = [
      await system.call('DELETE', `/machines/${machineId}/files?path=${gone}`),
      await system.call('PUT', `/machines/${machineId}/files/content`, {
        body: { path: written, content: 'new' },
      }),
    ];
    release();
    for (const { status, body } of answers)
      expect([status, body.error]).toMatchObject([
        500,
        { code: 'internal_error', message: /^the machine has carried out the request/ },
      ]);
    expect([existsSync(gone), readFileSync(written, 'utf8')]).toEqual([false, 'new']);
  });

  test('an enrolment is acknowledged, and its webhook is delivered within seconds after the failure has ended', async () => {
    const clock = leapingClock();
    const system = await startWebhookSystem();
    const receiver = await startReceiver();
    await system.client.webhooks.create({ url: receiver.url, events: ['machine.registered'] });
    const joinToken = await system.joinToken();
    const release = lockHistory(system);
    const agent = system.agent({ joinToken });
    const enrolled = () => JSON.parse(readFileSync(join(system.dataDir, 'state.json'), 'utf8')).machines;
    await waitFor(() => expect(enrolled()).toHaveLength(1));
    release();
    await leapUntil(clock, () => expect(receiver.types()).not.toEqual([]));
    expect(receiver.types()).toEqual(['machine.registered']);
    await agent;
  });

  test('the command of a removed machine is lost within seconds after the failure has ended', async () => {
    const clock = leapingClock();
    const system = await startFarhand();
    const { machineId: machine_id } = await system.agent();
    const { id: command_id } = await system.client.commands.create({
      machine_id,
      command: 'sleep 600',
      wait: 0,
    });
    const release = lockHistory(system);
    expect(await system.client.machines.remove({ machine_id })).toEqual({ deleted: true });
    release();
    await leapUntil(clock, async () =>
      expect(await system.client.commands.get({ command_id })).toMatchObject({
        status: 'lost',
        reason: 'machine_removed',
      }),
    );
  });

  test('the command of a machine that was removed before a restart of the broker fails with the name of the machine', async () => {
    const system = await startFarhand();
    const { machineId: machine_id } = await system.agent({ name: 'gone' });
    await system.client.commands.create({ machine_id, command: 'sleep 600', wait: 0 });
    const release = lockHistory(system);
    await system.client.machines.remove({ machine_id });
    await system.broker.close();
    release();
    const { client } = await startFarhand({ dataDir: system.dataDir });
    const failures = async () => (await client.events.list({ type: 'command.failed' })).items;
    await waitFor(async () =>
      expect((await failures()).map(({ data }) => data.machine_name)).toEqual(['gone']),
    );
  });
});

test('a machine that goes offline while history cannot be written has its event within seconds after the failure has ended', async () => {
  const clock = leapingClock();
  const system = await startWebhookSystem();
  const agent = await system.agent();
  const eventOf = (type: EventType): Promise<void> =>
    leapUntil(clock, async () => expect((await system.client.events.list({ type })).total).toBe(1));
  await eventOf('machine.online');
  const release = lockHistory(system);
  await agent.close();
  const failed = () =>
    system.log.some((line) => line.includes('machine.online or machine.offline could not be written'));
  await leapUntil(clock, () => expect(failed()).toBe(true));
  release();
  await eventOf('machine.offline');
});

describe('a commit whose directory cannot be synced', () => {
  test.each([
    ['once', 1],
    ['until the broker undoes it by itself', 3],
  ])('%s is answered 5xx, and has no effect at the next start', async (_when, failures) => {
    const clock = leapingClock();
    const system = await startFarhand();
    const make = (name: string) => system.call('POST', '/join-tokens', { body: { name } });
    const { id } = (await make('stays')).body.data;
    await make('other');
    const before = readFileSync(join(system.dataDir, 'state.json'), 'utf8');
    const left = await breakDirectorySyncs(failures);
    const refused = await system.call('DELETE', `/join-tokens/${id}`);
    expect([refused.status, refused.body.error.code]).toEqual(
      failures === 1 ? [503, 'unavailable'] : [500, 'internal_error'],
    );
    // A commit that cannot be undone at once is undone within seconds.
    await leapUntil(clock, () => expect(left()).toBe(0));
    await waitFor(() => expect(readFileSync(join(system.dataDir, 'state.json'), 'utf8')).toBe(before));
    expect(names(system.dataDir, 'state.json.last')).toContain('stays');
    await system.broker.close();
    const again = await startFarhand({ dataDir: system.dataDir });
    const { items } = await again.client.joinTokens.list();
    expect(new Set(items.map(({ name }) => name))).toEqual(new Set(['other', 'stays']));
    expect(await again.client.joinTokens.remove({ join_token_id: id })).toEqual({ deleted: true });
    expect(names(again.dataDir)).toEqual(['other']);
    expect(readdirSync(again.dataDir).filter((name) => name.includes('.new'))).toEqual([]);
  });
});

test('a change of history while another program locks it is answered with unavailable and Retry-After', async () => {
  const system = await startFarhand();
  const release = lockHistory(system);
  const params = { body: { name: 'x' }, headers: { 'Idempotency-Key': 'once' } };
  const refused = await system.call('POST', '/join-tokens', params);
  expect([refused.status, refused.body.error.code]).toEqual([503, 'unavailable']);
  expect(refused.headers.get('retry-after')).toBe('5');
  release();
  expect((await system.call('POST', '/join-tokens', params)).status).toBe(201);
});
