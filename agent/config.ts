// The agent's settings.
import { homedir } from 'node:os';
import { join, resolve } from 'node:path';
import * as z from 'zod';
import { label, tags } from '../shared/api/route.ts';
import { common, flag, hostPort, logLevel, type Settings, words } from '../shared/settings.ts';
import { allCapabilities } from './capabilities.ts';

const dataDir = z
  .string()
  .min(1)
  .default(() =>
    process.getuid?.() === 0 ? '/var/lib/farhand-agent' : join(homedir(), '.local/state/farhand-agent'),
  )
  .transform((path) => resolve(path));

/** Told to `install`, which keeps them beside the others. */
export const serviceSettings = {
  user: {
    schema: z.string().optional(),
    value: 'NAME',
    help: 'who the agent is, and its commands (default farhand-agent, made if missing; root must be said)',
  },
  allow_sudo: { schema: flag, help: 'commands may gain rights, as sudo does; nothing is locked then' },
};

export const agentSettings = {
  broker: {
    schema: z.string().pipe(hostPort).transform(textOf),
    value: 'HOST:PORT',
    help: 'where the broker takes agents',
  },
  join_token: {
    schema: z.string().optional(),
    value: 'TOKEN',
    help: 'needed once, at the first start; better by file',
  },
  join_token_file: {
    schema: z.string().optional(),
    value: 'FILE',
    help: 'where the join token lies; removed once it has done its work',
  },
  data_dir: { schema: dataDir, value: 'DIR', help: 'identity, journals and output of this agent' },
  name: {
    schema: label(1, 100).optional(),
    value: 'NAME',
    help: 'counts at the first start only; the host name unless told',
  },
  tags: { schema: words.default([]).pipe(tags), value: 'A,B', help: 'counts at the first start only' },
  allow: {
    schema: words.default([...allCapabilities]).pipe(z.array(z.enum(allCapabilities))),
    value: 'CAPS',
    help: `what the broker may do here: ${allCapabilities.join(',')} (default: all)`,
  },
  root: {
    schema: words.default(['/']).pipe(z.array(z.string().startsWith('/', 'must be an absolute path')).min(1)),
    value: 'DIR',
    help: 'no file outside is touched (default /; several with commas)',
  },
  log_level: logLevel,
  user: { ...serviceSettings.user, fileOnly: true },
  allow_sudo: { ...serviceSettings.allow_sudo, fileOnly: true },
  ...common,
};
export type AgentSettings = Settings<typeof agentSettings>;

function textOf({ host, port }: { host: string; port: number }): string {
  return host.includes(':') ? `[${host}]:${port}` : `${host}:${port}`;
}
