// A broker that is killed loses no delivery. After its next start it sends each delivery, and repeats it at most once.
import { once } from 'node:events';
import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';
import { expect, onTestFinished, test } from 'vitest';
import { loadIdentity } from '../../agent/join-or-load-identity.ts';
import { temporaryFolder } from '../start-farhand.ts';
import { waitFor } from '../wait-for.ts';
import { startBrokerProgram } from './broker-program.ts';

interface Watched {
  url: string;
  bodies: { id: string; body: string }[];
}

/** Starts a receiver that calls `connected` at each connection and `answered` after each answer. */
async function startWatchedReceiver(connected: () => void, answered: () => void): Promise<Watched> {
  const bodies: Watched['bodies'] = [];
  const server = createServer((request, response) => {
    let body = '';
    request.setEncoding('utf8').on('data', (chunk: string) => {
      body += chunk;
    });
    request.on('end', () => {
      bodies.push({ id: String(request.headers['webhook-id']), body });
      response.end('ok', answered);
    });
  });
  // A killed broker closes its connection in the middle of a request, which must not end the receiver.
  server.on('clientError', () => undefined);
  server.on('connection', connected);
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  onTestFinished(() => {
    server.closeAllConnections();
    server.close();
  });
  return { url: `http://127.0.0.1:${(server.address() as AddressInfo).port}/`, bodies };
}

/**
 * Starts a broker in a separate process, with a webhook and a newly registered machine, and kills the broker at this
 * moment.
 */
async function killedAt(moment: 'connected' | 'answered') {
  const broker = await startBrokerProgram({ flags: ['--webhook-allow', '127.0.0.1'] });
  const { client } = broker;
  const first = broker.child();
  const killed = once(first, 'exit');
  const kill = (at: string) => () => void (at === moment && first.kill('SIGKILL'));
  const receiver = await startWatchedReceiver(kill('connected'), kill('answered'));
  const { id } = await client.webhooks.create({ url: receiver.url, events: ['machine.registered'] });
  const { token } = await client.joinTokens.create({});
  const params = { broker: broker.grpc, joinToken: token, name: 'one', tags: [] };
  await loadIdentity(temporaryFolder('agent'), params).catch(() => undefined);
  await killed;
  const before = receiver.bodies.length;
  await broker.start();
  await waitFor(
    async () => {
      const { items } = await client.webhooks.deliveries({ webhook_id: id });
      expect(items.map(({ status }) => status)).toEqual(['delivered']);
    },
    { interval: 50 },
  );
  return { ...receiver, before };
}

test('kill -9 before the first attempt: the event is delivered after the next start', async () => {
  const { bodies, before } = await killedAt('connected');
  expect(before).toBeLessThanOrEqual(1);
  expect(bodies).toHaveLength(before + 1);
});

test('kill -9 between the answer and its record: the event is delivered at most twice, with the same bytes', async () => {
  const { bodies } = await killedAt('answered');
  expect(bodies.length).toBeGreaterThanOrEqual(1);
  expect(bodies.length).toBeLessThanOrEqual(2);
  expect(new Set(bodies.map(({ id, body }) => `${id} ${body}`)).size).toBe(1);
});
