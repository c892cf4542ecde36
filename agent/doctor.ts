// farhand-agent doctor: finds problems of the agent and its connection to the broker, and says how to fix
// them.
import { examineAgent } from '../shared/doctor/agent-checks.ts';
import { formatFindings } from '../shared/doctor/check-result.ts';
import { outputFormat } from '../shared/doctor/output-setting.ts';
import { helpText, type Invocation, readSettings } from '../shared/read-settings.ts';
import { withSettingsOf } from '../shared/systemd/install.ts';
import { agentSettings } from './settings-schema.ts';
import { examineUpgrades } from './upgrade/checks-for-doctor.ts';

const name = 'farhand-agent';
const table = { ...agentSettings, ...outputFormat };

/** Returns the text to print and the exit code, which is 1 if a problem was found. */
export async function doctor({ argv, env }: Invocation): Promise<{ text: string; code: number }> {
  if (argv.includes('--help')) {
    const purpose =
      'checks this machine’s agent and says how to fix what is wrong; exits with 1 if a check fails';
    return { text: helpText(`${name} doctor`, purpose, table), code: 0 };
  }
  // Uses the settings of the installed service unless --config is given.
  const settings = readSettings(table, { argv: withSettingsOf(name, argv), env });
  const findings = await examineAgent(settings.data_dir, settings.broker);
  return formatFindings([...findings, ...examineUpgrades(settings)], settings.output);
}
