// Finds free ports for programs that need a fixed one, or that are started again on the same one.
import { randomInt } from 'node:crypto';
import { once } from 'node:events';
import { createServer } from 'node:net';

/** First of the ports that Linux never chooses by itself, for port 0 or an outgoing connection: see ip_local_port_range in ip(7). */
const lowest = 12_000;
/** Ports of each worker process of the tests, so that two of them never find the same one. */
const each = 2_500;
const workers = 8;
const first = lowest + (Number(process.env.VITEST_POOL_ID ?? 0) % workers) * each;
let found = randomInt(each);

/** Returns a port that also stays free for a test while its broker is down. */
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

/** Returns HOST:PORT with such a port. */
export const freeAddress = async (): Promise<string> => `127.0.0.1:${await freePort()}`;
