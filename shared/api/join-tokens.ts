// REST routes of join tokens, the secrets with which new machines join a broker.
import * as z from 'zod';
import { list } from './define-list-route.ts';
import { single } from './define-route.ts';
import { day, deleted, joinTokenId, label, milliseconds, named, tags, timestamp } from './shared-schemas.ts';

const joinToken = named('JoinToken', {
  id: joinTokenId,
  name: z.string().nullable().describe('Name: what the token is for'),
  uses: z.number().describe('Total number of machines that may join with the token'),
  uses_left: z.number().describe('Number of machines that may still join with the token'),
  tags: z.array(z.string()).nullable().describe('Tags of every machine that joins with the token'),
  created_at: timestamp.describe('Time of creation'),
  expires_at: timestamp.describe('Time when the token expires'),
});

const lifetime = milliseconds(1_000, 30 * day);

export const joinTokens = {
  create: single('POST', '/join-tokens', 'admin', {
    summary: 'Create a join token',
    description: 'Only this answer contains the token: store it now.',
    body: z.strictObject({
      name: label(1, 100)
        .optional()
        .describe(
          'Name of the token. If only one machine may join with the token, the machine gets this name',
        ),
      expires_in: lifetime.default(3_600_000).describe('Milliseconds until the token expires'),
      uses: z.int().min(1).max(10_000).default(1).describe('Number of machines that may join with the token'),
      tags: tags.optional().describe('Tags of every machine that joins with the token'),
    }),
    example: { name: 'web-1', expires_in: 3_600_000, tags: ['web'] },
    reply: joinToken
      .extend({
        token: z.string().describe('The token'),
        install: z
          .string()
          .nullable()
          .describe(
            'Shell line that installs the agent on a machine; null if this broker cannot offer one, see `install_missing`',
          ),
        install_missing: z.string().nullable().describe('Why `install` is null'),
      })
      .meta({ id: 'NewJoinToken' }),
    status: 201,
    idempotency: 'secret',
    confirmed: true,
  }),
  list: list('/join-tokens', 'admin', {
    summary: 'List join tokens',
    sort: ['name', 'created_at'],
    reply: joinToken,
  }),
  remove: single('DELETE', '/join-tokens/{join_token_id}', 'admin', {
    summary: 'Delete a join token',
    reply: deleted,
  }),
};
