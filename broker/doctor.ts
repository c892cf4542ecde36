// farhand-broker doctor: finds problems of the broker's data directory and database, and says how to fix them.
import { dirname } from 'node:path';
import { brokerUnit, uncheckedDatabase } from '../shared/doctor/broker-service-checks.ts';
import { formatFindings } from '../shared/doctor/check-result.ts';
import { examineDirectory } from '../shared/doctor/directory-checks.ts';
import { outputFormat } from '../shared/doctor/output-setting.ts';
import { examineSigningKeys } from '../shared/doctor/stray-signing-keys.ts';
import { helpText, type Invocation, readSettings } from '../shared/read-settings.ts';
import { settingsOf, withSettingsOf } from '../shared/systemd/install.ts';
import { brokerSettings } from './settings-schema.ts';

const name = 'farhand-broker';
const { data_dir, database_url, database_password_file, config, help } = brokerSettings;

/** Returns the text to print and the exit code, which is 1 if a check failed. */
export async function doctor({ argv, env }: Invocation): Promise<{ text: string; code: number }> {
  if (argv.includes('--help')) {
    const purpose = 'checks the data directory and the database, and says how to fix what is wrong';
    const table = { data_dir, database_url, database_password_file, config, ...outputFormat, help };
    return { text: helpText(`${name} doctor`, purpose, table), code: 0 };
  }
  // Uses the settings of the installed service unless --config is given.
  const settings = readSettings(
    { ...brokerSettings, ...outputFormat },
    { argv: withSettingsOf(name, argv), env },
  );
  const stored = ['state.json', 'history.db', 'authority.json', 'rest-key.json', 'webhooks.key'];
  const findings = await examineDirectory(settings.data_dir, stored);
  if (settings.database_url === undefined) findings.push(...uncheckedDatabase(settings.data_dir));
  else {
    const { examineDatabase } = await import('./history/postgres-doctor-checks.ts');
    findings.push(
      ...(await examineDatabase({ ...settings, database_url: settings.database_url }, settings.data_dir)),
    );
  }
  const { config: file = settingsOf({ name }) } = settings;
  findings.push(await examineSigningKeys(settings.data_dir, dirname(file)));
  return formatFindings([...findings, ...(await brokerUnit())], settings.output);
}
