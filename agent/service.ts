// farhand-agent install, status, uninstall: the agent as a service of systemd.
import { existsSync } from 'node:fs';
import { readFile, realpath, rm } from 'node:fs/promises';
import { join } from 'node:path';
import * as z from 'zod';
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
import { linkIn, type Verb } from '../shared/systemd/verbs.ts';
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
  allow_sudo: {
    schema: flag,
    help: 'commands may gain rights, as sudo does; nothing is locked then',
    flagOnly: true,
  },
};
type InstallSettings = Settings<typeof installSettings>;

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
  await removeProgram(command[0] ?? '');
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
  const { broker = null, machineId = null } = linkIn(found.status) ?? {};
  const linked = { broker, machine_id: machineId, linked: found.settled };
  process.stdout.write(reportText(agent.name, found, linked, output));
  return found.active === 'active' ? 0 : 3;
}

const isLinked = ({ active, status }: State): boolean =>
  active === 'active' && linkIn(status)?.machineId !== undefined;

async function installAgent(from: Invocation, command: readonly string[]): Promise<number> {
  const told = withOldSettings(from);
  const settings = readSettings(installSettings, told);
  const token = await tokenOf(settings);
  needSystemd('install', true);
  if (!token && !existsSync(join(settings.data_dir, 'identity.json'))) {
    throw new StartError(
      'this machine has not joined a broker yet: --join-token-file FILE is needed, or FARHAND_JOIN_TOKEN',
    );
  }
  const { user, free } = await whose(settings);
  const found = await install(agent, {
    user,
    unit: (systemd) =>
      agentUnit({ command: [...command, '--config', settingsOf(agent)], user, free, systemd }),
    settings: settingsText(agentSettings, kept(givenSettings(installSettings, told))),
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
function withOldSettings({ argv, env }: Invocation): Invocation {
  const old = existsSync(settingsOf(agent)) ? ['--config', settingsOf(agent)] : [];
  return { argv: [...old, ...argv], env };
}

/** Who it is, and whether that one may gain rights; as it was before, unless told. */
async function whose({ user, allow_sudo }: InstallSettings): Promise<{ user: string; free: boolean }> {
  const unit = user === undefined ? (await contentOf(unitOf(agent)))?.text : undefined;
  const name = user ?? /^User=(.+)$/m.exec(unit ?? '')?.[1] ?? agent.name;
  const wasFree = unit !== undefined && !unit.includes('NoNewPrivileges=yes');
  return { user: name, free: name === 'root' || allow_sudo || wasFree };
}

/** Throws StartError when it is none. */
async function tokenOf({ data_dir, join_token, join_token_file: file }: InstallSettings): Promise<string> {
  if (data_dir !== dataOf(agent)) {
    throw new StartError(`--data-dir: as a service the agent keeps its data in ${dataOf(agent)}`);
  }
  const token = (join_token || (file && (await textIn(file))) || '').trim();
  if (token) parseJoinToken(token);
  return token;
}

async function textIn(file: string): Promise<string | undefined> {
  // An earlier install has named one that went with its token.
  if (file === tokenFile) return undefined;
  return await readFile(file, 'utf8').catch((error: unknown) => {
    throw new StartError(`--join-token-file ${file}: ${String(error)}`);
  });
}

/** What install.sh has put there goes as well; of a package its manager takes care. */
async function removeProgram(program: string): Promise<void> {
  const place = `/opt/${agent.name}`;
  const real = await realpath(program).catch(() => '');
  if (!real.startsWith(`${place}/`)) return;
  await rm(program, { force: true });
  await rm(place, { recursive: true, force: true });
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
