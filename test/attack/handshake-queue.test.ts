// Many simultaneous connections to the port for agents. They wait for their TLS handshake and are not reset. The source
// addresses take turns, and a connection that stalls or closes does not delay the others.
import { once } from 'node:events';
import { type AddressInfo, connect, createServer, type Socket } from 'node:net';
import { connect as connectTls } from 'node:tls';
import { expect, onTestFinished, test } from 'vitest';
import { ConnectionLimiter } from '../../broker/connection-limiter.ts';
import { HandshakeQueue } from '../../broker/link/handshake-queue.ts';
import { startFarhand } from '../start-farhand.ts';
import { waitFor } from '../wait-for.ts';

/** The head of a TLS record (type, version, length), whose content the client never sends (RFC 8446 section 5.1). */
const recordHead = Buffer.of(22, 3, 1, 1, 0);

/**
 * Starts a port whose connections wait in a queue for their TLS handshake. `begun` has the first bytes of each
 * connection that has left the queue, in order.
 */
async function startQueue(limits: { atOnce: number; perTurn: number; stalledMs: number }) {
  const options = { connections: 100, unauthenticated: 50, deadlineMs: 60_000, isShared: () => true };
  const limiter = new ConnectionLimiter(options);
  const begun: string[] = [];
  const sockets: Socket[] = [];
  const begin = (socket: Socket): void => {
    begun.push(String(socket.read()));
    sockets.push(socket);
  };
  const queue = new HandshakeQueue(limiter, begin, limits);
  let arrived = 0;
  const server = createServer((socket) => {
    queue.add(socket);
    socket.once('readable', () => {
      arrived += 1;
    });
  });
  await once(server.listen(0, '127.0.0.1'), 'listening');
  onTestFinished(async () => {
    queue.close();
    server.close();
    await limiter.close();
  });
  const { port } = server.address() as AddressInfo;
  return {
    ...{ limiter, begun, sockets },
    /** Connects from an address and sends a name as its first bytes. Resolves when the server has received them. */
    async from(localAddress: string, name: string): Promise<Socket> {
      const socket = connect({ port, host: '127.0.0.1', localAddress });
      onTestFinished(() => void socket.destroy());
      socket.on('error', () => undefined).resume();
      await once(socket, 'connect');
      const before = arrived;
      if (name === '') return socket;
      socket.write(name);
      await waitFor(() => expect(arrived).toBe(before + 1));
      return socket;
    },
  };
}

const oneAtATime = { atOnce: 1, perTurn: 1, stalledMs: 60_000 };

test('sources take turns, however many connections one of them has', async () => {
  const { from, begun, sockets, limiter } = await startQueue(oneAtATime);
  await from('127.0.0.2', 'a1');
  await waitFor(() => expect(begun).toEqual(['a1']));
  for (const name of ['a2', 'a3', 'a4']) await from('127.0.0.2', name);
  await from('127.0.0.3', 'b1');
  for (const expected of [
    ['a1', 'a2'],
    ['a1', 'a2', 'b1'],
    ['a1', 'a2', 'b1', 'a3'],
  ]) {
    const [last] = sockets.slice(-1);
    // The next handshake begins when the current connection is closed, or when it has authenticated. The loop tests
    // both in turn.
    if (expected.length % 2 === 0) last?.destroy();
    else if (last) limiter.authenticate(last);
    await waitFor(() => expect(begun).toEqual(expected));
  }
});

test('a connection that leaves while it waits begins no handshake, and a silent one does not delay others', async () => {
  const { from, begun, sockets } = await startQueue(oneAtATime);
  await from('127.0.0.2', '');
  await from('127.0.0.2', 'first');
  await waitFor(() => expect(begun).toEqual(['first']));
  const leaving = await from('127.0.0.2', 'leaving');
  leaving.end();
  await once(leaving, 'close');
  await from('127.0.0.2', 'next');
  sockets[0]?.destroy();
  await waitFor(() => expect(begun).toEqual(['first', 'next']));
});

test('a connection that stalls is closed for those that wait', async () => {
  const { from, begun } = await startQueue({ atOnce: 1, perTurn: 1, stalledMs: 200 });
  const stalled = await from('127.0.0.2', 'stalled');
  await waitFor(() => expect(begun).toEqual(['stalled']));
  const gone = once(stalled, 'close');
  await from('127.0.0.3', 'next');
  await gone;
  await waitFor(() => expect(begun).toEqual(['stalled', 'next']));
});

test('a connection that sends more than a TLS record while it waits is closed', async () => {
  const { from, begun } = await startQueue(oneAtATime);
  await from('127.0.0.2', 'first');
  await waitFor(() => expect(begun).toEqual(['first']));
  const greedy = await from('127.0.0.2', '');
  const gone = new Promise((resolve) => greedy.once('close', resolve));
  greedy.write('x'.repeat(100_000));
  await gone;
  expect(begun).toEqual(['first']);
});

test('1,200 connections at once all end their handshake', async () => {
  const system = await startFarhand();
  const [host = '', port = ''] = system.grpc.split(':');
  const handshake = async (): Promise<void> => {
    const socket = connectTls({ host, port: Number(port), rejectUnauthorized: false, ALPNProtocols: ['h2'] });
    await once(socket, 'secureConnect').finally(() => socket.destroy());
  };
  await Promise.all(Array.from({ length: 1_200 }, handshake));
});

test('an agent links while more connections than may authenticate at once stall in their handshake', async () => {
  const system = await startFarhand();
  const [host = '', port = ''] = system.grpc.split(':');
  const sockets = Array.from({ length: 600 }, () => connect(Number(port), host));
  onTestFinished(() => {
    for (const socket of sockets) socket.destroy();
  });
  for (const socket of sockets) socket.on('error', () => undefined).write(recordHead);
  await Promise.all(sockets.map((socket) => once(socket, 'connect')));
  const { machineId: machine_id } = await system.agent();
  expect((await system.client.machines.get({ machine_id })).status).toBe('online');
});
