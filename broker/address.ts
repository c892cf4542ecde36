// Where somebody comes from: an address as it is told, logged and compared.

/** An IPv4 address that an IPv6 socket shows as a mapped one is shown as what it is (RFC 4291 section 2.5.5.2). */
export function plainAddress(address: string): string {
  return address.replace(/^::ffff:(?=\d+\.)/i, '');
}

/** The address of a gRPC peer, `HOST:PORT` or `[HOST]:PORT`. */
export function peerAddress(peer: string): string {
  return plainAddress(peer.replace(/:\d+$/, '').replace(/^\[|\]$/g, ''));
}
