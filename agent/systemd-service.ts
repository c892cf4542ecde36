// The verbs farhand-agent install, status and uninstall, which manage the agent as a systemd service.
import { existsSync } from 'node:fs';
import { readlink, rm } from 'node:fs/promises';
import { join } from 'node:path';
import * as z from 'zod';
import { StartError } from '../shared/errors.ts';
import { parseJoinToken } from '../shared/join-token.ts';
import { quoteForShell } from '../shared/quote-for-shell.ts';
import { readIdentity } from '../shared/read-agent-identity.ts';
import {
  flag,
  givenSettings,
  type Invocation,
  readSettings,
  type Settings,
} from '../shared/read-settings.ts';
import type { Verb } from '../shared/run-service-program.ts';
import { needSystemd, noService, type State } from '../shared/systemd/control.ts';
import { dataOf, type Service, uninstall } from '../shared/systemd/install.ts';
import {
  installCommand,
  type Plan,
  perform,
  say,
  statusCommand,
} from '../shared/systemd/install-and-status-commands.ts';
import { type LinkState, linkIn } from '../shared/systemd/link-status-text.ts';
import { checkRoots } from './files/index.ts';
import { readTokenFile } from './join-or-load-identity.ts';
import { agentSettings, serviceSettings } from './settings-schema.ts';
import { upgradeDirectory } from './upgrade/files-shared-with-root.ts';
import { planUpgradeUnit } from './upgrade/plan-upgrade-unit-and-key.ts';

const agent: Service = {
  name: 'farhand-agent',
  home: '/home/farhand-agent',
  helper: { name: 'farhand-agent-upgrade', directory: upgradeDirectory },
  settled: isLinked,
};
const tokenFile = join(dataOf(agent), 'join-token');

const installSettings = {
  ...agentSettings,
  ...serviceSettings,
  trust_key: {
    schema: z.string().optional(),
    value: 'FILE',
    help: 'PEM file with the public key that verifies the packages for upgrades by the broker',
    flagOnly: true,
  },
};

const uninstallSettings = {
  keep_data: { schema: flag, help: 'keep the identity, settings and account of the agent', flagOnly: true },
  help: agentSettings.help,
};

/** Runs a verb and prints what it did. Returns the exit code. `command`: the command line of this program. */
export async function service(verb: Verb, from: Invocation, command: readonly string[]): Promise<number> {
  const commands = {
    install: {
      purpose: 'installs the agent as a systemd service, or changes its settings',
      settings: installSettings,
      run: (invocation: Invocation) => installAgent(invocation, command),
    },
    status: statusCommand(
      agent,
      (found) => {
        const { broker = null, machineId = null } = linkIn(found.status) ?? {};
        return { broker, machine_id: machineId, linked: isLinked(found) };
      },
      'farhand-agent doctor --broker HOST:PORT --data-dir DIR checks an agent started by hand',
    ),
    uninstall: {
      purpose: 'stops the service and removes its data, settings and account',
      settings: uninstallSettings,
      run: uninstallAgent,
    },
  };
  return await perform(agent, verb, commands, from);
}

function isLinked({ active, status }: State): boolean {
  return active === 'active' && linkIn(status)?.machineId !== undefined;
}

async function installAgent(from: Invocation, command: readonly string[]): Promise<number> {
  const { settled, user, log, status, settings } = await installCommand(
    agent,
    installSettings,
    from,
    command,
    (settings, given) => planAgent(settings, given, command),
  );
  if (user === 'root')
    say('The agent runs as root: every API key that may run commands can run them as root on this machine.');
  const warning =
    'broker' in givenSettings(installSettings, from) && unusedBroker(linkIn(status), settings.broker);
  if (warning) process.stderr.write(`${agent.name}: ${warning}\n`);
  if (settled) return 0;
  say(
    'The agent is not linked to the broker yet; it goes on trying. Its last log lines:',
    ...log.map((line) => `  ${line}`),
  );
  return 1;
}

/** Returns a warning if the agent is linked to another address than those of --broker; undefined otherwise. */
export function unusedBroker(link: LinkState | undefined, given: readonly string[]): string | undefined {
  if (!link?.machineId || given.includes(link.broker)) return undefined;
  return `--broker ${given.join(', ')} is not in use: the agent is linked to ${link.broker}, an address that it got from a broker; check that --broker is right`;
}

async function planAgent(
  settings: Settings<typeof installSettings>,
  { join_token: _, ...given }: Record<string, unknown>,
  command: readonly string[],
): Promise<Plan> {
  const token = await tokenOf(settings);
  const flags = { ...given, broker: settings.broker, join_token_file: settings.join_token_file ?? 'FILE' };
  needSystemd('install', true, `start the agent without a service: ${agent.name}${flagsByHand(flags)}`);
  await checkRoots(settings.root);
  await checkMachine(token);
  const { user = agent.name, allow_sudo } = settings;
  const isRoot = user === 'root';
  const helper = await planUpgradeUnit(command, settings.trust_key);
  return {
    user,
    hidden: isRoot ? [] : ['/root'],
    blocks: [...(isRoot ? ['root'] : []), ...(isRoot || allow_sudo ? [] : ['locked'])],
    // The token itself is stored in a file of its own, which the agent removes after use.
    stored: { ...given, user, join_token_file: tokenFile },
    secret: { file: tokenFile, text: token || undefined },
    ...(helper && { helper }),
  };
}

/** Returns the flags of a command line that starts the agent by hand. Leaves out flags that only `install` has. */
function flagsByHand(values: Record<string, unknown>): string {
  return Object.keys(agentSettings)
    .filter((name) => values[name] !== undefined && !(name in serviceSettings))
    .map((name) => ` --${name.replaceAll('_', '-')} ${quoteForShell([values[name]].flat().join(','))}`)
    .join('');
}

/** Returns the join token; empty if the settings contain none. Throws StartError if the token is invalid. */
async function tokenOf({ join_token, join_token_file }: Settings<typeof installSettings>): Promise<string> {
  // The service's own token file is skipped: an earlier install wrote it, and it may be missing, because the agent
  // removes it after joining.
  const file = join_token_file === tokenFile ? undefined : join_token_file;
  const token = (join_token || (file && (await readTokenFile(file))) || '').trim();
  if (token) parseJoinToken(token);
  return token;
}

/**
 * Throws StartError if the machine has not joined a broker and has no join token. Also throws if the token is from
 * another broker than the one that the machine has joined.
 */
async function checkMachine(token: string): Promise<void> {
  const machine = await readIdentity(dataOf(agent));
  if (!machine?.machine_id && !token && !existsSync(tokenFile)) {
    throw new StartError(
      'this machine has not joined a broker yet; pass a join token by --join-token-file FILE or FARHAND_JOIN_TOKEN',
    );
  }
  if (!machine?.machine_id || machine.removed || !token) return;
  if (parseJoinToken(token).fingerprint === machine.fingerprint) return;
  throw new StartError(
    `this machine has joined another broker than that of the join token; to join the token’s broker, run ${agent.name} uninstall first`,
  );
}

async function uninstallAgent(from: Invocation): Promise<number> {
  const { keep_data } = readSettings(uninstallSettings, from);
  needSystemd('uninstall', true, noService);
  const machine = await readIdentity(dataOf(agent)).catch(() => undefined);
  try {
    await uninstall(agent, keep_data);
  } finally {
    // The program is removed even if uninstall() failed, for example because the account still has a process.
    await removeProgram();
    if (machine?.machine_id && !machine.removed && !keep_data)
      say(
        `The broker still lists this machine; remove it there: farhand machines remove ${machine.machine_id}`,
      );
  }
  // A program that a package manager installed is not removed here. The package manager removes it.
  const rest = `; its data, settings and account are removed${existsSync(import.meta.filename) ? ', but not the program itself' : ''}`;
  say(`${agent.name} is uninstalled${keep_data ? '; its data, settings and account stay' : rest}.`);
  return 0;
}

/** Removes the program files that install.sh has installed. */
async function removeProgram(): Promise<void> {
  const [place, link] = [`/opt/${agent.name}`, `/usr/local/bin/${agent.name}`];
  const target = await readlink(link).catch(() => '');
  if (target.startsWith(`${place}/`)) await rm(link, { force: true });
  await rm(place, { recursive: true, force: true });
}
