// Who did what, over REST: an append-only record of every call that changes or runs something.
import * as z from 'zod';
import { list } from './list.ts';
import { label, timestamp } from './route.ts';

const audited = z
  .object({
    id: z.string(),
    at: timestamp,
    key_id: z.string(),
    key_name: z.string(),
    action: z.string().meta({
      description:
        'The operation of this document; `sessions.input` and `sessions.leave` of a terminal’s client; `refusals`: how many were left out',
      examples: ['sessions.attach'],
    }),
    machine_id: z.string().nullable(),
    what: z
      .record(z.string(), z.unknown())
      .describe('What it was done to: ids, paths, command lines; long ones are cut'),
    request_id: z.string(),
    address: z.string().describe('Where it came from; empty over the broker’s own socket file'),
    result: z.string().describe('`ok`, or the code of the refusal'),
  })
  .meta({ id: 'AuditEntry' });

/** What somebody did, before it has its place in the record. */
export type Deed = Omit<z.output<typeof audited>, 'id' | 'at'>;

export const audit = {
  list: list('/audit', 'admin', {
    summary: 'List who did what',
    query: {
      action: label(1, 100).optional(),
      // Not looked up: what a revoked key did is what one wants to know.
      key_id: label(1, 200).optional().describe('Id of a key, also of a revoked one'),
      key: label(1, 200).optional().describe('The same as key_id'),
    },
    sort: ['created_at'],
    reply: audited,
  }),
};
