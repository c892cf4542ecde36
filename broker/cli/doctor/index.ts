// farhand doctor: what is wrong with a broker or the way to it, and how it is mended. On an agent's machine: farhand-agent doctor.
import { type Command, Option } from 'commander';
import { examineAgent } from '../../../shared/doctor/agent.ts';
import { type Finding, fail, mendText, ok, reason } from '../../../shared/doctor/finding.ts';
import { nodeIsGood, wrongNode } from '../../../shared/program.ts';
import { printTable, say } from '../output.ts';
import { type Common, verb } from '../verb.ts';
import { type Where, where } from '../where.ts';
import { examineBrokerBox } from './box.ts';
import { examineBroker } from './broker.ts';

interface DoctorOptions extends Common {
  agentDataDir?: string;
  broker?: string;
}

export function addDoctor(program: Command): void {
  verb(
    program,
    'doctor',
    'what is wrong with a broker or the way to it, and how to mend it; ends with 1 where something is',
    'farhand doctor',
    'farhand doctor --data-dir /var/lib/farhand-broker',
    'farhand-agent doctor                                  on the machine of an agent',
  )
    // As of 0.1.0; on an agent's machine there is farhand-agent doctor.
    .addOption(new Option('--agent-data-dir <dir>').hideHelp())
    .addOption(new Option('--broker <host:port>').hideHelp())
    .action(doctor);
}

async function doctor({ dataDir, agentDataDir, broker, output }: DoctorOptions): Promise<void> {
  const agent =
    agentDataDir === undefined ? [] : await examineAgent(agentDataDir, broker ?? process.env.FARHAND_BROKER);
  const findings = [node(), ...agent, ...(await examine(dataDir, agent.length === 0))];
  await printTable(output, findings, {
    state: ({ state }) => state,
    check: ({ check }) => check,
    finding: ({ what }) => what,
  });
  if (output === 'text') say(mendText(findings));
  if (findings.some(({ state }) => state === 'fail')) process.exitCode = 1;
}

/** `asks`: with neither a directory nor an address it is a login that is missing. */
async function examine(dataDir: string | undefined, asks: boolean): Promise<Finding[]> {
  const here = dataDir === undefined ? [] : await examineBrokerBox(dataDir);
  const place = placeOf();
  if ('check' in place) return [...here, place];
  // On a box of its own nobody need have a key.
  const asked = place.url !== undefined || (dataDir === undefined && asks);
  return [...here, ...(asked ? await examineBroker(place) : [])];
}

function placeOf(): Where | Finding {
  try {
    return where({});
  } catch (error) {
    return fail('login', reason(error), 'farhand login');
  }
}

function node(): Finding {
  return nodeIsGood(process.version) ? ok('node', process.version) : fail('node', process.version, wrongNode);
}
