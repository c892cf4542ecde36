// Checks whether a port or socket file accepts connections.
import { once } from 'node:events';
import { connect, type Socket } from 'node:net';
import { connect as connectTls } from 'node:tls';
import { after } from '../clock.ts';

const patienceMs = 3_000;

/** Parses HOST:PORT, with brackets around an IPv6 address; undefined where the text has another form. */
export function hostPortOf(text: string): { host: string; port: number } | undefined {
  const match = /^(\[[0-9a-fA-F:.]+\]|[^:[\]]+):(\d{1,5})$/.exec(text.trim());
  return match ? { host: (match[1] ?? '').replace(/^\[|\]$/g, ''), port: Number(match[2]) } : undefined;
}

/** Rejects if no program listens at the address within 3 s. */
export async function reachPort(host: string, port: number): Promise<void> {
  await settled(connect({ host, port }), 'connect');
}

/** Rejects unless the broker at the address has a certificate that the authority `ca` (PEM) has signed. */
export async function reachBroker(host: string, port: number, ca: string): Promise<void> {
  const socket = connectTls({ host, port, ca, servername: 'farhand-broker', ALPNProtocols: ['h2'] });
  await settled(socket, 'secureConnect');
}

export async function reachSocketFile(path: string): Promise<void> {
  await settled(connect({ path }), 'connect');
}

async function settled(socket: Socket, event: string): Promise<void> {
  const cancel = after(patienceMs, () =>
    socket.destroy(new Error(`no answer within ${patienceMs / 1000} s`)),
  );
  try {
    await once(socket, event);
  } finally {
    cancel();
    socket.on('error', () => {}).destroy();
  }
}
