// Webhooks over REST: who may make one for what, what is shown of it, and what it delivers.
import { expect, test } from 'vitest';
import { answering, openReceiver, openToldHouse } from './receivers.ts';

test('an event goes to a webhook that subscribes to it', async () => {
  const house = await openToldHouse();
  const receiver = await openReceiver(answering(500, 500, 200));
  await house.client.webhooks.create({ url: receiver.url, events: ['machine.*'] });
  await house.happen('machine.offline', { last_seen: 'x' });
  await receiver.heard(3);
  console.log(receiver.got.map(({ headers, body, at }) => [headers, body.toString(), at]));
  const { items } = await house.client.webhooks.list({});
  console.log(items, JSON.stringify((await house.client.webhooks.deliveries({ webhook_id: items[0]!.id })).items));
  expect(receiver.got.length).toBe(3);
});
