// farhand doctor: what is wrong with a broker or the way to it, and how it is mended. On an agent's machine: farhand-agent doctor.
import type { Command } from 'commander';
import { type Finding, fail, mendText, ok, reason } from '../../../shared/doctor/finding.ts';
import { nodeIsGood, wrongNode } from '../../../shared/program.ts';
import { printTable, say } from '../output.ts';
import { type Common, verb } from '../verb.ts';
import { type Where, where } from '../where.ts';
import { examineBrokerBox } from './box.ts';
import { examineBroker } from './broker.ts';

export function addDoctor(program: Command): void {
  verb(
    program,
    'doctor',
    'what is wrong with a broker or the way to it, and how to mend it; ends with 1 where something is',
    'farhand doctor',
    'farhand doctor --data-dir /var/lib/farhand-broker',
    'farhand-agent doctor                                  on the machine of an agent',
  ).action(doctor);
}

async function doctor({ dataDir, output }: Common): Promise<void> {
  const findings = [node(), ...(await examine(dataDir))];
  await printTable(output, findings, {
    state: ({ state }) => state,
    check: ({ check }) => check,
    finding: ({ what }) => what,
  });
  if (output === 'text') say(mendText(findings));
  if (findings.some(({ state }) => state === 'fail')) process.exitCode = 1;
}

async function examine(dataDir?: string): Promise<Finding[]> {
  const here = dataDir === undefined ? [] : await examineBrokerBox(dataDir);
  const place = placeOf();
  if ('check' in place) return [...here, place];
  // On a box of its own nobody need have a key.
  const asked = place.url !== undefined || dataDir === undefined;
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
