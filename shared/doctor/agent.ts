// Checks an agent on its own machine: its data directory, identity, connection to the broker, and service.
import { clockFault } from '../clock-fault.ts';
import { StartError } from '../errors.ts';
import { identityFile, readIdentity } from '../identity-file.ts';
import { examineDirectory } from './directory.ts';
import { type Finding, fail, ok, reason } from './finding.ts';
import { hostPortOf, reachBroker } from './reachable-port.ts';
import { unitState } from './service-state.ts';

/**
 * Runs all checks of an agent; stops after those of the data directory if one of them fails. `broker`:
 * HOST:PORT.
 */
export async function examineAgent(dataDir: string, broker: string | undefined): Promise<Finding[]> {
  const directory = await examineDirectory(dataDir, ['identity.json']);
  if (directory.some(({ state }) => state === 'fail')) return directory;
  return [...directory, ...(await joined(dataDir, broker)), ...(await unitState('farhand-agent'))];
}

const joinAnew = 'farhand join-tokens create, then farhand-agent --join-token-file FILE --broker HOST:PORT';

async function joined(dataDir: string, broker: string | undefined): Promise<Finding[]> {
  try {
    const machine = await readIdentity(dataDir);
    if (!machine?.machine_id)
      return [fail('identity', `there is none in ${identityFile(dataDir)}`, joinAnew)];
    if (machine.removed)
      return [fail('identity', `${machine.machine_id} was removed at the broker`, joinAnew)];
    const found = ok('identity', machine.machine_id);
    return broker ? [found, await reached(broker, machine.ca_certificate)] : [found];
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
