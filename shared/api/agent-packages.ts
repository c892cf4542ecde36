// REST routes of the install script and of the agent packages. New machines download these packages, and upgrades
// install them.
import * as z from 'zod';
import { list } from './define-list-route.ts';
import { incoming, outgoing, raw, single } from './define-route.ts';
import { deleted, named } from './shared-schemas.ts';

const agentPackage = named('AgentPackage', {
  id: z.string().meta({
    description: 'Name of the file',
    examples: ['farhand-agent-1.2.3-linux-x64.tar.gz'],
  }),
  version: z.string().describe('Version of the agent'),
  arch: z.enum(['x64', 'arm64']).describe('CPU architecture, as Node names it'),
  kind: z.enum(['tar.gz', 'deb']).describe('Kind of the package'),
  size: z.number().describe('Bytes'),
  sha256: z.string().describe('SHA-256 of the file, in hexadecimal'),
  signed_by: z
    .string()
    .nullable()
    .describe(
      'Fingerprint of the key that signed the package; null: not signed, so no machine accepts it as an upgrade',
    ),
  uploaded: z
    .boolean()
    .describe(
      'True if it was uploaded; false if it came with the broker, or is in the directory of --packages',
    ),
  created_at: z
    .string()
    .describe('Time when the content of the file was last changed')
    .meta({ format: 'date-time' }),
});

export const packages = {
  script: raw('/install.sh', 'everybody', {
    summary: 'Download the script that installs the agent',
    description: 'The answer of `POST /join-tokens` contains the shell command that runs this script.',
    types: ['text/x-shellscript'],
    errors: ['route_not_found'],
  }),
  file: outgoing('bytes', '/packages/{file}', 'everybody', {
    base: '',
    summary: 'Download an agent package, or `SHA256SUMS`, the checksums of all packages',
    headers: { if_none_match: z.string().optional().describe('ETag of the copy that the client has') },
    types: ['application/octet-stream', 'application/gzip'],
    errors: ['route_not_found'],
  }),
  list: list('/packages', 'machines:read', {
    summary: 'List the agent packages that upgrades can install',
    sort: ['version', 'created_at'],
    defaultSort: 'version',
    fields: agentPackage.pick({ arch: true, kind: true, uploaded: true }),
    reply: agentPackage,
  }),
  upload: incoming('bytes', 'PUT', '/packages/{package}', 'admin', {
    summary: 'Upload a signed agent package, so that upgrades can install it',
    description:
      'The body is the package. Its size and SHA-256 must be those in `signature`. Each machine checks the signature itself, with the signing key that it trusts.',
    query: {
      signature: z
        .string()
        .min(1)
        .max(4096)
        .describe(
          'Text of the signature file that `npm run package -- --sign-key` writes beside the package',
        ),
    },
    reply: agentPackage,
    errors: [
      'validation_failed',
      'already_exists',
      'payload_too_large',
      'unavailable',
      'no_space',
      'io_error',
    ],
    status: 201,
  }),
  remove: single('DELETE', '/packages/{package}', 'admin', {
    summary: 'Delete an uploaded agent package',
    description:
      'Only uploaded packages can be deleted, not those of the broker’s installation or of `--packages`.',
    reply: deleted,
    errors: ['package_not_found', 'conflict'],
  }),
};
