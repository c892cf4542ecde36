// The agent's settings: names, schemas, defaults and help texts.
import { resolve } from 'node:path';
import * as z from 'zod';
import { label, tags } from '../shared/api/shared-schemas.ts';
import {
  common,
  dataDir,
  flag,
  isHostPort,
  logLevel,
  type Settings,
  words,
} from '../shared/read-settings.ts';
import { allCapabilities } from './capabilities-by-rpc.ts';
import { upgradeDirectory } from './upgrade/files-shared-with-root.ts';

export const mostBrokers = 32;

/** Additional settings of `farhand-agent install`, which stores them in the settings file with the other settings. */
export const serviceSettings = {
  user: {
    schema: z.string().optional(),
    value: 'NAME',
    help: 'user that the agent and its commands run as (default farhand-agent, created if missing)',
  },
  allow_sudo: {
    schema: flag,
    help: 'let commands use sudo; a command with sudo can change --allow and --root',
  },
};

export const agentSettings = {
  broker: {
    schema: words.pipe(
      z
        .array(z.string().refine(isHostPort, 'must be HOST:PORT, with a port of at most 65535'))
        .min(1)
        .max(mostBrokers),
    ),
    value: 'HOST:PORT',
    repeats: true,
    help: 'address of the broker’s port for agents; if there are several brokers, give one address for each',
  },
  join_token: {
    schema: z.string().optional(),
    value: 'TOKEN',
    help: 'join token, needed at the first start only; --join-token-file is safer',
  },
  join_token_file: {
    schema: z.string().optional(),
    value: 'FILE',
    help: 'file with the join token; the agent removes it once the machine has joined',
  },
  data_dir: {
    schema: dataDir('farhand-agent'),
    value: 'DIR',
    help: 'directory of the agent’s identity, journals and command output',
  },
  name: {
    schema: label(1, 100).optional(),
    value: 'NAME',
    help: 'name of the machine, used at the first start only (default: the host name)',
  },
  tags: {
    schema: words.default([]).pipe(tags),
    value: 'A,B',
    help: 'tags of the machine, used at the first start only',
  },
  allow: {
    schema: words.default([...allCapabilities]).pipe(z.array(z.enum(allCapabilities))),
    value: 'CAPS',
    help: `what the broker may do on this machine: ${allCapabilities.join(',')} (default: all)`,
  },
  root: {
    schema: words.default(['/']).pipe(z.array(z.string().startsWith('/', 'must be an absolute path')).min(1)),
    value: 'DIR',
    help: 'directories whose files the broker may use (default /; separate several with commas)',
  },
  hold_version: {
    schema: z
      .string()
      .optional()
      .transform((version) => version || undefined),
    value: 'VERSION',
    help: 'the only version to which the broker may upgrade this agent (default: any that is signed)',
  },
  upgrade_dir: {
    schema: z
      .string()
      .default(upgradeDirectory)
      .transform((path) => resolve(path)),
    value: 'DIR',
    help: 'directory that the agent shares with the systemd unit farhand-agent-upgrade',
  },
  log_level: logLevel,
  user: { ...serviceSettings.user, fileOnly: true },
  allow_sudo: { ...serviceSettings.allow_sudo, fileOnly: true },
  ...common,
};
export type AgentSettings = Settings<typeof agentSettings>;
