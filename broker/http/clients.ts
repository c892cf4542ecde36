// Clients of one HTTP server: their address as far as proxies are believed, their key, and their rate limit.
import type { IncomingMessage } from 'node:http';
import type { Context } from 'koa';
import { authenticate, type Client, validKeyIn } from '../admission/authenticate.ts';
import type { Rates } from '../admission/rates.ts';
import { type Proxies, plainAddress } from '../client-address.ts';
import type { ConnectionLimiter } from '../connections.ts';
import type { Keys } from '../keys/index.ts';
import { localKey } from '../keys/rights.ts';

export interface ClientRooms {
  keys: Keys;
  proxies: Proxies;
  rates: Rates;
}

export class Clients {
  readonly #rooms: ClientRooms;
  /** Undefined for the broker's own socket file, whose callers need no key and have no limit. */
  readonly #connections: ConnectionLimiter | undefined;

  constructor(rooms: ClientRooms, connections: ConnectionLimiter | undefined) {
    this.#rooms = rooms;
    this.#connections = connections;
  }

  /** Whether a request that begins has a valid key, or needs none to be served at once. */
  hasKey({ headers }: IncomingMessage): boolean {
    return !this.#connections || validKeyIn(headers.authorization ?? '', this.#rooms.keys) !== undefined;
  }

  /** The client of a route that needs no key; what it presents is not looked at. */
  anonymous(ctx: Context): Client {
    const peer = plainAddress(ctx.req.socket.remoteAddress ?? '');
    const address = this.#connections ? this.#rooms.proxies.clientOf(peer, ctx.get('x-forwarded-for')) : '';
    return { address, key: localKey };
  }

  /** Throws unauthorized and rate_limited. */
  async authenticate(ctx: Context): Promise<Client> {
    const local = this.anonymous(ctx);
    if (!this.#connections) return local;
    const client = await authenticate(ctx.get('authorization'), local.address, this.#rooms);
    this.#connections.authenticate(ctx.req.socket);
    if (client.quota) {
      // Spec section 8.2.
      const { limit, remaining, reset } = client.quota;
      ctx.set('X-RateLimit-Limit', String(limit));
      ctx.set('X-RateLimit-Remaining', String(remaining));
      ctx.set('X-RateLimit-Reset', String(reset));
    }
    return client;
  }
}
