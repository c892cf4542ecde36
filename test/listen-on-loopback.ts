// Starts the servers of tests.
import { once } from 'node:events';
import { Server as HttpServer } from 'node:http';
import type { AddressInfo, Server } from 'node:net';
import { atEnd } from './close-after-tests.ts';

/** Starts a server on a free port of loopback, and closes it at the end of the test. Resolves with the port. */
export async function listenOnLoopback(server: Server): Promise<number> {
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  atEnd(() => {
    server.close();
    if (server instanceof HttpServer) server.closeAllConnections();
  });
  // The cast is safe: a server that listens on TCP has an address and a port.
  return (server.address() as AddressInfo).port;
}
