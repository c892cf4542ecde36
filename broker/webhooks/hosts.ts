// The hosts file, read by ourselves: getaddrinfo would do it in a thread that a name server may hold up.
import { readFileSync, statSync } from 'node:fs';
import { isIP } from 'node:net';

/** Addresses of a name, in lower case, as the file is now; none where it does not name it. */
export type Hosts = (name: string) => readonly string[];

export function openHosts(file: string): Hosts {
  let read = '';
  let known: ReadonlyMap<string, readonly string[]> = new Map();

  return (name) => {
    const status = statSync(file, { throwIfNoEntry: false, bigint: true });
    const version = status ? `${status.ino} ${status.size} ${status.mtimeNs}` : '';
    if (version !== read) {
      known = version === '' ? new Map() : hostsIn(readFileSync(file, 'utf8'));
      read = version;
    }
    return known.get(name) ?? [];
  };
}

/** hosts(5): an address and its names in each line, and what follows a # is a comment. */
function hostsIn(text: string): Map<string, string[]> {
  const found = new Map<string, string[]>();
  for (const line of text.split('\n')) {
    const [address = '', ...names] = line.replace(/#.*/, '').trim().split(/\s+/);
    if (isIP(address) === 0) continue;
    for (const name of names) {
      const key = name.toLowerCase().replace(/\.$/, '');
      found.set(key, [...(found.get(key) ?? []), address]);
    }
  }
  return found;
}
