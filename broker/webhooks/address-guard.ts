// Decides which addresses webhooks may call: the public internet and --webhook-allow, never this broker's own listeners.
import type { Socket } from 'node:net';
import { networkInterfaces } from 'node:os';
import ipaddr from 'ipaddr.js';
import type { ResolveName } from './resolve-name.ts';

type Address = ipaddr.IPv4 | ipaddr.IPv6;
export type Network = [Address, number];

/** The message has what the URL names, never an address that a name resolves to or what listens there. */
export class NotAllowed extends Error {
  override readonly name = 'NotAllowed';
}

const notItself = 'webhooks must not call this broker itself';

/** Public by its range, but the metadata host of Azure. */
const metadata = ['168.63.129.16'];
/** All of IPv6 that is assigned as global unicast (RFC 4291 section 2.4). */
const globalUnicast = ipaddr.IPv6.parseCIDR('2000::/3');
const translated = [ipaddr.IPv6.parseCIDR('64:ff9b::/96'), ipaddr.IPv6.parseCIDR('::ffff:0:0:0/96')];
const sixToFour = ipaddr.IPv6.parseCIDR('2002::/16');

/** A network or an address, written in full: programs differ in what 10/8 means. */
export function networkOf(text: string): Network | undefined {
  const [, place = '', length] = /^([^/%[]+)(?:\/(\d{1,3}))?$/.exec(text) ?? [];
  const inner = addressOf(place);
  if (!inner) return undefined;
  const address = ipaddr.parse(place);
  const maxBits = address.kind() === 'ipv4' ? 32 : 128;
  const bits = length === undefined ? maxBits : Number(length);
  if (bits > maxBits) return undefined;
  if (address.kind() === inner.kind()) return [address, bits];
  // Addresses are checked by the IPv4 address inside, so a network must be one of IPv4 addresses, too.
  const mapped = address instanceof ipaddr.IPv6 && address.isIPv4MappedAddress();
  return mapped && bits >= 96 ? [inner, bits - 96] : undefined;
}

export class AddressGuard {
  readonly #allowed: readonly Network[];
  readonly #resolveName: ResolveName;
  #ownPorts: readonly number[] = [];

  constructor(allowed: readonly Network[], resolveName: ResolveName) {
    this.#allowed = allowed;
    this.#resolveName = resolveName;
  }

  /** Ports that this broker listens on. */
  protect(ports: readonly number[]): void {
    this.#ownPorts = ports;
  }

  /** Throws NotAllowed for an address that webhooks must not reach. `host`: what the URL names. */
  assertAddress(text: string, host = text): void {
    const address = addressOf(text);
    if (isPublic(address) || this.#isAllowed(address)) return;
    const verb = addressOf(host) ? 'is' : 'resolves to an address that is';
    throw new NotAllowed(`${host} ${verb} not public; to call it, add it to --webhook-allow of the broker`);
  }

  /**
   * Throws NotAllowed for a URL whose host is such an address, or that leads to this broker's own listeners. All else
   * about a name is checked at each delivery.
   */
  async assertUrl({ hostname, port, protocol }: URL): Promise<void> {
    const isAddress = addressOf(hostname) !== undefined;
    if (isAddress) this.assertAddress(hostname);
    const number = Number(port) || (protocol === 'https:' ? 443 : 80);
    if (!this.#ownPorts.includes(number)) return;
    const noAddresses = (): string[] => [];
    this.#assertOthers(isAddress ? [hostname] : await this.#resolveName(hostname).catch(noAddresses), number);
  }

  /** The addresses of a host that are to be connected to. Rejects with NotAllowed when one must not be reached. */
  async resolve(
    hostname: string,
    port: number,
  ): Promise<{ addresses: readonly string[]; isInternal: boolean }> {
    const addresses = addressOf(hostname) ? [hostname] : await this.#resolveName(hostname);
    if (addresses.length === 0) throw new Error('no address');
    for (const address of addresses) this.assertAddress(address, hostname);
    this.#assertOthers(addresses, port);
    return { addresses, isInternal: !addresses.every((address) => isPublic(addressOf(address))) };
  }

  /** Destroys a connection to this broker over an address that no running interface has (an unplugged one, a local route). */
  refuseSelf(socket: Socket): void {
    const { remoteAddress, remotePort = 0, localAddress } = socket;
    if (remoteAddress !== localAddress || !this.#ownPorts.includes(remotePort)) return;
    socket.destroy();
    throw new NotAllowed(notItself);
  }

  #assertOthers(addresses: readonly string[], port: number): void {
    if (this.#ownPorts.includes(port) && addresses.some(isHere)) throw new NotAllowed(notItself);
  }

  #isAllowed(address: Address | undefined): boolean {
    return this.#allowed.some(
      ([network, bits]) => address?.kind() === network.kind() && address.match(network, bits),
    );
  }
}

/**
 * The address that packets go to, in brackets or with a zone, too; undefined for what is none. Only the usual forms: URL
 * turns all other forms that inet_aton takes into one of these.
 */
function addressOf(text: string): Address | undefined {
  const plain = text.replace(/^\[|\]$/g, '').replace(/%.*$/, '');
  const usual = ipaddr.IPv4.isValidFourPartDecimal(plain) || ipaddr.IPv6.isValid(plain);
  return usual ? innermost(ipaddr.parse(plain)) : undefined;
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

/** Whether a connection to this address ends on this machine. */
function isHere(text: string): boolean {
  const address = addressOf(text);
  if (!address) return false;
  const interfaces = Object.values(networkInterfaces()).flatMap((addresses) => addresses ?? []);
  return (
    ['loopback', 'unspecified'].includes(address.range()) ||
    interfaces.some((one) => addressOf(one.address)?.toString() === address.toString())
  );
}

function isPublic(address: Address | undefined): boolean {
  if (address?.range() !== 'unicast') return false;
  if (address instanceof ipaddr.IPv6) return address.match(globalUnicast);
  return !metadata.includes(address.toString());
}
