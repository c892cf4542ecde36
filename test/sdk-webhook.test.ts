// The SDK's verifyWebhook accepts the deliveries of a real broker, and refuses changed ones.
import { createHmac } from 'node:crypto';
import { Webhook } from 'standardwebhooks';
import { expect, onTestFinished, test, vi } from 'vitest';
import { webhooks } from '../shared/api/webhooks.ts';
import { SignatureError, verifyWebhook, type WebhookDelivery } from '../shared/sdk/index.ts';
import { type Received, startReceiver, startWebhookSystem } from './webhook-receivers.ts';

const secrets = ['correct horse ~ battery', `whsec_${Buffer.alloc(32, 7).toString('base64')}`];
const text = JSON.stringify({ id: 'evt_1', type: 'machine.online', timestamp: 't', data: { text: 'Grüße' } });

/** Returns a delivery with the headers that the broker sends if it signs `payload` at the time `at`. */
function signed(
  secret: string,
  { payload = text, at = Date.now() } = {},
): Omit<WebhookDelivery, 'headers'> & { headers: Record<string, string> } {
  const standard = secret.startsWith('whsec_')
    ? new Webhook(secret)
    : new Webhook(Buffer.from(secret), { format: 'raw' });
  const hex = createHmac('sha256', secret).update(payload).digest('hex');
  const headers = {
    'x-service-signature': `sha256=${hex}`,
    'webhook-id': 'evt_1',
    'webhook-timestamp': String(Math.floor(at / 1000)),
    'webhook-signature': standard.sign('evt_1', new Date(at), payload),
  };
  return { payload, headers, secret };
}

test.each(secrets)('with the secret %s only the genuine delivery is accepted', async (secret) => {
  const good = signed(secret);
  const without = (...names: string[]) =>
    Object.fromEntries(Object.entries(good.headers).filter(([name]) => !names.includes(name)));
  const bad: Record<string, Partial<WebhookDelivery>> = {
    'another body': { payload: `${text} ` },
    'another secret': { secret: `${secret}x` },
    'no signature': { headers: without('x-service-signature') },
    'another signature': { headers: { ...good.headers, 'x-service-signature': `sha256=${'0'.repeat(64)}` } },
    'a signature of another kind': { headers: { ...good.headers, 'x-service-signature': 'sha1=00' } },
    'two signatures': { headers: { ...good.headers, 'x-service-signature': ['a', 'b'] } },
    'an old delivery': signed(secret, { at: Date.now() - 301_000 }),
    'one from the future': signed(secret, { at: Date.now() + 302_000 }),
    'an old delivery with a new timestamp': {
      headers: {
        ...signed(secret, { at: Date.now() - 301_000 }).headers,
        'webhook-timestamp': good.headers['webhook-timestamp'],
      },
    },
    'two of the three webhook-* headers': { headers: without('webhook-signature') },
    'no timestamp': { headers: without('webhook-timestamp') },
    'a timestamp that is no number': { headers: { ...good.headers, 'webhook-timestamp': 'now' } },
    'another id': { headers: { ...good.headers, 'webhook-id': 'evt_2' } },
    'no webhook-* headers, with a tolerance': {
      headers: without('webhook-id', 'webhook-timestamp', 'webhook-signature'),
      tolerance: 60_000,
    },
    'no webhook-* headers': { headers: without('webhook-id', 'webhook-timestamp', 'webhook-signature') },
    'two of the three webhook-* headers, with an unlimited tolerance': {
      headers: without('webhook-signature'),
      tolerance: Number.POSITIVE_INFINITY,
    },
    'one older than the tolerance': { ...signed(secret, { at: Date.now() - 20_000 }), tolerance: 10_000 },
    'a payload that is no event': signed(secret, { payload: '{"id":1}' }),
    'a payload that is no JSON': signed(secret, { payload: 'x' }),
  };
  for (const [what, changes] of Object.entries(bad)) {
    const received = await verifyWebhook({ ...good, ...changes }).then(
      () => 'taken',
      (error: unknown) => (error instanceof SignatureError ? 'refused' : String(error)),
    );
    expect([what, received]).toEqual([what, 'refused']);
  }
  const event = JSON.parse(text);
  expect(await verifyWebhook(good)).toEqual(event);
  expect(await verifyWebhook({ ...good, payload: new TextEncoder().encode(text) })).toEqual(event);
  expect(await verifyWebhook({ ...good, headers: new Headers(good.headers) })).toEqual(event);
  const several = `v1,AAAA v2,x ${good.headers['webhook-signature']}`;
  expect(
    await verifyWebhook({ ...good, headers: { ...good.headers, 'webhook-signature': several } }),
  ).toEqual(event);
  const plain = without('webhook-id', 'webhook-timestamp', 'webhook-signature');
  const ageless = { ...good, headers: plain, tolerance: Number.POSITIVE_INFINITY };
  expect(await verifyWebhook(ageless)).toEqual(event);
  const late = signed(secret, { at: Date.now() - 3_000_000 });
  expect(await verifyWebhook({ ...late, tolerance: 4_000_000 })).toEqual(event);
});

test.each(['', 'whsec_', 'whsec_abcde', 'whsec_ab-_', 'whsec_====', 'whsec_a b='])(
  'the invalid secret "%s" accepts no delivery, and no webhook can be created with it',
  async (secret) => {
    const hex = createHmac('sha256', secret).update(text).digest('hex');
    const headers = { ...signed('other').headers, 'x-service-signature': `sha256=${hex}` };
    await expect(verifyWebhook({ payload: text, headers, secret })).rejects.toThrow(SignatureError);
    const body = { url: 'https://example.org/', events: ['*'], secret };
    expect(webhooks.create.body?.safeParse(body).success).toBe(false);
  },
);

test('no error message contains the secret', async () => {
  const secret = 'classified text';
  const error = await verifyWebhook({ ...signed(secret), payload: 'x' }).catch((reason: unknown) => reason);
  expect(String(error)).not.toContain(secret);
});

test.each(secrets)('a delivery of a real broker is genuine, with the secret %s', async (secret) => {
  const system = await startWebhookSystem();
  const receiver = await startReceiver();
  const { id } = await system.client.webhooks.create({ url: receiver.url, events: ['machine.*'], secret });
  await system.happen('machine.online', { text: 'Grüße\u2029 \ud83d\udc4b "\\ \u0000' });
  await receiver.heard(1);
  await system.client.webhooks.test({ webhook_id: id });
  const [first, second] = (await receiver.heard(2)) as [Received, Received];
  const payloadOf = ({ body }: Received) => new Uint8Array(body);
  const event = await verifyWebhook({ payload: payloadOf(first), headers: first.headers, secret });
  expect(event).toMatchObject({
    type: 'machine.online',
    data: { text: 'Grüße\u2029 \ud83d\udc4b "\\ \u0000' },
  });
  const tested = await verifyWebhook({ payload: payloadOf(second), headers: second.headers, secret });
  expect(tested.type).toBe('test');
  const later = Date.now() + 400_000;
  vi.spyOn(Date, 'now').mockReturnValue(later);
  onTestFinished(() => void vi.restoreAllMocks());
  const replayed = verifyWebhook({ payload: payloadOf(first), headers: first.headers, secret });
  await expect(replayed).rejects.toThrow('too old');
});
