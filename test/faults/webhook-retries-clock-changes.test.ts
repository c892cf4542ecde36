// Retries of webhooks while the clock of the broker is set: the delays do not change, and a restart limits them.
import { expect, test, vi } from 'vitest';
import { leapingClock } from '../commands-fixture.ts';
import { waitFor } from '../wait-for.ts';
import { answering, startReceiver, startWebhookSystem, type WebhookSystem } from '../webhook-receivers.ts';

const [hour, day] = [3_600_000, 86_400_000];

async function hookTo(system: WebhookSystem, url: string): Promise<string> {
  return (await system.client.webhooks.create({ url, events: ['machine.*'] })).id;
}

/** Resolves when the first attempt of the only delivery has failed and the next attempt has a time. */
function planned(system: WebhookSystem, webhook_id: string) {
  return waitFor(async () => {
    const { items } = await system.client.webhooks.deliveries({ webhook_id });
    expect(items).toMatchObject([{ status: 'pending', attempts: [{ status_code: 500 }] }]);
    return items[0]!;
  });
}

test.each([
  ['set back by an hour while a delivery waits', 0, -hour],
  ['two days ahead and is set right while a delivery waits', 2 * day, 0],
  ['set forward by an hour while a delivery waits', 0, hour],
])('a clock that was %s neither delays a retry nor makes it early', async (_what, before, after) => {
  const clock = leapingClock();
  clock.set(Date.now() + before);
  const system = await startWebhookSystem({ flags: ['--webhook-retry', '700ms'] });
  const receiver = await startReceiver(answering(500, 200));
  const id = await hookTo(system, receiver.url);
  await system.happen('machine.online');
  await planned(system, id);
  clock.set(Date.now() + after);
  const [delivery] = (await system.client.webhooks.deliveries({ webhook_id: id })).items;
  expect(Math.abs(Date.parse(delivery!.next_attempt_at!) - Date.now() - after)).toBeLessThan(10_000);
  // A second event makes the queue check the first delivery, which still waits for its retry. The retry must not become
  // early.
  await system.happen('machine.offline');
  const got = await receiver.heard(3);
  const [first, retry] = got.filter(({ headers }) => headers['x-service-event'] === 'machine.online');
  expect(retry!.at - first!.at).toBeGreaterThan(600);
});

test('a broker that starts after its clock was two days ahead retries after the longest wait at the latest', async () => {
  const clock = leapingClock();
  clock.set(Date.now() + 2 * day);
  const before = await startWebhookSystem({ flags: ['--webhook-retry', '200ms,1h'] });
  const receiver = await startReceiver(answering(500, 500, 200));
  const id = await hookTo(before, receiver.url);
  await before.happen('machine.online');
  await receiver.heard(2);
  await waitFor(async () => {
    const { items } = await before.client.webhooks.deliveries({ webhook_id: id });
    expect(items[0]?.attempts).toHaveLength(2);
  });
  await before.broker.close();
  clock.set(Date.now());
  const system = await startWebhookSystem({
    dataDir: before.dataDir,
    flags: ['--webhook-retry', '200ms,300ms'],
  });
  await receiver.heard(3);
  await waitFor(async () => {
    const { items } = await system.client.webhooks.deliveries({ webhook_id: id });
    expect(items).toMatchObject([{ status: 'delivered', next_attempt_at: null }]);
  });
});

test('a broker that stops waits at most 2 s for a running attempt, even if its clock runs backwards', async () => {
  const clock = leapingClock();
  const system = await startWebhookSystem();
  const hanging = await startReceiver(() => {});
  await hookTo(system, hanging.url);
  await system.happen('machine.online');
  await hanging.heard(1);
  const begun = performance.now();
  const backwards = setInterval(() => clock.set(Date.now() - 10 * (performance.now() - begun)), 10);
  await system.broker.close().finally(() => clearInterval(backwards));
  expect(performance.now() - begun).toBeLessThan(10_000);
});

test('an event right after a start does not delay deliveries whose due times a clock two days ahead has set', async () => {
  const clock = leapingClock();
  clock.set(Date.now() + 2 * day);
  const before = await startWebhookSystem({ flags: ['--webhook-retry', '1h'] });
  const receiver = await startReceiver(answering(500, 200));
  const id = await hookTo(before, receiver.url);
  await before.happen('machine.online');
  await planned(before, id);
  await before.broker.close();
  clock.set(Date.now());
  // The queue begins 5 s after the start, as one of a thousand queues may do.
  const random = vi.spyOn(Math, 'random').mockReturnValue(500);
  const system = await startWebhookSystem({ dataDir: before.dataDir, flags: ['--webhook-retry', '200ms'] });
  random.mockRestore();
  await system.happen('machine.offline');
  await waitFor(async () => {
    const { total } = await system.client.webhooks.deliveries({ webhook_id: id, status: 'delivered' });
    expect(total).toBeGreaterThan(0);
  });
  clock.leap(6_000);
  await receiver.heard(3);
});
