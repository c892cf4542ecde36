// Where webhooks may go: to the public internet and to what --webhook-allow names, never to this broker itself.
import type { Socket } from 'node:net';
import { networkInterfaces } from 'node:os';
import ipaddr from 'ipaddr.js';
import type { Resolve } from './resolve.ts';

type Address = ipaddr.IPv4 | ipaddr.IPv6;
export type Range = [Address, number];

/** Refused: the text names what the URL names, never an address that a name resolves to or what listens there. */
export class NotAllowed extends Error {
  override readonly name = 'NotAllowed';
}

export interface Guard {
  /** Throws NotAllowed for an address that webhooks must not reach. `host`: what it was found for. */
  judge(address: string, host?: string): void;
  /** Throws NotAllowed for the host of a URL that is such an address. */
  judgeLiteral(hostname: string): void;
  /** Throws NotAllowed for a URL whose host is such an address, or that leads to this broker's own listeners. */
  judgeUrl(url: URL, resolve: Resolve): Promise<void>;
  /** Judges what is connected to, whatever `host` was asked for. */
  judgeSocket(socket: Socket, host: string): void;
  /** Whether an address is reached only because it was allowed. */
  isInternal(address: string): boolean;
  /** Ports that this broker listens on. */
  protect(ports: readonly number[]): void;
}

const notItself = 'webhooks must not call this broker itself';

/** Public by its range, but the host of a cloud's own machines. */
const metadata = ['168.63.129.16'];
/** All that is global unicast (RFC 4291 section 2.4, as assigned); the rest is unknown ground. */
const globalUnicast = ipaddr.IPv6.parseCIDR('2000::/3');
const translated = [ipaddr.IPv6.parseCIDR('64:ff9b::/96'), ipaddr.IPv6.parseCIDR('::ffff:0:0:0/96')];
const sixToFour = ipaddr.IPv6.parseCIDR('2002::/16');

/** A network or one address, in full: 10/8 means one thing to some programs and another to others. */
export function rangeOf(text: string): Range | undefined {
  const [, place = '', length] = /^([^/%]+)(?:\/(\d{1,3}))?$/.exec(text) ?? [];
  if (!isAddress(place)) return undefined;
  const address = ipaddr.parse(place);
  const most = address.kind() === 'ipv4' ? 32 : 128;
  const bits = length === undefined ? most : Number(length);
  if (bits > most) return undefined;
  const inner = innermost(address);
  if (sameKind(address, inner)) return [address, bits];
  // What is judged is the IPv4 address inside: only as such can it be named.
  const mapped = address instanceof ipaddr.IPv6 && address.isIPv4MappedAddress();
  return mapped && bits >= 96 ? [inner, bits - 96] : undefined;
}

export function openGuard(allowed: readonly Range[]): Guard {
  let own: readonly number[] = [];

  const isAllowed = (address: Address): boolean =>
    allowed.some(([network, bits]) => sameKind(address, network) && address.match(network, bits));

  const guard: Guard = {
    judge(text, host = text) {
      const address = isAddress(text) ? innermost(ipaddr.parse(withoutZone(text))) : undefined;
      if (address && (isPublic(address) || isAllowed(address))) return;
      const verb = isAddress(withoutBrackets(host)) ? 'is' : 'resolves to what is';
      throw new NotAllowed(`${host} ${verb} not a public address, and --webhook-allow does not name it`);
    },
    judgeLiteral(hostname) {
      const host = withoutBrackets(hostname);
      if (isAddress(host)) guard.judge(host);
    },
    async judgeUrl({ hostname, port, protocol }, resolve) {
      guard.judgeLiteral(hostname);
      if (!own.includes(Number(port || (protocol === 'https:' ? 443 : 80)))) return;
      const host = withoutBrackets(hostname);
      // A name that has no address now is judged when there is something to deliver.
      const addresses = isAddress(host) ? [host] : await resolve(host).catch(() => []);
      if (addresses.some(isHere)) throw new NotAllowed(notItself);
    },
    judgeSocket(socket, host) {
      const { remoteAddress = '', remotePort = 0, localAddress } = socket;
      guard.judge(remoteAddress, host);
      const here = remoteAddress === localAddress || isHere(remoteAddress);
      if (here && own.includes(remotePort)) throw new NotAllowed(notItself);
    },
    isInternal: (text) => isAddress(text) && !isPublic(innermost(ipaddr.parse(withoutZone(text)))),
    protect(ports) {
      own = ports;
    },
  };
  return guard;
}

/** Only the usual forms: what inet_aton would take besides is made one of these by URL, before it comes here. */
function isAddress(text: string): boolean {
  const plain = withoutZone(text);
  return ipaddr.IPv4.isValidFourPartDecimal(plain) || ipaddr.IPv6.isValid(plain);
}

function withoutZone(text: string): string {
  return text.replace(/%.*$/, '');
}

function withoutBrackets(hostname: string): string {
  return hostname.replace(/^\[|\]$/g, '');
}

/** Whether a connection to this address ends on this machine. */
function isHere(text: string): boolean {
  if (!isAddress(text)) return false;
  const address = innermost(ipaddr.parse(withoutZone(text)));
  const interfaces = Object.values(networkInterfaces()).flatMap((addresses) => addresses ?? []);
  return (
    ['loopback', 'unspecified'].includes(address.range()) ||
    interfaces.some((one) => ipaddr.parse(withoutZone(one.address)).toString() === address.toString())
  );
}

function isPublic(address: Address): boolean {
  if (address.range() !== 'unicast') return false;
  if (address instanceof ipaddr.IPv6) return address.match(globalUnicast);
  return !metadata.includes(address.toString());
}

/** The IPv4 address inside a mapped, translated or 6to4 one: that is where the packets go. */
function innermost(address: Address): Address {
  if (!(address instanceof ipaddr.IPv6)) return address;
  if (address.isIPv4MappedAddress()) return address.toIPv4Address();
  const bytes = address.toByteArray();
  if (translated.some((network) => address.match(network))) return new ipaddr.IPv4(bytes.slice(12));
  if (address.match(sixToFour)) return new ipaddr.IPv4(bytes.slice(2, 6));
  return address;
}

function sameKind(address: Address, network: Address): boolean {
  return address.kind() === network.kind();
}
