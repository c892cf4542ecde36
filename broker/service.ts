// farhand-broker install, status, uninstall: the broker as a service of systemd.
import { StartError, UsageError } from '../shared/errors.ts';
import { flag, type Invocation, parseSettings, readSettings, settingsText } from '../shared/settings.ts';
import { dataOf, install, needSystemd, settingsOf, uninstall, unitText } from '../shared/systemd/index.ts';
import { gathered, perform, say, statusOf } from '../shared/systemd/service.ts';
import type { Verb } from '../shared/systemd/verbs.ts';
import { type BrokerSettings, brokerSettings } from './config.ts';

const broker = { name: 'farhand-broker' };

const uninstallSettings = {
  yes: { schema: flag, help: 'really: no agent can be reached any more', flagOnly: true },
  purge: { schema: flag, help: 'delete its data, settings and account as well', flagOnly: true },
  help: brokerSettings.help,
};

/** Does it and says so; the result is the exit code. `command`: this very program. */
export async function service(verb: Verb, from: Invocation, command: readonly string[]): Promise<number> {
  const deeds = {
    install: {
      purpose: 'makes the broker a service of systemd, or changes the settings of one',
      settings: brokerSettings,
      run: (told: Invocation) => installBroker(told, command),
    },
    status: statusOf(broker, ({ active }) => active === 'active'),
    uninstall: {
      purpose: 'stops the service and takes it away; its data stays unless --purge is said',
      settings: uninstallSettings,
      run: uninstallBroker,
    },
  };
  return await perform(broker, verb, deeds, from);
}

async function uninstallBroker(from: Invocation): Promise<number> {
  const { yes, purge } = readSettings(uninstallSettings, from);
  const loss = purge ? ` and deletes ${dataOf(broker)}, which no backup of ours keeps` : '';
  if (!yes) throw new UsageError(`this stops the broker of all its agents${loss}: say --yes`);
  await uninstall(broker, !purge);
  const kept = `; ${dataOf(broker)}, its settings and its account are kept`;
  say(`${broker.name} is uninstalled${purge ? ', and nothing is left but the program itself' : kept}.`);
  return 0;
}

async function installBroker(from: Invocation, command: readonly string[]): Promise<number> {
  const given = gathered(broker, brokerSettings, from);
  const settings = parseSettings(brokerSettings, given);
  if (settings.data_dir !== dataOf(broker)) {
    throw new StartError(`--data-dir: as a service the broker keeps its data in ${dataOf(broker)}`);
  }
  if (settings.local || settings.new_history || settings.old_history || settings.accept_state) {
    throw new StartError(
      '--local, --new-history, --old-history and --accept-state are for one start by hand, not for a service',
    );
  }
  needSystemd('install', true);
  const words = [...command, '--config', settingsOf(broker)];
  const found = await install(broker, {
    user: broker.name,
    command: words,
    // ProtectHome of its unit.
    hidden: ['/home', '/root', '/run/user'],
    unit: (systemd) => brokerUnit({ command: words, lowPort: hasLowPort(settings), systemd }),
    settings: settingsText(brokerSettings, { ...given, data_dir: dataOf(broker) }),
    settled: ({ status }) => status !== '',
  });
  say(
    `${broker.name} is installed and runs: ${found.status}.`,
    `Settings: ${settingsOf(broker)}. Its log: journalctl -u ${broker.name}. How it is: ${broker.name} status.`,
    `A first key: farhand auth create-key --data-dir ${dataOf(broker)} --name me`,
  );
  return 0;
}

const hasLowPort = ({ http, grpc }: BrokerSettings): boolean =>
  [http, grpc].some(({ port }) => port > 0 && port < 1024);

interface BrokerUnit {
  command: readonly string[];
  /** It listens where only root may, unless told otherwise. */
  lowPort: boolean;
  systemd: number;
}

/** Everything that a program needs not which talks to networks and writes below one directory. */
const locks = [
  'NoNewPrivileges=yes',
  'ProtectSystem=strict',
  'ProtectHome=yes',
  'ProtectProc=invisible',
  'ProcSubset=pid',
  'PrivateTmp=yes',
  'PrivateDevices=yes',
  'PrivateIPC=yes',
  'PrivateMounts=yes',
  'DevicePolicy=closed',
  'ProtectKernelTunables=yes',
  'ProtectKernelModules=yes',
  'ProtectKernelLogs=yes',
  'ProtectControlGroups=yes',
  'ProtectClock=yes',
  'ProtectHostname=yes',
  'RestrictNamespaces=yes',
  'RestrictRealtime=yes',
  'RestrictSUIDSGID=yes',
  'RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6',
  'LockPersonality=yes',
  'RemoveIPC=yes',
  'KeyringMode=private',
  'SystemCallArchitectures=native',
  'SystemCallErrorNumber=EPERM',
  'SystemCallFilter=@system-service',
  'SystemCallFilter=~@privileged @resources',
  'UMask=0077',
  '# MemoryDenyWriteExecute is left out: a JavaScript engine writes code that it runs.',
];
const lowPortLines = [
  'CapabilityBoundingSet=CAP_NET_BIND_SERVICE',
  'AmbientCapabilities=CAP_NET_BIND_SERVICE',
];

/** The broker's unit. */
export function brokerUnit({ command, lowPort, systemd }: BrokerUnit): string {
  const rights = lowPort ? lowPortLines : ['CapabilityBoundingSet=', 'PrivateUsers=yes'];
  return unitText({
    description: 'Farhand broker',
    command,
    user: broker.name,
    state: broker.name,
    systemd,
    // By a child of the broker, which has no others.
    lines: ['NotifyAccess=all', ...rights, ...locks],
  });
}
