// farhand doctor: what is wrong with a broker, an agent or the way to them, and how it is mended.
import type { Command } from 'commander';
import { nodeIsGood, wrongNode } from '../../../shared/program.ts';
import { printTable, say } from '../output.ts';
import { type Common, verb } from '../verb.ts';
import { type Where, where } from '../where.ts';
import { examineAgentBox, examineBrokerBox } from './box.ts';
import { examineBroker } from './broker.ts';
import { type Finding, fail, ok, reason } from './finding.ts';

interface DoctorOptions extends Common {
  agentDataDir?: string;
  broker?: string;
}

export function addDoctor(program: Command): void {
  verb(
    program,
    'doctor',
    'what is wrong with a broker or an agent, and how to mend it; ends with 1 where something is',
    'farhand doctor',
    'farhand doctor --data-dir /var/lib/farhand-broker',
    'farhand doctor --agent-data-dir /var/lib/farhand-agent --broker farhand.example.org:8421',
  )
    .option('--agent-data-dir <dir>', 'an agent’s data directory, on its own machine')
    .option('--broker <host:port>', 'where that agent dials')
    .action(doctor);
}

async function doctor({ dataDir, agentDataDir, broker, output }: DoctorOptions): Promise<void> {
  const findings = [node(), ...(await examine(dataDir, agentDataDir, broker))];
  await printTable(output, findings, {
    state: ({ state }) => state,
    check: ({ check }) => check,
    finding: ({ what }) => what,
  });
  if (output === 'text') tell(findings.filter(({ mend }) => mend !== undefined));
  if (findings.some(({ state }) => state === 'fail')) process.exitCode = 1;
}

function tell(ill: Finding[]): void {
  const lines = ill.map(({ check, mend }) => `  ${check}: ${mend}`);
  say(ill.length === 0 ? '\nAll is well.' : ['', 'To mend:', ...lines].join('\n'));
}

async function examine(dataDir?: string, agentDataDir?: string, broker?: string): Promise<Finding[]> {
  const here = dataDir === undefined ? [] : await examineBrokerBox(dataDir);
  const agent =
    agentDataDir === undefined
      ? []
      : await examineAgentBox(agentDataDir, broker ?? process.env.FARHAND_BROKER);
  const place = placeOf();
  if ('check' in place) return [...here, ...agent, place];
  // On a box of its own nobody need have a key.
  const asked = place.url !== undefined || (dataDir === undefined && agentDataDir === undefined);
  return [...here, ...agent, ...(asked ? await examineBroker(place) : [])];
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
