// Decides which addresses webhooks and alert channels may call: those of the public internet and those in
// --webhook-allow. They must never call this broker's own ports, not even at these addresses.
import type { Socket } from 'node:net';
import { networkInterfaces } from 'node:os';
import ipaddr from 'ipaddr.js';
import { fieldError } from '../../shared/errors.ts';
import type { ResolveName } from './resolve-host-name.ts';

type Address = ipaddr.IPv4 | ipaddr.IPv6;
export type Network = [Address, number];

/**
 * The error for a forbidden address. The message names the host of the URL, but not the addresses of that name.
 * Otherwise clients could look up internal addresses.
 */
export class NotAllowed extends Error {
  override readonly name = 'NotAllowed';
}

const notItself = 'webhooks and alert channels must not call this broker itself';

/** The metadata host of Azure, which has a public address but is internal. */
const metadata = ['168.63.129.16'];
/** The IPv6 addresses that are assigned as global unicast (RFC 4291 section 2.4). */
const globalUnicast = ipaddr.IPv6.parseCIDR('2000::/3');
const translated = [ipaddr.IPv6.parseCIDR('64:ff9b::/96'), ipaddr.IPv6.parseCIDR('::ffff:0:0:0/96')];
const sixToFour = ipaddr.IPv6.parseCIDR('2002::/16');

/**
 * Parses an address, or a network such as 10.0.0.0/8. Returns undefined for short forms such as 10/8, because
 * programs read them differently.
 */
export function networkOf(text: string): Network | undefined {
  const [, addressText = '', length] = /^([^/%[]+)(?:\/(\d{1,3}))?$/.exec(text) ?? [];
  const inner = addressOf(addressText);
  if (!inner) return undefined;
  const address = ipaddr.parse(addressText);
  const maxBits = address.kind() === 'ipv4' ? 32 : 128;
  const bits = length === undefined ? maxBits : Number(length);
  if (bits > maxBits) return undefined;
  if (address.kind() === inner.kind()) return [address, bits];
  // IPv4-mapped IPv6 addresses are checked as IPv4 addresses, so a network of them becomes an IPv4 network. A network
  // that also contains other addresses is refused.
  const mapped = address instanceof ipaddr.IPv6 && address.isIPv4MappedAddress();
  return mapped && bits >= 96 ? [inner, bits - 96] : undefined;
}

/** Throws validation_failed for the field `url` of a request if webhooks must not call the URL. */
export async function assertUrl(guard: AddressGuard, url: string): Promise<void> {
  try {
    await guard.assertUrl(new URL(url));
  } catch (error) {
    if (!(error instanceof NotAllowed)) throw error;
    throw fieldError('body', 'url', error.message);
  }
}

export class AddressGuard {
  readonly #allowed: readonly Network[];
  readonly #resolveName: ResolveName;
  readonly #ownPorts: number[] = [];

  constructor(allowed: readonly Network[], resolveName: ResolveName) {
    this.#allowed = allowed;
    this.#resolveName = resolveName;
  }

  /** Adds ports on which this broker listens, so that no webhook calls them. */
  protect(...ports: readonly number[]): void {
    this.#ownPorts.push(...ports);
  }

  /**
   * Throws NotAllowed for an address that webhooks must not call.
   * `host` is the host in the URL, for the message.
   */
  assertAddress(text: string, host = text): void {
    const address = addressOf(text);
    if (isPublic(address) || this.#isAllowed(address)) return;
    const verb = addressOf(host) ? 'is' : 'resolves to an address that is';
    throw new NotAllowed(
      `${host} ${verb} not public; to allow calls, add the address or its network to --webhook-allow of the broker`,
    );
  }

  /**
   * Throws NotAllowed if the URL contains a forbidden address, or leads to this broker's own ports. For a host name,
   * only these ports are checked here. Each delivery checks whether the addresses of the name are allowed.
   */
  async assertUrl({ hostname, port, protocol }: URL): Promise<void> {
    const isAddress = addressOf(hostname) !== undefined;
    if (isAddress) this.assertAddress(hostname);
    const number = Number(port) || (protocol === 'https:' ? 443 : 80);
    if (!this.#ownPorts.includes(number)) return;
    this.#assertOthers(isAddress ? [hostname] : await this.#resolveName(hostname).catch(() => []), number);
  }

  /** Returns the addresses to connect to for a host. Rejects with NotAllowed if one of them is forbidden. */
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

  /**
   * Destroys a connection that leads to this broker itself, and throws NotAllowed. resolve() does not refuse all such
   * connections, because it does not know, for example, the addresses of unplugged interfaces.
   */
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

/** Parses an address, which may be in brackets, and may have a zone if it is IPv6. Returns undefined for other text. */
function addressOf(text: string): Address | undefined {
  // Text such as 8.8.8.8%.example.org is a host name, because IPv4 addresses have no zones (RFC 4007).
  const plain = text.replace(/^\[|\]$/g, '').replace(/^([^%]*:[^%]*)%[\w.-]+$/, '$1');
  // In URLs, the class URL has already converted octal, hexadecimal and short forms of IPv4 to four decimal parts.
  const usual = ipaddr.IPv4.isValidFourPartDecimal(plain) || ipaddr.IPv6.isValid(plain);
  return usual ? innermost(ipaddr.parse(plain)) : undefined;
}

/**
 * Returns the IPv4 address inside a mapped, translated or 6to4 address, because packets are sent to that
 * address.
 */
function innermost(address: Address): Address {
  if (!(address instanceof ipaddr.IPv6)) return address;
  if (address.isIPv4MappedAddress()) return address.toIPv4Address();
  const bytes = address.toByteArray();
  if (translated.some((network) => address.match(network))) return new ipaddr.IPv4(bytes.slice(12));
  if (address.match(sixToFour)) return new ipaddr.IPv4(bytes.slice(2, 6));
  return address;
}

/** True if a connection to this address ends on the broker's own computer. */
function isHere(text: string): boolean {
  const address = addressOf(text);
  if (!address) return false;
  return (
    ['loopback', 'unspecified'].includes(address.range()) ||
    ownAddresses().some((one) => addressOf(one)?.toString() === address.toString())
  );
}

/**
 * Returns the addresses of this computer, which are read over a netlink socket. Returns none if a sandbox forbids that
 * socket; refuseSelf() then still refuses connections to this broker.
 */
function ownAddresses(): string[] {
  try {
    return Object.values(networkInterfaces()).flatMap((some = []) => some.map(({ address }) => address));
  } catch {
    return [];
  }
}

function isPublic(address: Address | undefined): boolean {
  if (address?.range() !== 'unicast') return false;
  if (address instanceof ipaddr.IPv6) return address.match(globalUnicast);
  return !metadata.includes(address.toString());
}
