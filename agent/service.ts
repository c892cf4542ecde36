// farhand-agent install, status, uninstall: the agent as a service of systemd.
import { existsSync } from 'node:fs';
import { readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { z } from 'zod';
import { StartError } from '../shared/errors.ts';
import { parseJoinToken } from '../shared/join-token.ts';
import {
  flag,
  givenSettings,
  helpText,
  type Invocation,
  readSettings,
  type Settings,
  settingsText,
} from '../shared/settings.ts';
import {
  contentOf,
  dataOf,
  install,
  needSystemd,
  place,
  report,
  type State,
  settingsOf,
  uninstall,
  unitOf,
  unitText,
} from '../shared/systemd/index.ts';
import { reportText, statusSettings } from '../shared/systemd/report.ts';
import { linkedAs, type Verb } from '../shared/systemd/verbs.ts';
import { agentSettings } from './config.ts';

const agent = { name: 'farhand-agent', home: '/home/farhand-agent' };
const tokenFile = join(dataOf(agent), 'join-token');

const installSettings = {
  ...agentSettings,
  user: {
    schema: z.string().optional(),
    value: 'NAME',
    help: `who the agent is, and its commands (default ${agent.name}, made if missing; root must be said)`,
    flagOnly: true,
  },
  allow_sudo: { schema: flag, help: 'commands may gain rights, by sudo for one', flagOnly: true },
};
const uninstallSettings = {
  keep_data: { schema: flag, help: 'leave its identity, settings and account', flagOnly: true },
  help: agentSettings.help,
};

/** Does it and says so; the result is the exit code. `command`: this very program. */
export async function service(verb: Verb, from: Invocation, command: readonly string[]): Promise<number> {
  if (from.argv.includes('--help')) return help(verb);
  if (verb === 'install') return await installAgent(from, command);
  if (verb === 'status') return await tellStatus(from);
  const { keep_data } = readSettings(uninstallSettings, from);
  await uninstall(agent, keep_data);
  say(
    `${agent.name} is uninstalled${keep_data ? '; its data, settings and account are kept' : ', and nothing of it is left'}.`,
    'The broker keeps its record of this machine until somebody removes it there.',
  );
  return 0;
}

function help(verb: Verb): number {
  const tables = { install: installSettings, status: statusSettings, uninstall: uninstallSettings };
  const purposes = {
    install: 'makes this machine’s agent a service of systemd, or changes the settings of one',
    status: 'tells how the service is; exits with 0 while it runs, with 3 else',
    uninstall: 'stops the service and takes away all that it has on this machine',
  };
  process.stdout.write(helpText(`${agent.name} ${verb}`, purposes[verb], tables[verb]));
  return 0;
}

async function tellStatus(from: Invocation): Promise<number> {
  const { output } = readSettings(statusSettings, from);
  const found = await report(agent, isLinked);
  const linked = { linked: found.settled, machine_id: linkedAs(found.status) ?? null };
  process.stdout.write(reportText(agent.name, found, linked, output));
  return found.active === 'active' ? 0 : 3;
}

const isLinked = ({ active, status }: State): boolean =>
  active === 'active' && linkedAs(status) !== undefined;

async function installAgent(from: Invocation, command: readonly string[]): Promise<number> {
  const told = await withOldSettings(from);
  const settings = readSettings(installSettings, told);
  const before = (await contentOf(unitOf(agent)))?.text;
  const user = settings.user ?? /^User=(.+)$/m.exec(before ?? '')?.[1] ?? agent.name;
  const free = user === 'root' || settings.allow_sudo;
  const token = await tokenOf(settings);
  needSystemd('install', true);
  const found = await install(agent, {
    user,
    unit: (systemd) =>
      agentUnit({ command: [...command, '--config', settingsOf(agent)], user, free, systemd }),
    settings: settingsText(kept(givenSettings(installSettings, told))),
    async prepare({ uid, gid }) {
      if (token) await place(tokenFile, { text: token, mode: 0o600, uid, gid });
    },
    settled: isLinked,
  });
  say(`${agent.name} is installed and runs as ${user}: ${found.status}.`);
  if (user === 'root') say('It runs as root: whoever may use it through the broker is root on this machine.');
  say(
    `Settings: ${settingsOf(agent)}. Its log: journalctl -u ${agent.name}. How it is: ${agent.name} status.`,
  );
  if (found.settled) return 0;
  say('It goes on trying. What it said last:', ...found.log.map((line) => `  ${line}`));
  return 1;
}

/** What an earlier install was told counts unless it is told anew. */
async function withOldSettings({ argv, env }: Invocation): Promise<Invocation> {
  const old = existsSync(settingsOf(agent)) ? ['--config', settingsOf(agent)] : [];
  return { argv: [...old, ...argv], env };
}

/** Undefined where the machine has joined already. Throws StartError when one is needed. */
async function tokenOf(settings: Settings<typeof installSettings>): Promise<string | undefined> {
  const { data_dir, join_token, join_token_file: file } = settings;
  if (data_dir !== dataOf(agent)) {
    throw new StartError(`--data-dir: as a service the agent keeps its data in ${dataOf(agent)}`);
  }
  const token = join_token || (file && existsSync(file) ? await readFile(file, 'utf8') : undefined);
  if (token) parseJoinToken(token);
  else if (!existsSync(join(data_dir, 'identity.json'))) {
    throw new StartError(
      'this machine has not joined a broker yet: --join-token-file FILE is needed, or FARHAND_JOIN_TOKEN',
    );
  }
  return token?.trim();
}

/** What goes into the file: not the token, which lies apart and goes once it was used. */
function kept(given: Record<string, unknown>): Record<string, unknown> {
  const { config: _, join_token: _token, user: _user, allow_sudo: _sudo, ...rest } = given;
  return { ...rest, data_dir: dataOf(agent), join_token_file: tokenFile };
}

interface AgentUnit {
  command: readonly string[];
  user: string;
  /** It may gain rights, or has them all. */
  free: boolean;
  systemd: number;
}

/** What its user could not do anyway, or what no command of a person needs; ports, devices and namespaces stay. */
const locks = [
  'NoNewPrivileges=yes',
  'CapabilityBoundingSet=',
  'ProtectKernelTunables=yes',
  'ProtectKernelModules=yes',
  'ProtectKernelLogs=yes',
  'ProtectClock=yes',
  'RestrictRealtime=yes',
  'LockPersonality=yes',
  'SystemCallErrorNumber=EPERM',
  'SystemCallFilter=~@clock @cpu-emulation @module @obsolete @raw-io @reboot @swap',
];

/** The agent's unit. */
export function agentUnit({ command, user, free, systemd }: AgentUnit): string {
  const lines = [
    // By a child of the agent: systemd takes root's for the agent itself, another's only if all may tell.
    `NotifyAccess=${user === 'root' ? 'main' : 'all'}`,
    '# Commands get cgroups below this one, so that a kill finds all that they started.',
    'Delegate=yes',
    '# Memory that a command takes too much of is no reason to end the agent, nor is the agent the first to go.',
    'OOMPolicy=continue',
    'OOMScoreAdjust=-500',
    '# That of commands; what the agent keeps is private by itself.',
    'UMask=0022',
    ...(free ? ['# Commands may gain rights, or have them all: nothing is locked.'] : locks),
  ];
  return unitText({ description: 'Farhand agent', command, user, state: agent.name, systemd, lines });
}

function say(...lines: string[]): void {
  process.stdout.write(`${lines.join('\n')}\n`);
}
