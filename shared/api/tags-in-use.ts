// REST route of the tags of machines.
import * as z from 'zod';
import { paging } from './define-list-route.ts';
import { build } from './define-route.ts';
import { named } from './shared-schemas.ts';

export const tags = {
  list: build('list', 'GET', '/tags', 'machines:read', {
    summary: 'List the tags of machines',
    query: {
      search: z.string().max(200).optional().describe('Only tags that contain this text, ignoring case'),
      ...paging(['name', 'machines'], 'name'),
    },
    reply: named('Tag', {
      name: z.string().describe('The tag'),
      machines: z
        .number()
        .describe('Number of machines with this tag; machines that the key may not use are not counted'),
    }),
  }),
};
