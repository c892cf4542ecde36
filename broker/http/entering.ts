// Who asks over HTTP: the address, as far as proxies are believed, and the count of requests before anything is looked at.
import type { Context } from 'koa';
import { type Proxies, plainAddress } from '../address.ts';
import { type Asker, count } from '../admission/access.ts';
import type { Quota, Rates } from '../admission/rates.ts';
import type { Keys } from '../keys.ts';
import type { Crowd } from './crowd.ts';

export interface EnteringRooms {
  keys: Keys;
  proxies: Proxies;
  rates: Rates;
}

export interface Entering {
  askerOf(ctx: Context): Asker;
  /** The same, after counting. Throws rate_limited. */
  counted(ctx: Context): Promise<Asker>;
}

/** `crowd`: none for the broker's own socket file, whose callers need no key and have no limit. */
export function openEntering(rooms: EnteringRooms, crowd: Crowd | undefined): Entering {
  const askerOf = (ctx: Context): Asker => {
    const local = crowd === undefined;
    const peer = plainAddress(ctx.req.socket.remoteAddress ?? '');
    const address = local ? '' : rooms.proxies.clientOf(peer, ctx.get('x-forwarded-for'));
    return { authorization: ctx.get('authorization'), local, address };
  };
  return {
    askerOf,
    async counted(ctx) {
      const asker = askerOf(ctx);
      const { known, quota } = await count(asker, rooms);
      if (known) crowd?.know(ctx.req.socket);
      if (quota) tell(ctx, quota);
      if (quota?.refusal) throw quota.refusal;
      return asker;
    },
  };
}

/** Spec section 8.2. */
function tell(ctx: Context, { limit, remaining, reset }: Quota): void {
  ctx.set('X-RateLimit-Limit', String(limit));
  ctx.set('X-RateLimit-Remaining', String(remaining));
  ctx.set('X-RateLimit-Reset', String(reset));
}
