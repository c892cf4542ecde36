// Makes HTTP servers listen, and stops them.
import type { Server } from 'node:http';
import type { ListenOptions, Socket } from 'node:net';
import { sleep } from '../../shared/clock.ts';
import { StartError } from '../../shared/errors.ts';
import { reasonOf } from '../../shared/system-errors.ts';

const finishRequestsMs = 4_000;
/** Most connections that wait to be accepted; beyond that, clients try again a second later. */
const backlog = 4_096;

export function address(host: string, port: number): string {
  return host.includes(':') ? `[${host}]:${port}` : `${host}:${port}`;
}

export function listen(server: Server | undefined, options: ListenOptions, what: string): Promise<void> {
  return new Promise((resolve, reject) => {
    server?.once('error', (error) =>
      reject(cannotListen(error, what, options.path ?? address(options.host ?? '', options.port ?? 0))),
    );
    server?.listen({ backlog, ...options }, resolve);
  });
}

export function cannotListen(error: unknown, what: string, where: string): StartError {
  return new StartError(`${what} ${reasonOf(error, where)}`, 1, { cause: error });
}

/** A server with its open connections. */
export interface Listening {
  server: Server;
  sockets: Set<Socket>;
}

export function tracked(server: Server): Listening {
  const sockets = new Set<Socket>();
  server.on('connection', (socket: Socket) => {
    sockets.add(socket);
    socket.once('close', () => sockets.delete(socket));
  });
  return { server, sockets };
}

/** Stops a server: requests in progress have 4 s to finish, then their connections are closed. */
export async function stopServer({ server, sockets }: Listening): Promise<void> {
  const closed = new Promise<void>((resolve) => server.close(() => resolve()));
  server.closeIdleConnections();
  // Node counts a connection that never sent a byte as busy, so closeIdleConnections leaves it open.
  for (const socket of sockets) if (socket.bytesRead === 0) socket.destroy();
  const patience = new AbortController();
  await Promise.race([closed, sleep(finishRequestsMs, patience.signal)]);
  patience.abort();
  // Connections that became WebSockets no longer belong to the server, so they are closed here.
  for (const socket of sockets) socket.destroy();
  await closed;
}
