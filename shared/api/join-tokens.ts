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
    tags: z.array(z.string()).nullable().describe('Fixed for every machine that joins with it'),
    created_at: timestamp,
    expires_at: timestamp,
  })
  .meta({ id: 'JoinToken' });

export const joinTokens = {
  create: single('POST', '/join-tokens', 'admin', {
    summary: 'Make a join token; it is shown once',
    body: z.strictObject({
      name: label(1, 100)
        .optional()
        .describe('What it is for; of a token for one machine, the name that `install` gives that machine'),
      expires_in: milliseconds(1_000, 30 * 86_400_000)
        .default(3_600_000)
        .describe('Milliseconds until it expires'),
      uses: z.int().min(1).max(10_000).default(1),
      tags: tags.optional(),
    }),
    reply: joinToken
      .extend({
        token: z.string(),
        install: z.string().nullable().describe('The line that installs the agent on a machine'),
        install_missing: z.string().nullable().describe('Why there is no such line'),
      })
      .meta({ id: 'NewJoinToken' }),
    status: 201,
    idempotency: 'secret',
  }),
  list: list('/join-tokens', 'admin', {
    summary: 'List join tokens',
    sort: ['name', 'created_at'],
    reply: joinToken,
  }),
  remove: single('DELETE', '/join-tokens/{join_token_id}', 'admin', {
    summary: 'Withdraw a join token',
    reply: z.object({ deleted: z.boolean() }),
  }),
};
