// farhand-agent doctor: what is wrong with the agent of this machine or its way to the broker, and how it is mended.
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { clean } from '../shared/clean.ts';
import { examineDirectory } from '../shared/doctor/directory.ts';
import { type Finding, fail, mendText, ok, reason } from '../shared/doctor/finding.ts';
import { hostPortOf, reachBroker } from '../shared/doctor/reach.ts';
import { unitState } from '../shared/doctor/unit.ts';
import { StartError } from '../shared/errors.ts';
import { helpText, type Invocation, readSettings } from '../shared/settings.ts';
import { settingsOf } from '../shared/systemd/install.ts';
import { type AgentSettings, agentSettings } from './config.ts';
import { machineIn } from './identity.ts';
import { clockFault } from './link/said.ts';

const name = 'farhand-agent';

/** What to print, and the exit code: 1 where something is wrong. */
export async function doctor({ argv, env }: Invocation): Promise<{ text: string; code: number }> {
  if (argv.includes('--help')) {
    const purpose =
      'what is wrong with this machine’s agent, and how to mend it; exits with 1 where something is';
    return { text: helpText(`${name} doctor`, purpose, agentSettings), code: 0 };
  }
  // Those of the service, unless others are named.
  const installed = existsSync(settingsOf({ name })) && !argv.includes('--config');
  const settings = readSettings(agentSettings, {
    argv: installed ? ['--config', settingsOf({ name }), ...argv] : argv,
    env,
  });
  const findings = await examine(settings);
  const width = Math.max(...findings.map(({ check }) => check.length));
  const lines = findings.map(
    ({ state, check, what }) => `${state.padEnd(4)}  ${check.padEnd(width)}  ${clean(what)}`,
  );
  const failed = findings.some(({ state }) => state === 'fail');
  return { text: `${lines.join('\n')}\n${mendText(findings)}\n`, code: failed ? 1 : 0 };
}

async function examine({ data_dir, broker }: AgentSettings): Promise<Finding[]> {
  const directory = await examineDirectory(data_dir, ['identity.json']);
  if (directory.some(({ state }) => state === 'fail')) return directory;
  return [...directory, ...(await joined(data_dir, broker)), ...(await unitState(name))];
}

const joinAnew = 'farhand join-tokens create, then farhand-agent --join-token-file FILE --broker HOST:PORT';

async function joined(dataDir: string, broker: string): Promise<Finding[]> {
  try {
    const machine = await machineIn(dataDir);
    if (!machine) return [fail('identity', `there is none in ${join(dataDir, 'identity.json')}`, joinAnew)];
    if (machine.removed)
      return [fail('identity', `${machine.machineId} was removed at the broker`, joinAnew)];
    return [ok('identity', machine.machineId), await reached(broker, machine.caCertificate)];
  } catch (error) {
    if (!(error instanceof StartError)) throw error;
    return [fail('identity', error.message, joinAnew)];
  }
}

async function reached(broker: string, ca: string): Promise<Finding> {
  const { host = '', port = 0 } = hostPortOf(broker) ?? {};
  try {
    await reachBroker(host, port, ca);
    return ok('broker', `${broker} answers, and is the one that this machine has joined`);
  } catch (error) {
    const why = reason(error);
    const mend = /certificate|self.signed|issuer|verify/i.test(why)
      ? 'another broker is there now: join it with another --data-dir and a new token'
      : 'does the broker run, is its port open to this machine?';
    const fault = clockFault(why);
    return fault
      ? fail('clock', fault, 'timedatectl set-ntp true, or set it by hand')
      : fail('broker', `${broker}: ${why}`, mend);
  }
}
