// Resolves host names of webhooks without Node's thread pool, which file operations also use. A name server that does
// not answer therefore delays neither file operations nor other webhooks.
import { promises as dns } from 'node:dns';
import { existsSync, readFileSync } from 'node:fs';
import { isIP } from 'node:net';

/** Resolves a name to all its addresses. Rejects if it has none. */
export type ResolveName = (name: string) => Promise<readonly string[]>;

const limits = { timeout: 2_000, tries: 2 };

/**
 * Resolves a name by the hosts file, then by the name servers (`servers`, or those of the system), without search
 * domains.
 */
export async function resolveName(
  given: string,
  hostsFile = '/etc/hosts',
  servers?: readonly string[],
): Promise<readonly string[]> {
  const name = plain(given);
  // `localhost` always means the loopback addresses (RFC 6761 section 6.3).
  if (name === 'localhost' || name.endsWith('.localhost')) return ['127.0.0.1', '::1'];
  const local = existsSync(hostsFile) ? hostsIn(readFileSync(hostsFile, 'utf8'), name) : [];
  if (local.length > 0) return local;
  // Each call makes a new Resolver, which reads the system's list of name servers. An administrator may have changed
  // that list since the last call.
  const resolver = new dns.Resolver(limits);
  if (servers) resolver.setServers(servers);
  const both = await Promise.allSettled([resolver.resolve4(name), resolver.resolve6(name)]);
  const found = both.flatMap((one) => (one.status === 'fulfilled' ? one.value : []));
  if (found.length > 0) return found;
  throw both.find((one) => one.status === 'rejected')?.reason ?? new Error('no address');
}

/**
 * Addresses of a name in a hosts file (hosts(5)): each line has an address and its names;
 * a # begins a comment.
 */
function hostsIn(text: string, wanted: string): string[] {
  return text.split('\n').flatMap((line) => {
    const [address = '', ...names] = line.replace(/#.*/, '').trim().split(/\s+/);
    return isIP(address) > 0 && names.some((name) => plain(name) === wanted) ? [address] : [];
  });
}

function plain(name: string): string {
  return name.replace(/\.$/, '').toLowerCase();
}
