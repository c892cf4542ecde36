// With FARHAND_TEST_BROKERS=3 each broker of the tests is three brokers on one database, behind proxies that give each
// connection to the next of them. Needs FARHAND_TEST_DATABASE=postgres too.
import { copyFileSync, readdirSync } from 'node:fs';
import { type AddressInfo, connect, createServer, type Socket } from 'node:net';
import { join } from 'node:path';
import { brokerSettings } from '../broker/settings-schema.ts';
import { type Broker, startBroker, type Tuning } from '../broker/start/index.ts';
import type { Logger } from '../shared/logger.ts';
import { readSettings } from '../shared/read-settings.ts';
import { atEnd } from './close-after-tests.ts';

const wanted = Number(process.env.FARHAND_TEST_BROKERS ?? 1);

/** The flags with which a broker of the tests shares its database. */
export const sharingFlags: readonly string[] = wanted > 1 ? ['--peer-listen', '127.0.0.1:0'] : [];

interface First {
  broker: Broker;
  dataDir: string;
  /** Settings of the first broker without its addresses and its data directory. */
  flags: readonly string[];
  tuning: Tuning | undefined;
  log: Logger;
  makeFolder(): string;
}

/** Starts the other brokers. Returns one that stands for all, with the addresses of the proxies, and the URLs of all. */
export async function startMoreBrokers(first: First): Promise<{ broker: Broker; urls: string[] }> {
  const brokers = [first.broker];
  for (let n = 1; n < wanted; n += 1) {
    const folder = first.makeFolder();
    for (const name of readdirSync(first.dataDir).filter((one) =>
      /^(authority\.json|.*\.key|.*-key\.json)$/.test(one),
    ))
      copyFileSync(join(first.dataDir, name), join(folder, name));
    const argv = ['--data-dir', folder, '--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0', ...first.flags];
    const broker = await startBroker(
      readSettings(brokerSettings, { argv, env: {} }),
      first.log,
      first.tuning,
    );
    atEnd(() => broker.close());
    brokers.push(broker);
  }
  const urls = brokers.map(({ url = '' }) => url);
  if (brokers.length === 1) return { broker: first.broker, urls };
  const http = await startRoundRobin(urls.map((url) => new URL(url).host));
  const grpc = await startRoundRobin(brokers.map((one) => one.grpc ?? ''));
  const close = async (): Promise<void> => {
    await Promise.all(brokers.map((one) => one.close()));
  };
  return { broker: { ...first.broker, url: `http://${http}`, grpc, close }, urls };
}

/** Starts a proxy that gives each connection to the next address. Returns its own address. */
async function startRoundRobin(addresses: readonly string[]): Promise<string> {
  let next = 0;
  const sockets = new Set<Socket>();
  const server = createServer((near) => {
    const [host = '', port] = (addresses[next++ % addresses.length] ?? '').split(':');
    const far = connect(Number(port), host);
    for (const [one, other] of [
      [near, far],
      [far, near],
    ] as const) {
      sockets.add(one);
      one.setNoDelay(true);
      one.on('error', () => one.destroy());
      one.once('close', () => {
        sockets.delete(one);
        other.destroy();
      });
      one.pipe(other);
    }
  });
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  atEnd(() => {
    server.close();
    for (const socket of sockets) socket.destroy();
  });
  // A server that listens on a host and port has an address of this type.
  return `127.0.0.1:${(server.address() as AddressInfo).port}`;
}
