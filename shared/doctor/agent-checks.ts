// The checks of `farhand-agent doctor`: data directory, identity, connection to the broker, and service.
import { existsSync } from 'node:fs';
import { clockFault } from '../certificate-clock-error.ts';
import { StartError } from '../errors.ts';
import { identityFile, readIdentity } from '../read-agent-identity.ts';
import { hostPort } from '../read-settings.ts';
import { dataOf, unitOf } from '../systemd/install.ts';
import { type Finding, fail, ok, reason } from './check-result.ts';
import { examineDirectory } from './directory-checks.ts';
import { reachBroker } from './reachable-port.ts';
import { unitState } from './service-check.ts';

/**
 * Checks the data directory of an agent. If the directory is usable, also checks the identity, the connection to each
 * broker and the service. `brokers`: HOST:PORT of each broker.
 */
export async function examineAgent(dataDir: string, brokers: readonly string[]): Promise<Finding[]> {
  const directory = await examineDirectory(dataDir, ['identity.json']);
  if (directory.some(({ state }) => state === 'fail')) return directory;
  const unit = await unitState(agent.name, 'its configuration is wrong, or the machine was removed');
  return [...directory, ...(await joined(dataDir, brokers)), ...unit];
}

const agent = { name: 'farhand-agent' };

/** True if the directory is the data directory of an agent that is installed as a service. */
const isOfService = (dataDir: string): boolean => dataDir === dataOf(agent) && existsSync(unitOf(agent));

/** Returns how to join a broker. A service joins by `install`, because its own account owns the data directory. */
export function joinAdvice(isService: boolean): string {
  const how = isService
    ? 'sudo farhand-agent install --join-token-file FILE'
    : 'farhand-agent --join-token-file FILE --broker HOST:PORT';
  return `run farhand join-tokens create, store the token in FILE, then run ${how}`;
}

async function joined(dataDir: string, brokers: readonly string[]): Promise<Finding[]> {
  const joinAnew = joinAdvice(isOfService(dataDir));
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
      ? fail('clock', fault, 'run timedatectl set-ntp true, or set the clock by hand')
      : fail('broker', `${broker}: ${why}`, mend);
  }
}
