// Who asks over HTTP: the address, as far as proxies are believed, and the count of requests before anything is looked at.
import type { Context } from 'koa';
import { type Proxies, plainAddress } from '../address.ts';
import { count, type Visitor } from '../admission/access.ts';
import type { Quota, Rates } from '../admission/rates.ts';
import type { ConnectionLimiter } from '../connections.ts';
import type { Keys } from '../keys/index.ts';
import { hasExpired } from '../keys/rights.ts';

export interface EnteringRooms {
  keys: Keys;
  proxies: Proxies;
  rates: Rates;
}

export interface Entering {
  /** Somebody whose key nobody looks at. */
  anybody(ctx: Context): Visitor;
  /** Whoever asks, after counting. Throws rate_limited. */
  counted(ctx: Context): Promise<Visitor>;
}

/** `connections`: none for the broker's own socket file, whose callers need no key and have no limit. */
export function openEntering(rooms: EnteringRooms, connections: ConnectionLimiter | undefined): Entering {
  const local = connections === undefined;
  const addressOf = (ctx: Context): string => {
    const peer = plainAddress(ctx.req.socket.remoteAddress ?? '');
    return local ? '' : rooms.proxies.clientOf(peer, ctx.get('x-forwarded-for'));
  };
  return {
    anybody: (ctx) => ({ address: addressOf(ctx), key: undefined }),
    async counted(ctx) {
      const asker = { authorization: ctx.get('authorization'), local, address: addressOf(ctx) };
      const visitor = await count(asker, rooms);
      if (visitor.key && !hasExpired(visitor.key)) connections?.authenticate(ctx.req.socket);
      if (visitor.quota) tell(ctx, visitor.quota);
      return visitor;
    },
  };
}

/** Spec section 8.2. */
function tell(ctx: Context, { limit, remaining, reset }: Quota): void {
  ctx.set('X-RateLimit-Limit', String(limit));
  ctx.set('X-RateLimit-Remaining', String(remaining));
  ctx.set('X-RateLimit-Reset', String(reset));
}
