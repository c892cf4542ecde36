// What only the broker's own box may ask for, over the socket file: no part of the API.
import type Router from '@koa/router';
import type { Context } from 'koa';
import type { Backups } from '../backup.ts';

export interface LocalRooms {
  backups: Backups;
}

export function addLocalRoutes(router: Router, { backups }: LocalRooms): void {
  router.post('/local/backup', async (ctx: Context) => {
    ctx.body = { data: await backups.make(), meta: { request_id: String(ctx.state.requestId) } };
  });
}
