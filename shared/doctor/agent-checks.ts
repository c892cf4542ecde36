// The checks of `farhand-agent doctor`: data directory, identity, connection to the broker, and service.
import { existsSync } from 'node:fs';
import { clockFault } from '../certificate-clock-error.ts';
import { StartError } from '../errors.ts';
import { identityFile, readIdentity } from '../identity-file.ts';
import { hostPort } from '../read-settings.ts';
import { clean } from '../sanitize-text.ts';
import { stateOf } from '../systemd/control.ts';
import { type Finding, fail, ok, reason, warn } from './check-result.ts';
import { examineDirectory } from './directory-checks.ts';
import { reachBroker } from './reachable-port.ts';

/**
 * Checks the data directory of an agent. If the directory is usable, also checks the identity, the connection to each
 * broker and the service. `brokers`: HOST:PORT of each broker.
 */
export async function examineAgent(dataDir: string, brokers: readonly string[]): Promise<Finding[]> {
  const directory = await examineDirectory(dataDir, ['identity.json']);
  if (directory.some(({ state }) => state === 'fail')) return directory;
  return [...directory, ...(await joined(dataDir, brokers)), ...(await unitState('farhand-agent'))];
}

const joinAnew = 'farhand join-tokens create, then farhand-agent --join-token-file FILE --broker HOST:PORT';

async function joined(dataDir: string, brokers: readonly string[]): Promise<Finding[]> {
  try {
    const machine = await readIdentity(dataDir);
    if (!machine?.machine_id)
      return [fail('identity', `this machine has not joined a broker (${identityFile(dataDir)})`, joinAnew)];
    if (machine.removed)
      return [fail('identity', `${machine.machine_id} was removed from the broker`, joinAnew)];
    const found = ok('identity', machine.machine_id);
    return [found, ...(await Promise.all(brokers.map((broker) => reached(broker, machine.ca_certificate))))];
  } catch (error) {
    if (!(error instanceof StartError)) throw error;
    return [fail('identity', error.message, joinAnew)];
  }
}

async function reached(broker: string, ca: string): Promise<Finding> {
  const { host = '', port = 0 } = hostPort.safeParse(broker).data ?? {};
  try {
    await reachBroker(host, port, ca);
    return ok('broker', `${broker} answers, and is the broker that this machine has joined`);
  } catch (error) {
    const why = reason(error);
    const mend = /certificate|self.signed|issuer|verify/i.test(why)
      ? 'another broker uses this address; to join that broker, use another --data-dir and a new join token'
      : 'check that the broker runs and that firewalls let this machine connect to its port';
    const fault = clockFault(why);
    return fault
      ? fail('clock', fault, 'timedatectl set-ntp true, or set the clock by hand')
      : fail('broker', `${broker}: ${why}`, mend);
  }
}

/** Checks the state of a Farhand service in systemd. Returns no finding on a machine without systemd. */
export async function unitState(name: string): Promise<Finding[]> {
  // systemd makes this directory when it boots a machine (sd_booted(3)).
  if (!existsSync('/run/systemd/system')) return [];
  const state = await stateOf(name).catch(() => undefined);
  if (!state)
    return [warn('service', 'systemctl does not answer', `run systemctl status ${name} to see why`)];
  const { installed, active, status, exitStatus, result } = state;
  if (!installed) return [warn('service', `${name} is not installed`, `${name} install`)];
  const what = clean([`${name} is ${active}`, status].filter(Boolean).join(': '));
  if (active === 'active') return [ok('service', what)];
  const why = exitStatus === 78 ? 'its configuration is wrong, or the machine was removed' : result;
  return [fail('service', `${what}: ${why}`, `see journalctl -u ${name} -n 50`)];
}
