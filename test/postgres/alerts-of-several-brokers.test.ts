// Alerts of two brokers in separate processes. The one that evaluates the rule is killed with kill -9: before an alert
// opens, between its opening and its notification, and when it resolves.
import { expect, onTestFinished, test } from 'vitest';
import type { Farhand } from '../../shared/sdk/index.ts';
import { machineOf, notifiedSteps, recordedSteps } from '../alerts-fixture.ts';
import { shared } from '../close-after-tests.ts';
import { type KillableBroker, prepareBroker } from '../killable-broker.ts';
import { startProxy } from '../tcp-proxy.ts';
import { startReceiver } from '../webhook-receivers.ts';
import { copyOf, createServer, startTwo, withPostgres } from './postgres-fixture.ts';

const server = shared(() => createServer());
const times = { quietMs: 1_000, longestMs: 5_000, startMs: 0, downMs: 3_600_000 };
/**
 * Long enough for the other broker to take over. It waits until the lease of the killed broker has ended (up to 10 s),
 * and until its own lease has been valid for 10 s without a break.
 */
const patient = { timeout: 40_000, interval: 50 };
const rounds = Number(process.env.ROUNDS ?? 3);

const sleep = (ms: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, ms));
/** Waits up to 60 ms, in which a step of an alert may be decided, written or committed. */
const moment = (): Promise<void> => sleep(Math.random() * 60);

async function startTwoPrograms() {
  const url = await (await server()).createDatabase();
  const allow = ['--webhook-allow', '127.0.0.0/8', '--webhook-retry', '50ms'];
  const flags = ['--database-url', url, '--peer-listen', '127.0.0.1:0', ...allow];
  const one = await prepareBroker({ flags });
  await one.start(times);
  const two = await prepareBroker({ flags, dataDir: copyOf(one.dataDir) });
  await two.start(times);
  const receiver = await startReceiver();
  await one.client.alertChannels.create({ name: 'hook', type: 'webhook', url: receiver.url });
  return { one, two, receiver };
}

/** Counts all alerts, and the alerts that have exactly one event of each of these steps and no other event. */
async function counted(client: Farhand, ...steps: string[]): Promise<[total: number, once: number]> {
  const all = Object.values(await recordedSteps(client, 'alert_id'));
  const expected = Object.fromEntries(steps.map((step) => [step, 1]));
  const isOnce = (one: Record<string, number>): boolean => JSON.stringify(one) === JSON.stringify(expected);
  return [all.length, all.filter(isOnce).length];
}

/** A scripted machine. Each time it links, it links to the broker that `at` returns. */
const machineAt = (at: () => KillableBroker) =>
  machineOf({
    get grpc() {
      return at().grpc;
    },
    get client() {
      return at().client;
    },
    joinToken: () => at().joinToken(),
  });

withPostgres('of two brokers, the one with the rule is killed', () => {
  test('about a machine: its alert opens and resolves once, and each step is sent once', async () => {
    const { one, two, receiver } = await startTwoPrograms();
    let [owner, other] = [one, two];
    const machine = await machineAt(() => owner);
    await one.client.alertRules.create({ name: 'full', kind: 'disk', above: 90, for: 0 });
    /** Kills the owner soon after the machine has reported this value, and links the machine to the other broker. */
    const reportAndKill = async (disk: number): Promise<void> => {
      machine.send({ disk });
      await moment();
      await owner.kill();
      [owner, other] = [other, owner];
      await machine.back(owner.client);
    };
    for (let round = 1; round <= rounds; round += 1) {
      await reportAndKill(95);
      await expect.poll(async () => (await owner.client.alerts.list({ status: 'open' })).total).toBe(1);
      await other.start(times);
      await reportAndKill(50);
      await expect.poll(async () => (await owner.client.alerts.list({ status: 'open' })).total).toBe(0);
      await other.start(times);
    }
    expect(await counted(owner.client, 'opened', 'resolved')).toEqual([rounds, rounds]);
    const all = await recordedSteps(owner.client, 'alert_id');
    await expect.poll(() => notifiedSteps(receiver, 'alert_id'), patient).toEqual(all);
  }, 120_000);

  test('about a machine that is offline: an owner that was frozen opens no alert when it wakes up', async () => {
    const { one, two } = await startTwoPrograms();
    let owner = one;
    const machine = await machineAt(() => owner);
    // For a minute after its start, a broker counts no machine as offline. The leaps of the clock pass this minute.
    for (let n = 0; n < 5; n += 1) {
      await one.leap(20_000);
      await machine.report({ cpu: 1 });
    }
    await one.client.alertRules.create({ name: 'away', kind: 'offline', for: 0 });
    await one.client.machines.update({ machine_id: machine.id, tags: ['web'] });
    one.signal('SIGSTOP');
    machine.agent.control.cancel();
    machine.agent.close();
    owner = two;
    await machine.back();
    await sleep(1_000);
    one.signal('SIGCONT');
    await expect
      .poll(async () => (await one.client.machines.get({ machine_id: machine.id })).status)
      .toBe('online');
    // The rule is created at the second broker: on a busy machine, the first, which was frozen, may still answer 503 to
    // changes.
    await two.client.alertRules.create({ name: 'full', kind: 'disk', above: 90, for: 0 });
    await machine.report({ disk: 95 });
    await expect.poll(() => recordedSteps(two.client, 'name')).toEqual({ full: { opened: 1 } });
    await sleep(1_000);
    expect(await recordedSteps(two.client, 'name')).toEqual({ full: { opened: 1 } });
  }, 60_000);

  test('about schedules: the new owner of a machine knows the last run under the previous owner', async () => {
    const { one, two } = await startTwo(await server());
    const proxy = await startProxy(one.grpc);
    onTestFinished(() => proxy.close());
    const { machineId: machine_id, linked } = await one.agent({ through: proxy.address });
    const create = (name: string, command: string) =>
      one.client.schedules.create({ machine_id, name, command, cron: '0 0 29 2 *' });
    const [backup, cleanup] = [await create('backup', 'false'), await create('cleanup', 'true')];
    await one.client.schedules.run({ schedule_id: backup.id });
    const last = async (schedule_id: string) =>
      (await one.client.schedules.get({ schedule_id })).last_run?.status;
    await expect.poll(() => last(backup.id)).toBe('failed');
    await one.client.alertRules.create({ name: 'jobs', kind: 'schedule' });
    const statuses = async () => (await two.client.alerts.list()).items.map(({ status }) => status);
    await expect.poll(statuses).toEqual(['open']);
    await one.client.schedules.update({ schedule_id: backup.id, command: 'true' });
    await one.client.schedules.run({ schedule_id: backup.id });
    await expect.poll(statuses).toEqual(['resolved']);
    const moved = linked(true);
    proxy.aim(two.grpc);
    await one.broker.close();
    await moved;
    await two.client.schedules.update({ schedule_id: cleanup.id, command: 'exit 4' });
    await two.client.schedules.run({ schedule_id: cleanup.id });
    await expect.poll(statuses).toEqual(['open', 'resolved']);
    expect((await two.client.events.list({ type: 'alert.opened' })).total).toBe(2);
  }, 60_000);

  test('about keys: each alert opens and resolves once, and each step is sent once', async () => {
    const { one, two, receiver } = await startTwoPrograms();
    await one.client.alertRules.create({ name: 'keys', kind: 'key', before: 86_400_000 });
    const expiring = (hours: number) => new Date(Date.now() + hours * 3_600_000).toISOString();
    const ids: string[] = [];
    const create = async ({ client }: KillableBroker): Promise<void> => {
      const key = { name: 'short', scopes: ['machines:read' as const], expires_at: expiring(1) };
      ids.push((await client.keys.create(key)).id);
    };
    // Kills the broker before the alert opens, or while the alert is written.
    await create(two);
    await moment();
    await one.kill();
    await expect.poll(() => counted(two.client, 'opened'), patient).toEqual([1, 1]);
    await one.start(times);
    // Kills the broker between the alert and its notification.
    await create(one);
    await expect.poll(() => counted(one.client, 'opened'), patient).toEqual([2, 2]);
    expect(Object.keys(notifiedSteps(receiver, 'alert_id')).length).toBeLessThan(2);
    await two.kill();
    // The other broker creates the notification within 8 s. It can send the notification only after the lease of the
    // killed broker has ended.
    const made = async () => {
      const { items } = await one.client.events.list({ type: 'alert.notified' });
      return items.flatMap(({ data }) => data.alerts).length;
    };
    await expect.poll(made, { timeout: 8_000 }).toBe(2);
    await expect.poll(() => Object.keys(notifiedSteps(receiver, 'alert_id')).length, patient).toBe(2);
    await two.start(times);
    // Kills the broker while the alerts resolve.
    await create(two);
    await expect.poll(() => counted(two.client, 'opened'), patient).toEqual([3, 3]);
    for (const key_id of ids) await two.client.keys.update({ key_id, expires_at: expiring(100) });
    await moment();
    await one.kill();
    await expect.poll(() => counted(two.client, 'opened', 'resolved'), patient).toEqual([3, 3]);
    const all = await recordedSteps(two.client, 'alert_id');
    await expect.poll(() => notifiedSteps(receiver, 'alert_id'), patient).toEqual(all);
  }, 180_000);
});
