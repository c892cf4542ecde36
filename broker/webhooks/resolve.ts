// Names to addresses without Node's thread pool: a name server that hangs must not hold up files and other receivers.
import { promises as dns } from 'node:dns';
import { monotonic } from '../../shared/clock.ts';
import { openHosts } from './hosts.ts';

/** Every address of a name. Rejects where there is none. */
export type Resolve = (name: string) => Promise<readonly string[]>;

export interface Resolver {
  resolve: Resolve;
  /** Ends what is under way. */
  close(): void;
}

const serverMs = 2_000;
const tries = 2;
/** After this the system is asked again which name servers there are. */
const renewMs = 60_000;

/** The hosts file first, then the name servers (the system's, unless told), as the system does; no search domains. */
export function openResolver(hostsFile = '/etc/hosts', asked?: readonly string[]): Resolver {
  const hosts = openHosts(hostsFile);
  let servers = fresh();

  function fresh() {
    const resolver = new dns.Resolver({ timeout: serverMs, tries });
    if (asked) resolver.setServers(asked);
    return { resolver, since: monotonic() };
  }

  function current(): dns.Resolver {
    if (monotonic() - servers.since > renewMs) servers = fresh();
    return servers.resolver;
  }

  return {
    async resolve(given) {
      const name = given.replace(/\.$/, '').toLowerCase();
      // RFC 6761 section 6.3.
      if (name === 'localhost' || name.endsWith('.localhost')) return ['127.0.0.1', '::1'];
      const local = hosts(name);
      if (local.length > 0) return local;
      const resolver = current();
      const both = await Promise.allSettled([resolver.resolve4(name), resolver.resolve6(name)]);
      const found = both.flatMap((one) => (one.status === 'fulfilled' ? one.value : []));
      if (found.length > 0) return found;
      throw both.find((one) => one.status === 'rejected')?.reason ?? new Error('no address');
    },
    close: () => servers.resolver.cancel(),
  };
}
