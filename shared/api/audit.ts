// REST route of the audit log, an append-only record of every call that changes or runs something.
import * as z from 'zod';
import { list } from './define-list-route.ts';
import { label, named, timestamp } from './shared-schemas.ts';

const details = z.record(z.string(), z.unknown());
const entry = named('AuditEntry', {
  id: z.string().describe('Id of the entry'),
  at: timestamp.describe('Time of the call'),
  key_id: z.string().describe('Id of the API key that made the call'),
  key_name: z.string().describe('Name of the API key at the time of the call'),
  login_id: z
    .string()
    .nullable()
    .describe(
      'Id of the browser login that made the call; null if the call was made with the API key itself',
    ),
  action: z.string().meta({
    description:
      'Operation id of the call, or one of these. `sessions.input`: a terminal client sent input, or an observer tried to (at most one entry per client and minute). `sessions.leave`: a terminal client left. `refusals`: further refused calls of a key, after 60 entries in a minute; `what.left_out` is their number',
    examples: ['sessions.attach'],
  }),
  machine_id: z.string().nullable().describe('Id of the machine, if the call was about one'),
  what: details.describe('What the call was about, such as ids and paths; long values are cut'),
  request_id: z.string().describe('Id of the request'),
  address: z.string().describe('IP address of the client; empty for a client of the broker’s socket file'),
  result: z.string().describe('`ok`, or the error code'),
});

/** An audit entry without its id and time, which the audit log adds. */
export type Deed = Omit<z.output<typeof entry>, 'id' | 'at' | 'login_id'> & { login_id?: string | undefined };

export const audit = {
  list: list('/audit', 'admin', {
    summary: 'List the audit log',
    query: {
      action: label(1, 100).optional().describe('Only entries of this operation'),
      // These filters accept any text, not only ids of existing keys and logins. So the entries of a revoked key can be
      // found.
      key_id: label(1, 200).optional().describe('Only entries of this API key, even if it was revoked'),
      login_id: label(1, 200).optional().describe('Only entries of this login, even if it has ended'),
      key: label(1, 200).optional().describe('Same as key_id'),
    },
    sort: ['created_at'],
    reply: entry,
  }),
};
