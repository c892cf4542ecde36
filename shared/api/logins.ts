// REST routes of logins: a browser exchanges an API key for a cookie.
import * as z from 'zod';
import { list } from './define-list-route.ts';
import { single } from './define-route.ts';
import { deleted, keyId, label, loginId, named, timestamp } from './shared-schemas.ts';

export const login = named('Login', {
  id: loginId,
  key_id: keyId.describe('Id of the API key whose rights the login has'),
  key_name: z.string().describe('Name of the API key whose rights the login has'),
  name: z.string().nullable().describe('Name that the browser gave to the login'),
  address: z.string().describe('Address of the client that logged in'),
  created_at: timestamp.describe('Time of creation'),
  confirmed_at: timestamp.describe('Time when the login was last confirmed with the key'),
  last_used_at: timestamp.describe(
    'Time of the last request. The broker stores it at most once an hour, so after a restart it may be an hour too early',
  ),
  expires_at: timestamp.describe(
    'Time when the login ends: 12 hours after its last request, at the latest 7 days after its creation. It ends earlier if its API key expires or is revoked, or if the secret with which it was made becomes invalid',
  ),
});

const name = label(1, 100)
  .optional()
  .describe('Name of the login in the list of logins, such as `Firefox on Linux`');

export const logins = {
  create: single('POST', '/logins', 'any key', {
    summary: 'Log in: get a session cookie for the API key of this request',
    description:
      'Sets the cookie `__Host-farhand`. The login always has the current rights of its key. The header `Authorization` must contain the API key, or the one-time ticket from the link that `npm start` prints. The broker refuses a login over plain HTTP from another machine.',
    body: z.strictObject({ name }),
    example: { name: 'Firefox on Linux' },
    reply: login,
    status: 201,
  }),
  list: list('/logins', 'any key', {
    summary: 'List logins',
    description:
      'Lists the logins of this request’s key. A key with the scope `admin` also lists the logins of another key if it may use all machines of that key.',
    sort: ['created_at', 'last_used_at'],
    reply: login,
  }),
  confirm: single('POST', '/logins/{login_id}/confirm', 'any key', {
    summary: 'Confirm a login with its API key',
    description:
      'Send the key in the header `Authorization`. For 15 minutes the login may then call routes that need a confirmation.',
    reply: login,
  }),
  remove: single('DELETE', '/logins/{login_id}', 'any key', {
    summary: 'End a login at once',
    description: 'Also ends the open streams and terminals of the login.',
    reply: deleted,
  }),
};
