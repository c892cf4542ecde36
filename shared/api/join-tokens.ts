// Join tokens over REST: what a new machine shows to become one of ours.
import * as z from 'zod';
import { list } from './list.ts';
import { joinTokenId, label, milliseconds, single, tags, timestamp } from './route.ts';

const joinToken = z
  .object({
    id: joinTokenId,
    name: z.string().nullable(),
    uses: z.number(),
    uses_left: z.number(),
    tags: z.array(z.string()).nullable().meta({ description: 'Fixed for every machine that joins with it' }),
    created_at: timestamp,
    expires_at: timestamp,
  })
  .meta({ id: 'JoinToken' });

export const joinTokens = {
  create: single({
    method: 'POST',
    path: '/join-tokens',
    access: 'admin',
    summary: 'Make a join token; it is shown once',
    body: z.strictObject({
      name: label(1, 100).optional().meta({
        description: 'What it is for; of a token for one machine, the name that `install` gives that machine',
      }),
      expires_in: milliseconds(1_000, 30 * 86_400_000)
        .default(3_600_000)
        .meta({ description: 'Milliseconds until it expires' }),
      uses: z.int().min(1).max(10_000).default(1),
      tags: tags.optional(),
    }),
    reply: joinToken
      .extend({
        token: z.string(),
        install: z.string().nullable().meta({ description: 'The line that installs the agent on a machine' }),
        install_missing: z.string().nullable().meta({ description: 'Why there is no such line' }),
      })
      .meta({ id: 'NewJoinToken' }),
    status: 201,
    idempotency: 'secret',
  }),
  list: list({
    path: '/join-tokens',
    access: 'admin',
    summary: 'List join tokens',
    sort: ['name', 'created_at'],
    defaultSort: '-created_at',
    reply: joinToken,
  }),
  remove: single({
    method: 'DELETE',
    path: '/join-tokens/{join_token_id}',
    access: 'admin',
    summary: 'Withdraw a join token',
    params: { join_token_id: joinTokenId },
    reply: z.object({ deleted: z.boolean() }),
  }),
};
