// REST routes of the install script and the agent packages, which a new machine downloads from its broker.
import * as z from 'zod';
import { outgoing, raw } from './define-route.ts';

export const packages = {
  script: raw('/install.sh', 'everybody', {
    summary: 'Download the script that installs the agent',
    description: 'The answer of `POST /join-tokens` contains the shell command that runs this script.',
    types: ['text/x-shellscript'],
    errors: ['route_not_found'],
  }),
  file: {
    ...outgoing('bytes', '/packages/{file}', 'everybody', {
      summary: 'Download an agent package, or SHA256SUMS, the list of packages',
      headers: { if_none_match: z.string().optional().describe('ETag of the copy that the client has') },
      types: ['application/octet-stream', 'application/gzip'],
      errors: ['route_not_found'],
    }),
    base: '' as const,
  },
};
