// A broker that is killed loses no delivery. After its next start it sends each delivery, and repeats it at most once.
import { once } from 'node:events';
import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';
import { expect, onTestFinished, test } from 'vitest';
import { loadIdentity } from '../../agent/identity.ts';
import { withBroker } from '../../broker/cli/connect-to-broker.ts';
import { Farhand } from '../../shared/sdk/index.ts';
import { temporaryFolder } from '../start-farhand.ts';
import { program } from '../start-processes.ts';
import { waitFor } from '../wait-for.ts';

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
  const dataDir = temporaryFolder('broker');
  const flags = ['--data-dir', dataDir, '--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0'];
  const args = [...flags, '--webhook-allow', '127.0.0.1'];
  const broker = program('broker/main.ts', args);
  const killed = once(broker, 'exit');
  const kill = (at: string) => () => void (at === moment && broker.kill('SIGKILL'));
  const receiver = await startWatchedReceiver(kill('connected'), kill('answered'));
  const { grpc } = await broker.line('broker is up');
  const { token, key, id } = await withBroker(
    { dataDir, url: undefined, apiKey: undefined },
    async (client) => ({
      token: (await client.joinTokens.create({})).token,
      key: (await client.keys.create({ name: 'test', scopes: ['admin'] })).key,
      id: (await client.webhooks.create({ url: receiver.url, events: ['machine.registered'] })).id,
    }),
  );
  const params = { broker: String(grpc), joinToken: token, name: 'one', tags: [] };
  await loadIdentity(temporaryFolder('agent'), params).catch(() => undefined);
  await killed;
  const before = receiver.bodies.length;
  const again = program('broker/main.ts', args);
  const { http } = await again.line('broker is up');
  const client = new Farhand({ baseUrl: String(http), apiKey: key, retries: 0 });
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
