// Finds free ports for programs that need a fixed port, or that start again on the same one.
import { randomInt } from 'node:crypto';
import { once } from 'node:events';
import { createServer } from 'node:net';

/**
 * The lowest port of the tests, which use the ports below 32,000. By default, Linux chooses only higher ports for port
 * 0 and outgoing connections (ip_local_port_range in ip(7)).
 */
const lowest = 12_000;
/** The number of ports for each worker process of the tests, so that two processes never use the same port. */
const each = 2_500;
const workers = 8;
const first = lowest + (Number(process.env.VITEST_POOL_ID ?? 0) % workers) * each;
let found = randomInt(each);

/** Returns a port that stays free even while a test restarts its broker. */
export async function freePort(): Promise<number> {
  for (;;) {
    found = (found + 1) % each;
    const port = first + found;
    const server = createServer().listen(port, '127.0.0.1');
    const isFree = await once(server, 'listening').then(
      () => true,
      () => false,
    );
    if (!isFree) continue;
    server.close();
    await once(server, 'close');
    return port;
  }
}

/** Returns HOST:PORT with a free port. */
export const freeAddress = async (): Promise<string> => `127.0.0.1:${await freePort()}`;
