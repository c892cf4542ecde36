// What a new machine fetches from its broker: the script that installs the agent, and the agent itself.
import * as z from 'zod';
import { outgoing, raw } from './route.ts';

export const packages = {
  script: raw(
    '/install.sh',
    'everybody',
    'The script that installs the agent of this broker; see the answer of POST /join-tokens',
  ),
  file: {
    ...outgoing('bytes', '/packages/{file}', 'everybody', {
      summary: 'One of the packages that SHA256SUMS names, or SHA256SUMS itself',
      headers: { if_none_match: z.string().optional() },
    }),
    base: '' as const,
  },
};
