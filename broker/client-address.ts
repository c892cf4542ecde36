// Client addresses: parses and compares them, and decides which proxies
// may report the address of their client.
import { BlockList, isIP, isIPv4, isIPv6 } from 'node:net';
import { isLoopback } from '../shared/loopback.ts';

/** Removes the prefix ::ffff: of an IPv4-mapped IPv6 address (RFC 4291 section 2.5.5.2). */
export function plainAddress(address: string): string {
  return address.replace(/^::ffff:(?=\d+\.)/i, '');
}

/** Returns the address in the name of a gRPC peer, which is `HOST:PORT` or `[HOST]:PORT`. */
export function peerAddress(peer: string): string {
  return plainAddress(peer.replace(/:\d+$/, '').replace(/^\[|\]$/g, ''));
}

/** Parses a range such as `10.0.0.0/8`, or a single address. Returns undefined for any other text. */
export function networkOf(text: string): Network | undefined {
  const [, given = '', length] = /^([^/%]+)(?:\/(\d{1,3}))?$/.exec(text) ?? [];
  const address = plainAddress(given);
  if (isIP(address) === 0) return undefined;
  const most = isIPv4(address) ? 32 : 128;
  const bits = length === undefined ? most : Number(length);
  return bits > most ? undefined : { address, bits };
}

export interface Network {
  address: string;
  bits: number;
}

export type Proxies = ReturnType<typeof createTrustedProxies>;

/**
 * Creates the list of proxies whose X-Forwarded headers are trusted. The headers of all other peers are
 * ignored.
 */
export function createTrustedProxies(networks: readonly Network[]) {
  const trusted = new BlockList();
  for (const { address, bits } of networks) trusted.addSubnet(address, bits, familyOf(address));
  const isTrusted = (text: string): boolean => {
    const [address = ''] = text.split('%');
    return isIP(address) !== 0 && trusted.check(address, familyOf(address));
  };
  return {
    /** True if this peer is a trusted proxy, whose headers name the client. */
    trusts: isTrusted,
    /** True if many clients may share an address, because it is loopback or a trusted proxy. */
    isShared: (address: string): boolean => isLoopback(address) || isTrusted(address),
    /**
     * Returns the address of the client. If the peer is a trusted proxy, this is the last address in X-Forwarded-For
     * that is not a trusted proxy. Otherwise it is the peer's address.
     */
    clientOf(peer: string, forwardedFor: string): string {
      if (forwardedFor === '') return peer;
      let client = peer;
      const hops = forwardedFor.split(',');
      // Each proxy appends the address of its own client, so the header is read from its end. Reading stops at an
      // untrusted address, because the client with this address may have forged all entries before it.
      while (isTrusted(client)) {
        const before = hostIn(hops.pop() ?? '');
        if (before === undefined) break;
        client = before;
      }
      return client;
    },
    /** `https:` or `http:`, as a trusted peer reports it in X-Forwarded-Proto; otherwise undefined. */
    schemeOf(peer: string, forwardedProto: string): string | undefined {
      const scheme = forwardedProto.split(',').at(-1)?.trim().toLowerCase() ?? '';
      return isTrusted(peer) && /^https?$/.test(scheme) ? `${scheme}:` : undefined;
    },
  };
}

/** Returns the address in an entry of X-Forwarded-For, without the port that some proxies add; undefined if none. */
function hostIn(text: string): string | undefined {
  const word = text.trim();
  const [, bracketed, dotted] = /^(?:\[([^\]]+)\]|(\d+\.\d+\.\d+\.\d+))(?::\d{1,5})?$/.exec(word) ?? [];
  const address = plainAddress(bracketed ?? dotted ?? word);
  return isIP(address) === 0 || address.includes('%') ? undefined : address;
}

function familyOf(address: string): 'ipv4' | 'ipv6' {
  return isIPv4(address) ? 'ipv4' : 'ipv6';
}

/** Returns what counts as one client for limits: an IPv4 address, or the /64 network of an IPv6 address (RFC 6177). */
export function sourceOf(address: string): string {
  const [plain = ''] = address.split('%');
  if (!isIPv6(plain)) return plain;
  const [head = '', tail] = plain.split('::');
  const front = head.split(':').filter((part) => part !== '');
  const back = tail === undefined ? [] : tail.split(':').filter((part) => part !== '');
  const zeros = Array.from({ length: Math.max(0, 8 - front.length - back.length) }, () => '0');
  const groups = [...front, ...zeros, ...back].slice(0, 4);
  return groups.map((group) => group.replace(/^0+(?=.)/, '').toLowerCase()).join(':');
}
