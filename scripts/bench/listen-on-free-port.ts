// Servers on free ports of loopback.
import { once } from 'node:events';
import { type AddressInfo, createServer, type Server } from 'node:net';

/** Makes a server listen on a free port. Resolves with the port. */
export async function listen(server: Server): Promise<number> {
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  // The cast is safe: a server that listens on a host and port has an address of this type.
  return (server.address() as AddressInfo).port;
}

/**
 * Makes a server listen on a free port, and logs a line with its address. program() of the bench waits for this line.
 */
export async function listenAndReport(server: Server, msg: string): Promise<void> {
  const address = `127.0.0.1:${await listen(server)}`;
  process.stderr.write(`${JSON.stringify({ msg, address, url: `http://${address}` })}\n`);
}

/** Returns a port that is currently free, for a program that cannot choose one itself. */
export async function freePort(): Promise<number> {
  const server = createServer();
  const port = await listen(server);
  server.close();
  await once(server, 'close');
  return port;
}
