// REST route of the brokers that share a database.
import * as z from 'zod';
import { paging } from './define-list-route.ts';
import { build } from './define-route.ts';
import { named, timestamp } from './shared-schemas.ts';

export const brokers = {
  list: build('list', 'GET', '/brokers', 'admin', {
    summary: 'List the brokers that share this broker’s database',
    description:
      'A broker owns the machines whose agents are connected to it, and the machines that it has taken over from stopped brokers. The list is empty for a broker without `--peer-listen`.',
    query: paging(['url', 'machines'], 'url'),
    reply: named('Broker', {
      id: z.string().describe('Id of the broker; a restart changes it'),
      url: z.string().describe('URL at which other brokers reach this one'),
      status: z.enum(['online', 'offline']).describe('`online` while the broker’s lease is valid'),
      lease_until: timestamp.describe(
        'End of the lease, by the clock of the database. A running broker renews its lease every 2 seconds',
      ),
      machines: z.number().describe('Number of machines that the broker owns'),
      linked: z.number().describe('Number of these machines whose agents are connected'),
      self: z.boolean().describe('True for the broker that has answered this request'),
    }),
  }),
};
