// The text of the API reference page: its introduction, and a description of each group of routes.
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { codes } from '../../shared/errors.ts';
import { shipped } from '../../shared/install-layout.ts';

/** Display name and description of each resource, by its name in the route table. */
export const tags: Readonly<Record<string, readonly [name: string, description: string]>> = {
  machines: ['Machines', 'The computers that run an agent: list, inspect, rename, tag and remove them.'],
  joinTokens: ['Join tokens', 'The secrets that new machines join with.'],
  files: ['Files', 'Files and directories on machines: read, write, transfer, search and watch them.'],
  commands: ['Commands', 'Programs on machines: run, follow, feed, signal and cancel them.'],
  batches: ['Batches', 'One command on many machines.'],
  schedules: ['Schedules', 'Commands by cron expression, and the history of their runs.'],
  sessions: ['Sessions', 'Terminals on machines that outlive their clients and short losses of the link.'],
  events: ['Events', 'The log of what happened: read it, or follow it as it grows.'],
  keys: ['API keys', 'The keys that clients authenticate with, their scopes and the machines they reach.'],
  webhooks: ['Webhooks', 'Subscriptions that send events to an address of yours, and their deliveries.'],
  audit: ['Audit log', 'The append-only record of every call that changes or runs something.'],
  packages: ['Packages', 'The install script and the agent packages for new machines.'],
  service: ['Service', 'Version, health and metrics of the broker, and this document.'],
};

function codeTable(): string {
  const byStatus = Map.groupBy(Object.entries(codes), ([, status]) => status);
  const rows = [...byStatus].map(
    ([status, found]) => `| ${status} | ${found.map(([code]) => `\`${code}\``).join(', ')} |`,
  );
  return `| status | codes |\n|---|---|\n${rows.join('\n')}`;
}

/** The introduction as Markdown; each heading becomes a section of the reference page. */
export function introduction(): string {
  const folder = shipped('docs', () => import.meta.dirname);
  return readFileSync(join(folder, 'reference.md'), 'utf8').replace('{codes}', codeTable());
}
