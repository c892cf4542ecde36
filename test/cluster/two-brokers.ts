// Starts two brokers with the same keys and authority: `front` gets the requests, and `owner` has the machines.
import { cpSync } from 'node:fs';
import type { Owners } from '../../broker/cluster/peers/owner-interfaces.ts';
import type { Tuning } from '../../broker/start/index.ts';
import { Farhand } from '../../shared/sdk/index.ts';
import { atEnd } from '../close-after-tests.ts';
import { type CallOptions, startFarhand, type TestSystem, temporaryFolder } from '../start-farhand.ts';
import { startProxy } from '../tcp-proxy.ts';

type Name = 'front' | 'owner';

/** The owners of machines, in a table of the test. All machines belong to `owner` until the test calls `own`. */
function createOwners() {
  const urls = new Map<Name, string>();
  /** Resolves when each broker has loaded the open work of its machines. */
  const work = { loading: Promise.resolve() };
  const moved = new Map<string, (seenBy: Name) => Name>();
  const of = (name: Name): Owners => ({
    ownerElsewhere(machineId) {
      const owner = moved.get(machineId)?.(name) ?? 'owner';
      return owner === name ? undefined : { brokerId: owner, url: urls.get(owner) ?? '' };
    },
    newOwner: async () => undefined,
    directoryId: name,
    withDirectory: () => undefined,
    loaded: () => work.loading,
    hasEnded: () => false,
    watch: () => () => {},
    advertise: async (url) => void urls.set(name, url),
  });
  return { of, urls, moved, work };
}

export async function startTwoBrokers(tuning: Tuning = {}) {
  const first = temporaryFolder('front');
  const second = temporaryFolder('owner');
  const seed = await startFarhand({ dataDir: first });
  const { key } = seed;
  const reader = (await seed.keyed(['files:read'])).key;
  await seed.broker.close();
  cpSync(first, second, { recursive: true });
  const owners = createOwners();
  const listen = { host: '127.0.0.1', port: 0 };
  const start = (name: Name, dataDir: string): Promise<TestSystem> =>
    startFarhand({ dataDir, tuning: { ...tuning, cluster: { owners: owners.of(name), listen } } });
  const owner = await start('owner', second);
  const front = await start('front', first);
  const agent = await owner.agent();
  const { host } = new URL(owners.urls.get('owner') ?? '');
  const proxy = await startProxy(host);
  atEnd(() => proxy.close());
  return {
    front: { ...front, key },
    owner: { ...owner, key },
    key,
    /** A key with the scope files:read. */
    reader,
    machineId: agent.machineId,
    urls: owners.urls,
    /** HOST:PORT of the owner's peer port. */
    peerPort: host,
    /** Routes forwarded requests through a proxy. */
    throughProxy() {
      owners.urls.set('owner', `https://${proxy.address}`);
      return proxy;
    },
    /**
     * Makes each broker behave as if it were still loading the open work of its machines until this promise resolves.
     */
    loadWork: (loading: Promise<void>) => void Object.assign(owners.work, { loading }),
    /** Sets the owner of the machine. `as` gets the broker that asks, and may return a different owner for each. */
    own: (as: (seenBy: Name) => Name) => void owners.moved.set(agent.machineId, as),
    client: new Farhand({ baseUrl: front.url, apiKey: key, retries: 0 }),
    call: (method: string, path: string, options: CallOptions = {}) =>
      front.call(method, path, { key, ...options }),
  };
}
