// The peer port accepts only brokers of the same authority.
import { once } from 'node:events';
import { createServer, type IncomingMessage, type Server } from 'node:http';
import { Agent, request } from 'node:https';
import { connect } from 'node:net';
import { PassThrough } from 'node:stream';
import { text } from 'node:stream/consumers';
import type { SecureContextOptions } from 'node:tls';
import { expect, onTestFinished, test } from 'vitest';
import { loadAuthority, type PeerLeaf, peerName } from '../../broker/ca-and-broker-certificates.ts';
import { PeerClient } from '../../broker/cluster/peers/forward-http-to-peer.ts';
import { listenForPeers } from '../../broker/cluster/peers/peer-port.ts';
import { ConnectionLimiter, connectionLimits } from '../../broker/connection-limiter.ts';
import { shared } from '../close-after-tests.ts';
import { quiet, temporaryFolder } from '../start-farhand.ts';
import { startTwoBrokers } from './two-brokers.ts';

const brokers = shared(startTwoBrokers);

/**
 * Sends a request about a path to the owner's peer port, as the local administrator and with this certificate. Resolves
 * with the status.
 */
async function ask(leaf: SecureContextOptions, headers: Record<string, string> = {}): Promise<number> {
  const { peerPort, machineId } = await brokers();
  const sent = request(`https://${peerPort}/api/v1/machines/${machineId}/files/stat?path=/etc`, {
    ...leaf,
    servername: peerName,
    agent: false,
    headers: { 'X-Farhand-Client': JSON.stringify({ address: '', key_id: 'key_local' }), ...headers },
  });
  sent.end();
  const [answer] = await once(sent, 'response');
  await text(answer);
  return answer.statusCode;
}

test('a connection without a certificate, or with one that is not a broker’s, gets no answer', async () => {
  const { front } = await brokers();
  const authority = await loadAuthority(front.dataDir, false);
  const other = await loadAuthority(temporaryFolder('other'), true);
  const { ca, ...peer } = await authority.peer();
  const { ca: _, ...foreign } = await other.peer();
  const { minVersion: __, ...link } = await authority.leaf();
  const rest = await (await authority.rest(['localhost'])).leaf();
  const named = await (await authority.rest([peerName])).leaf();
  for (const [what, leaf] of Object.entries({ none: {}, foreign, link, rest, named }))
    await expect(ask({ ca, ...leaf }), what).rejects.toThrow();
  expect(await ask({ ca, ...peer })).toBe(200);
});

test('a request of a broker is refused if it describes no client, or a key that does not exist', async () => {
  const { front } = await brokers();
  const leaf = await (await loadAuthority(front.dataDir, false)).peer();
  expect(await ask(leaf, { 'X-Farhand-Client': '' })).toBe(400);
  expect(await ask(leaf, { 'X-Farhand-Client': '{"address":""}' })).toBe(400);
  expect(await ask(leaf, { 'X-Farhand-Client': '{"address":"","key_id":"key_none"}' })).toBe(401);
});

test('a broker does not send requests to a server that is not a broker', async () => {
  const { call, machineId, owner, urls } = await startTwoBrokers();
  // This is the owner's port for agents. Its certificate has the same authority, but it is no peer port.
  urls.set('owner', `https://${owner.grpc}`);
  const { status } = await call('GET', `/machines/${machineId}/files/stat?path=/etc`);
  expect(status).toBe(503);
});

test('a connection that sends nothing is closed', async () => {
  const { peerPort } = await startTwoBrokers({ silentMs: 300 });
  const [host, port] = peerPort.split(':');
  const socket = connect({ host, port: Number(port) });
  onTestFinished(() => void socket.destroy());
  socket.on('error', () => undefined).resume();
  await once(socket, 'close');
});

/** Opens a peer port for these requests until the test ends, and returns its number. */
async function listen(leaf: PeerLeaf, http: Server): Promise<number> {
  const connections = new ConnectionLimiter({ ...connectionLimits().http, isShared: () => true });
  const where = { host: '127.0.0.1', port: 0 };
  const port = await listenForPeers({ ...where, leaf, connections, http, addServices: () => {}, log: quiet });
  onTestFinished(() => port.close(0));
  return port.port;
}

test('the terminal of a client that has gone before its broker was found is not opened', async () => {
  const leaf = await (await loadAuthority(temporaryFolder('gone'), true)).peer();
  const http = createServer().on('upgrade', (_, socket) =>
    socket.end('HTTP/1.1 101 S\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n'),
  );
  const peer = { brokerId: 'owner', url: `https://127.0.0.1:${await listen(leaf, http)}` };
  const client = new PeerClient(leaf, { hasEnded: () => false }, quiet);
  onTestFinished(() => client.close());
  const asked = { method: 'GET', url: '/', headers: {} } as IncomingMessage;
  const gone = new PassThrough().destroy();
  await once(gone, 'close');
  const opened = client.upgrade(peer, asked, gone, Buffer.alloc(0), { requestId: 'req' });
  await expect(opened).rejects.toMatchObject({ code: 'unavailable' });
});

test('the pieces of an answer do not wait for acknowledgements of earlier ones', async () => {
  const leaf = await (await loadAuthority(temporaryFolder('pieces'), true)).peer();
  const http = createServer((_, response) => {
    response.flushHeaders();
    setImmediate(() => {
      response.write('one');
      setImmediate(() => response.end('two'));
    });
  });
  const port = await listen(leaf, http);
  const agent = new Agent({ ...leaf, servername: peerName, keepAlive: true });
  onTestFinished(() => agent.destroy());
  const times: number[] = [];
  for (let n = 0; n < 40; n += 1) {
    const begun = performance.now();
    const sent = request({ agent, host: '127.0.0.1', port });
    sent.end();
    const [answer] = await once(sent, 'response');
    expect(await text(answer)).toBe('onetwo');
    times.push(performance.now() - begun);
  }
  // Linux delays acknowledgements by 40 ms, but not on new connections. So the test ignores the times of the first 20
  // requests.
  expect(times.slice(20).sort((a, b) => a - b)[5]).toBeLessThan(30);
});
