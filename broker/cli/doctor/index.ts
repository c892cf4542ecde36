// The verb farhand doctor: finds problems of a broker or of the connection to it. Agents have farhand-agent
// doctor.
import { join } from 'node:path';
import { type Command, Option } from 'commander';
import { examineAgent } from '../../../shared/doctor/agent-checks.ts';
import { brokerUnit, startAdvice, uncheckedDatabase } from '../../../shared/doctor/broker-service-checks.ts';
import { type Finding, fail, mendText, ok, reason, warn } from '../../../shared/doctor/check-result.ts';
import { examineDirectory } from '../../../shared/doctor/directory-checks.ts';
import { reachPort, reachSocketFile } from '../../../shared/doctor/reachable-port.ts';
import { examineSigningKeys } from '../../../shared/doctor/stray-signing-keys.ts';
import { nodeIsGood, wrongNode } from '../../../shared/program-start-and-end.ts';
import { words } from '../../../shared/read-settings.ts';
import { type Where, where } from '../connect-to-broker.ts';
import { type Common, localVerb } from '../declare-verb.ts';
import { cleanLines, print, table } from '../print.ts';
import { examineBroker } from './network-and-key-checks.ts';

type DoctorOptions = Common & { agentDataDir?: string; broker?: string };

export function addDoctor(program: Command): void {
  const spec = {
    about: 'find problems of a broker and of the connection to it; exit with 1 if a check fails',
    examples: [
      'farhand doctor',
      'farhand doctor --data-dir /var/lib/farhand-broker',
      'farhand-agent doctor                                  on the machine of an agent',
    ],
  };
  localVerb(program, 'doctor', spec, doctor)
    // In version 0.1.0 `farhand doctor` also checked agents. The options for agents still work, but are not in the
    // help.
    .addOption(new Option('--agent-data-dir <dir>').hideHelp())
    .addOption(new Option('--broker <host:port>').hideHelp());
}

async function doctor({ dataDir, agentDataDir, broker, output }: DoctorOptions): Promise<void> {
  const { version } = process;
  const findings = [nodeIsGood(version) ? ok('node', version) : fail('node', version, wrongNode)];
  if (agentDataDir !== undefined)
    findings.push(
      ...(await examineAgent(agentDataDir, words.parse(broker ?? process.env.FARHAND_BROKER ?? ''))),
    );
  if (dataDir !== undefined) findings.push(...(await examineDataDir(dataDir)));
  const place = configured();
  // `place` is a Finding if the settings are wrong, for example if the stored login is damaged. Otherwise the broker is
  // checked if one is configured, or if the user gave no data directory.
  if ('check' in place) findings.push(place);
  else if (place.url !== undefined || (dataDir === undefined && agentDataDir === undefined))
    findings.push(...(await examineBroker(place)));
  const columns = {
    state: ({ state }: Finding) => state,
    check: ({ check }: Finding) => check,
    finding: ({ what }: Finding) => what,
  };
  await print(
    output,
    findings,
    async () => `${await table(findings, columns)}\n${cleanLines(mendText(findings))}`,
  );
  if (findings.some(({ state }) => state === 'fail')) process.exitCode = 1;
}

function configured(): Where | Finding {
  try {
    return where({});
  } catch (error) {
    return fail('login', reason(error), 'farhand login');
  }
}

async function examineDataDir(dataDir: string): Promise<Finding[]> {
  const found = await examineDirectory(dataDir, ['state.json', 'history.db', 'authority.json']);
  if (found.some(({ state }) => state === 'fail')) return found;
  const unit = await brokerUnit();
  if (await answers(reachSocketFile(join(dataDir, 'broker.sock'))))
    found.push(ok('broker here', 'a broker runs with this directory'));
  else {
    const start = startAdvice(unit);
    found.push(warn('broker here', 'no broker runs with this directory', start), await freePorts());
  }
  return [...found, ...uncheckedDatabase(dataDir), await examineSigningKeys(dataDir), ...unit];
}

/** Checks the default ports, because a broker cannot start while they are in use. */
async function freePorts(): Promise<Finding> {
  const taken: number[] = [];
  for (const port of [8420, 8421]) if (await answers(reachPort('127.0.0.1', port))) taken.push(port);
  if (taken.length === 0) return ok('ports', '8420 and 8421 are free');
  const what = `another program listens on ${taken.join(' and ')}`;
  return warn(
    'ports',
    what,
    'stop that program (ss -ltnp shows it), or start the broker on other ports with --http and --grpc',
  );
}

const answers = (reached: Promise<void>): Promise<boolean> =>
  reached.then(
    () => true,
    () => false,
  );
