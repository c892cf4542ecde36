// The verbs farhand-broker install, status and uninstall, which manage the broker as a systemd service.
import { hostname } from 'node:os';
import { StartError, UsageError } from '../shared/errors.ts';
import { isLoopback } from '../shared/loopback.ts';
import { flag, type Invocation, readSettings } from '../shared/read-settings.ts';
import type { Verb } from '../shared/run-service-program.ts';
import { needSystemd } from '../shared/systemd/control.ts';
import { dataOf, type Service, uninstall } from '../shared/systemd/install.ts';
import {
  installCommand,
  type Plan,
  perform,
  say,
  statusCommand,
} from '../shared/systemd/install-and-status-commands.ts';
import { withSocket } from './cli/call-or-start-local-broker.ts';
import { type BrokerSettings, brokerSettings } from './settings-schema.ts';

/**
 * Maximum number of milliseconds that `install` waits for the answers of the installed broker. If the broker does not
 * answer in time, `install` prints the same next steps as for a broker without keys.
 */
const answerMs = 5_000;

const broker: Service = {
  name: 'farhand-broker',
  settled: ({ active, status }) => active === 'active' && status !== '',
};

const uninstallSettings = {
  yes: { schema: flag, help: 'uninstall although this disconnects all agents', flagOnly: true },
  purge: { schema: flag, help: 'also delete the broker’s data, settings and account', flagOnly: true },
  help: brokerSettings.help,
};

/** Runs a verb and prints its result. Returns the exit code. `command` is the command line of this program. */
export async function service(verb: Verb, from: Invocation, command: readonly string[]): Promise<number> {
  const commands = {
    install: {
      purpose: 'installs the broker as a systemd service, or changes its settings',
      settings: brokerSettings,
      run: (invocation: Invocation) => installBroker(invocation, command),
    },
    status: statusCommand(broker),
    uninstall: {
      purpose: 'stops the service and removes it; the broker’s data stays unless --purge is given',
      settings: uninstallSettings,
      run: uninstallBroker,
    },
  };
  return await perform(broker, verb, commands, from);
}

async function installBroker(from: Invocation, command: readonly string[]): Promise<number> {
  const { settings, status } = await installCommand(broker, brokerSettings, from, command, planBroker);
  const url = settings.public_url ?? /^REST on (\S+),/.exec(status)?.[1] ?? '';
  const answer = { signal: AbortSignal.timeout(answerMs) };
  const found = await withSocket(
    dataOf(broker),
    async (client) => ({
      keys: (await client.keys.list({ limit: 1 }, answer)).total,
      pin: (await client.service.info({}, answer)).tls_pin,
    }),
    { mustRun: true },
  ).catch(() => undefined);
  const login = loginLine(url, found?.pin);
  if (found && found.keys > 0) say(`The broker’s API keys stay valid. To log in with one: ${login}`);
  else
    say(
      `Next, create a first API key: farhand auth create-key --data-dir ${dataOf(broker)} --name me`,
      `Then log in with this key: ${login}`,
    );
  return 0;
}

async function planBroker(settings: BrokerSettings, given: Record<string, unknown>): Promise<Plan> {
  if (settings.local || settings.new_history || settings.old_history || settings.accept_state) {
    throw new StartError(
      '--local, --new-history, --old-history and --accept-state are for a single start by hand, not for a service: leave them out',
    );
  }
  needSystemd('install', true);
  return {
    user: broker.name,
    // Directories that ProtectHome in the unit file hides.
    hidden: ['/home', '/root', '/run/user'],
    blocks: hasLowPort(settings) ? ['low-port'] : [],
    stored: given,
  };
}

/** True if a port is below 1024, which needs root by default. */
const hasLowPort = ({ http, grpc }: BrokerSettings): boolean =>
  [http, grpc].some(({ port }) => port > 0 && port < 1024);

/** Returns the command that logs in to this broker. Set `pin` if the broker's own CA issued the certificate. */
function loginLine(url: string, pin: string | null | undefined): string {
  const reached = url.replace(/\/\/(0\.0\.0\.0|\[::\])(?=:|$)/, `//${hostname()}`);
  const isClear = reached.startsWith('http:') && !isLoopback(new URL(reached).hostname);
  return [
    'farhand login',
    reached,
    ...(pin ? [`--pin ${pin}`] : []),
    ...(isClear ? ['--insecure'] : []),
  ].join(' ');
}

async function uninstallBroker(from: Invocation): Promise<number> {
  const { yes, purge } = readSettings(uninstallSettings, from);
  const loss = purge ? ` and deletes ${dataOf(broker)} without a backup` : '';
  if (!yes) throw new UsageError(`uninstall disconnects all agents${loss}; add --yes to confirm`);
  await uninstall(broker, !purge);
  const stays = `; ${dataOf(broker)}, the broker’s settings and its account stay`;
  say(`${broker.name} is uninstalled${purge ? ', and only the program itself is left' : stays}.`);
  return 0;
}
