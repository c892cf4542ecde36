// Checks that a port or socket file accepts connections.
import { once } from 'node:events';
import { connect, type Socket } from 'node:net';
import { connect as connectTls } from 'node:tls';
import { after } from '../clock.ts';

const timeoutMs = 3_000;

/** Rejects if no connection to the address is made within 3 s. */
export const reachPort = (host: string, port: number): Promise<void> =>
  settled(connect({ host, port }), 'connect');

/** Connects to a broker. Rejects unless the authority `ca` (PEM) has signed the broker's certificate. */
export async function reachBroker(host: string, port: number, ca: string): Promise<void> {
  const socket = connectTls({ host, port, ca, servername: 'farhand-broker', ALPNProtocols: ['h2'] });
  await settled(socket, 'secureConnect');
}

/** Rejects if no connection to the socket file is made within 3 s. */
export const reachSocketFile = (path: string): Promise<void> => settled(connect({ path }), 'connect');

async function settled(socket: Socket, event: string): Promise<void> {
  const error = new Error(`no answer within ${timeoutMs / 1000} s`);
  const cancel = after(timeoutMs, () => socket.destroy(error));
  try {
    await once(socket, event);
  } finally {
    cancel();
    socket.on('error', () => {}).destroy();
  }
}
