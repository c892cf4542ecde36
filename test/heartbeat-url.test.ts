// The heartbeat URL, which a broker calls to show that it is alive.
import { expect, test } from 'vitest';
import { startFarhand } from './start-farhand.ts';
import { answering, startReceiver } from './webhook-receivers.ts';

test('the broker calls its heartbeat URL at each interval until it stops, and logs only the first failure and recovery', async () => {
  const receiver = await startReceiver(answering(200, 500, 500, 200));
  const { broker, log } = await startFarhand({
    flags: ['--heartbeat-url', receiver.url, '--heartbeat-every', '50ms', '--webhook-allow', '127.0.0.0/8'],
  });
  await receiver.heard(5);
  const said = log.filter((line) => line.includes('--heartbeat-url'));
  expect(said).toHaveLength(2);
  expect(said.join()).not.toContain('hook?x=1');
  await broker.close();
  const count = receiver.got.length;
  const { url } = await startReceiver();
  // Starting a second broker takes longer than the interval of 50 ms. If the first broker still ran, it would send
  // another heartbeat meanwhile.
  await startFarhand({ flags: ['--heartbeat-url', url, '--webhook-allow', '127.0.0.0/8'] });
  expect(receiver.got.length).toBe(count);
});

test('an internal heartbeat URL is not called unless it is allowed', async () => {
  const receiver = await startReceiver();
  const { log } = await startFarhand({ flags: ['--heartbeat-url', receiver.url] });
  await expect.poll(() => log.some((line) => line.includes('is not public'))).toBe(true);
  expect(receiver.got).toEqual([]);
});
