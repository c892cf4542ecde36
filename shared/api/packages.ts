// What a new machine fetches from its broker: the script that installs the agent, and the agent itself.
import * as z from 'zod';
import { outgoing, raw } from './route.ts';

export const packages = {
  script: raw({
    path: '/install.sh',
    base: '',
    access: 'everybody',
    summary: 'The script that installs the agent of this broker; see the answer of POST /join-tokens',
  }),
  file: {
    ...outgoing('bytes', {
      path: '/packages/{file}',
      access: 'everybody',
      summary: 'One of the packages that SHA256SUMS names, or SHA256SUMS itself',
      params: { file: z.string() },
      headers: { if_none_match: z.string().optional() },
    }),
    base: '' as const,
  },
};
