// Routes for the install script and the agent packages that a new machine downloads from its broker.
import * as z from 'zod';
import { outgoing, raw } from './define-route.ts';

export const packages = {
  script: raw('/install.sh', 'everybody', {
    summary: 'Download the script that installs the agent',
    description: 'The answer of `POST /join-tokens` has the shell line that runs it.',
    types: ['text/x-shellscript'],
    errors: ['route_not_found'],
  }),
  file: {
    ...outgoing('bytes', '/packages/{file}', 'everybody', {
      summary: 'Download a package, or the file SHA256SUMS that lists them',
      headers: { if_none_match: z.string().optional().describe('ETag of the copy the client has') },
      types: ['application/octet-stream', 'application/gzip'],
      errors: ['route_not_found'],
    }),
    base: '' as const,
  },
};
