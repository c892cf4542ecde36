// Work that one of several brokers does for all of them, such as sending deliveries and evaluating rules about keys.
// Also the rate limit that the brokers share.
import { expect, test } from 'vitest';
import { soon as times } from '../alerts-fixture.ts';
import { shared } from '../close-after-tests.ts';
import { leapingClock, soon } from '../commands-fixture.ts';
import { startFarhand } from '../start-farhand.ts';
import { program } from '../start-processes.ts';
import { answering, type Receiver, startReceiver } from '../webhook-receivers.ts';
import { copyOf, createServer, startTwo, withPostgres } from './postgres-fixture.ts';

const server = shared(() => createServer());

const start = async (more: string[] = []) =>
  startTwo(await server(), ['--webhook-allow', '127.0.0.0/8', '--webhook-retry', '50ms', ...more], {
    alerts: times,
  });

const idsOf = ({ got }: Receiver): string[] => got.map(({ body }) => String(JSON.parse(body.toString()).id));

withPostgres('of two brokers', () => {
  test('only one sends the events of both to a webhook, and the other one sends after the first has stopped', async () => {
    const { one, two } = await start();
    const receiver = await startReceiver();
    await two.client.webhooks.create({ url: receiver.url, events: ['command.completed'] });
    const near = await one.agent({ name: 'a' });
    const far = await two.agent({ name: 'b' });
    const run = ({ client }: typeof one, { machineId: machine_id }: { machineId: string }) =>
      client.commands.create({ machine_id, command: 'true', wait: 20_000 });
    const expected = 20;
    await Promise.all(Array.from({ length: expected }, (_, n) => run(n % 2 ? one : two, n % 3 ? near : far)));
    await soon(() => new Set(idsOf(receiver)).size).toBe(expected);
    // Waits for duplicates: if both brokers sent the events, the second copies would arrive within these 500 ms.
    await new Promise((resolve) => setTimeout(resolve, 500));
    expect(receiver.got).toHaveLength(expected);
    await one.broker.close();
    await run(two, far);
    await expect.poll(() => new Set(idsOf(receiver)).size, { timeout: 20_000 }).toBe(expected + 1);
  }, 60_000);

  test('the sender is killed with kill -9, and the other one sends what waits', async () => {
    const { one, two, flags } = await start();
    const receiver = await startReceiver();
    await one.broker.close();
    await two.broker.close();
    const args = ['--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0', ...flags];
    const first = program('broker/main.ts', ['--data-dir', one.dataDir, ...args]);
    await first.line('broker is up');
    const second = await startFarhand({ flags, dataDir: copyOf(one.dataDir) });
    await second.client.webhooks.create({ url: receiver.url, events: ['machine.registered'] });
    await second.agent({ name: 'a' });
    await soon(() => receiver.got.length).toBe(1);
    first.kill('SIGKILL');
    await second.agent({ name: 'b' });
    await expect.poll(() => new Set(idsOf(receiver)).size, { timeout: 30_000 }).toBe(2);
  }, 90_000);

  test('the events of a broker whose clock was an hour ahead at its start are sent at once by the other one, also while a retry waits', async () => {
    const clock = leapingClock();
    const url = await (await server()).createDatabase();
    const flags = ['--database-url', url, '--peer-listen', '127.0.0.1:0', '--webhook-allow', '127.0.0.0/8'];
    const one = await startFarhand({ flags });
    const receiver = await startReceiver(answering(500, 200));
    await one.client.webhooks.create({ url: receiver.url, events: ['machine.registered'] });
    await one.agent({ name: 'a' });
    await soon(() => receiver.got.length).toBe(1);
    clock.set(Date.now() + 3_600_000);
    const two = await startFarhand({ flags, dataDir: copyOf(one.dataDir) });
    clock.set(Date.now());
    await two.agent({ name: 'b' });
    await expect.poll(() => receiver.got.length, { timeout: 8_000 }).toBe(2);
  }, 60_000);

  test('neither may call its own port for other brokers with a webhook', async () => {
    const { one, two, query } = await start();
    const urls = (await query('SELECT url FROM brokers')).map(({ url }) => String(url));
    const refused = await Promise.all(
      urls.map(async (url) => {
        const body = { url, events: ['*'] };
        const answers = await Promise.all([one, two].map(({ call }) => call('POST', '/webhooks', { body })));
        return answers.filter(({ status }) => status === 422).length;
      }),
    );
    expect(refused).toEqual([1, 1]);
  });

  test('a rule about keys opens one alert and sends one notification, also after its broker is gone', async () => {
    const { one, two } = await start();
    const receiver = await startReceiver();
    await one.client.alertChannels.create({ name: 'hook', type: 'webhook', url: receiver.url });
    const expires_at = new Date(Date.now() + 3_600_000).toISOString();
    await two.client.keys.create({ name: 'short', scopes: ['machines:read'], expires_at });
    await one.client.alertRules.create({ name: 'keys', kind: 'key', before: 86_400_000, repeat_every: null });
    await soon(async () => (await two.client.alerts.list()).total).toBe(1);
    await expect.poll(() => receiver.got.length, { timeout: 10_000 }).toBe(1);
    await one.broker.close();
    await two.client.keys.create({ name: 'shorter', scopes: ['machines:read'], expires_at });
    await expect.poll(async () => (await two.client.alerts.list()).total, { timeout: 15_000 }).toBe(2);
    await expect.poll(() => receiver.got.length, { timeout: 15_000 }).toBe(2);
  }, 60_000);

  test('the requests of a key at both brokers count against one rate limit', async () => {
    const { one, two } = await start(['--rate-limit', '10']);
    const { key } = await one.keyed(['machines:read']);
    const answers = await Promise.all(
      Array.from({ length: 16 }, (_, n) => (n % 2 ? one : two).call('GET', '/machines', { key })),
    );
    const count = (code: number) => answers.filter(({ status }) => status === code).length;
    expect([count(200), count(429)]).toEqual([10, 6]);
  });
});
