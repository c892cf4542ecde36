// Names to addresses without Node's thread pool: a name server that hangs must not hold up files and other receivers.
import { promises as dns } from 'node:dns';
import { monotonic } from '../../shared/clock.ts';
import { errnoOf } from '../../shared/errors.ts';

/** Every address of a name. Rejects where there is none. */
export type Resolve = (name: string) => Promise<string[]>;

export interface Resolver {
  resolve: Resolve;
  /** Ends what is under way. */
  close(): void;
}

const serverMs = 2_000;
const tries = 2;
/** After this the system is asked again which name servers there are. */
const renewMs = 60_000;

export function openResolver(): Resolver {
  let servers = { resolver: new dns.Resolver({ timeout: serverMs, tries }), since: monotonic() };
  let last: Promise<unknown> = Promise.resolve();

  function current(): dns.Resolver {
    if (monotonic() - servers.since > renewMs) {
      servers = { resolver: new dns.Resolver({ timeout: serverMs, tries }), since: monotonic() };
    }
    return servers.resolver;
  }

  /** What only this machine knows: its hosts file, its search domains. One at a time, for this one takes a thread. */
  function localOf(name: string): Promise<string[]> {
    const found = last.then(() => dns.lookup(name, { all: true }));
    last = found.catch(() => {});
    return found.then((all) => all.map(({ address }) => address));
  }

  return {
    async resolve(given) {
      const name = given.replace(/\.$/, '').toLowerCase();
      // RFC 6761 section 6.3.
      if (name === 'localhost' || name.endsWith('.localhost')) return ['127.0.0.1', '::1'];
      const resolver = current();
      const both = await Promise.allSettled([resolver.resolve4(name), resolver.resolve6(name)]);
      const found = both.flatMap((one) => (one.status === 'fulfilled' ? one.value : []));
      if (found.length > 0) return found;
      const failures = both.flatMap((one): unknown[] => (one.status === 'rejected' ? [one.reason] : []));
      if (failures.some((reason) => errnoOf(reason) === 'ENOTFOUND')) return localOf(name);
      throw failures[0] ?? new Error('no address');
    },
    close: () => servers.resolver.cancel(),
  };
}
