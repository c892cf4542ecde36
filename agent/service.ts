// farhand-agent install, status, uninstall: the agent as a service of systemd.
import { existsSync } from 'node:fs';
import { readFile, readlink, rm } from 'node:fs/promises';
import { join } from 'node:path';
import { StartError } from '../shared/errors.ts';
import { parseJoinToken } from '../shared/join-token.ts';
import {
  flag,
  type Invocation,
  parseSettings,
  readSettings,
  type Settings,
  settingsText,
} from '../shared/settings.ts';
import {
  dataOf,
  install,
  needSystemd,
  type State,
  settingsOf,
  uninstall,
  unitText,
} from '../shared/systemd/index.ts';
import { gathered, perform, say, statusOf } from '../shared/systemd/service.ts';
import { linkIn, type Verb } from '../shared/systemd/verbs.ts';
import { agentSettings, serviceSettings } from './config.ts';
import { checkRoots } from './files/index.ts';
import { machineIn } from './identity.ts';

const agent = { name: 'farhand-agent', home: '/home/farhand-agent' };
const tokenFile = join(dataOf(agent), 'join-token');

const installSettings = { ...agentSettings, ...serviceSettings };
type InstallSettings = Settings<typeof installSettings>;

const uninstallSettings = {
  keep_data: { schema: flag, help: 'leave its identity, settings and account', flagOnly: true },
  help: agentSettings.help,
};

/** Does it and says so; the result is the exit code. `command`: this very program. */
export async function service(verb: Verb, from: Invocation, command: readonly string[]): Promise<number> {
  const deeds = {
    install: {
      purpose: 'makes this machine’s agent a service of systemd, or changes the settings of one',
      settings: installSettings,
      run: (told: Invocation) => installAgent(told, command),
    },
    status: statusOf(agent, isLinked, (found) => {
      const { broker = null, machineId = null } = linkIn(found.status) ?? {};
      return { broker, machine_id: machineId, linked: isLinked(found) };
    }),
    uninstall: {
      purpose: 'stops the service and takes away all that it has on this machine',
      settings: uninstallSettings,
      run: uninstallAgent,
    },
  };
  return await perform(agent, verb, deeds, from);
}

async function uninstallAgent(from: Invocation): Promise<number> {
  const { keep_data } = readSettings(uninstallSettings, from);
  needSystemd('uninstall', true);
  const machine = await machineIn(dataOf(agent)).catch(() => undefined);
  try {
    await uninstall(agent, keep_data);
  } finally {
    // Also where a user stays whom somebody still is.
    await removeProgram();
    if (machine && !machine.removed && !keep_data)
      say(`${recordStays} farhand machines remove ${machine.machineId}`);
  }
  const rest = `, and nothing of it is left${hasProgram() ? ' but the program itself' : ''}`;
  say(`${agent.name} is uninstalled${keep_data ? '; its data, settings and account are kept' : rest}.`);
  return 0;
}

const recordStays = 'The broker keeps its record of this machine until somebody says:';

const isLinked = ({ active, status }: State): boolean =>
  active === 'active' && linkIn(status)?.machineId !== undefined;

async function installAgent(from: Invocation, command: readonly string[]): Promise<number> {
  const given = gathered(agent, installSettings, from);
  const settings = parseSettings(installSettings, given);
  const token = await tokenOf(settings);
  needSystemd('install', true);
  await checkRoots(settings.root);
  await checkMachine(token);
  const { user = agent.name, allow_sudo } = settings;
  const words = [...command, '--config', settingsOf(agent)];
  const found = await install(agent, {
    user,
    command: words,
    hidden: user === 'root' ? [] : ['/root'],
    unit: (systemd) => agentUnit({ command: words, user, free: user === 'root' || allow_sudo, systemd }),
    settings: settingsText(installSettings, { ...kept(given), user }),
    secret: token ? { file: tokenFile, text: token } : undefined,
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

/** A machine needs a token, or one that an earlier install has left, or a broker that it has joined; one broker. */
async function checkMachine(token: string): Promise<void> {
  const machine = await machineIn(dataOf(agent));
  if (!machine && !token && !existsSync(tokenFile)) {
    throw new StartError(
      'this machine has not joined a broker yet: --join-token-file FILE is needed, or FARHAND_JOIN_TOKEN',
    );
  }
  if (!machine || machine.removed || !token) return;
  if (parseJoinToken(token).fingerprint === machine.fingerprint) return;
  throw new StartError(
    `this machine has joined another broker than that of the join token: ${agent.name} uninstall comes first`,
  );
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
  // An earlier install has put it there; it goes with its use.
  if (file === tokenFile) return undefined;
  return await readFile(file, 'utf8').catch((error: unknown) => {
    throw new StartError(`--join-token-file ${file}: ${String(error)}`);
  });
}

/** What install.sh has put there goes as well; of a package its manager takes care. */
async function removeProgram(): Promise<void> {
  const [place, link] = [`/opt/${agent.name}`, `/usr/local/bin/${agent.name}`];
  const target = await readlink(link).catch(() => '');
  if (target.startsWith(`${place}/`)) await rm(link, { force: true });
  await rm(place, { recursive: true, force: true });
}

/** Whether this program is still there. */
const hasProgram = (): boolean => existsSync(import.meta.filename);

/** What goes into the file: not the token, which lies apart and goes once it was used. */
function kept({ join_token: _, ...given }: Record<string, unknown>): Record<string, unknown> {
  return { ...given, data_dir: dataOf(agent), join_token_file: tokenFile };
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
