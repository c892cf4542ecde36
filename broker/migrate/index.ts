// The verb farhand-broker migrate: copies state and history from files to a PostgreSQL database, or back, while no
// broker runs.
import { z } from 'zod';
import { UsageError } from '../../shared/errors.ts';
import { createLogger, logLevels } from '../../shared/logger.ts';
import { helpText, type Invocation, readSettings } from '../../shared/read-settings.ts';
import { withSettingsOf } from '../../shared/systemd/install.ts';
import { brokerSettings } from '../settings-schema.ts';
import { type Copied, copyToDatabase, copyToFiles } from './copy-state-and-history.ts';

const name = 'farhand-broker';

const { data_dir, database_url, database_password_file, config, help } = brokerSettings;
const to = {
  schema: z
    .string()
    .regex(/^(files$|postgres(ql)?:\/\/)/, 'must be postgres://USER@HOST/DATABASE, or the word files')
    .optional(),
  value: 'URL|files',
  help: 'where to copy to: an empty database, or files in the data directory',
  flagOnly: true,
};
const log_level = { ...brokerSettings.log_level, schema: z.enum(logLevels).default('warn') };
/** Accepts all settings of the broker, because the file for --config may contain them. */
const settingsTable = { ...brokerSettings, log_level, to };
const helpTable = {
  to,
  data_dir,
  database_url: { ...database_url, help: 'PostgreSQL database to copy from, with --to files' },
  database_password_file: { ...database_password_file, help: 'file with the password of the database' },
  log_level,
  config,
  help,
};

/** Copies state and history to the target of --to. Prints the result and the next steps. `print` writes a line. */
export async function migrate({ argv, env }: Invocation, print: (line: string) => void): Promise<void> {
  if (argv.includes('--help')) {
    const purpose = 'copies state and history to PostgreSQL, or back to files, while no broker runs';
    return print(helpText(`${name} migrate`, purpose, helpTable).trimEnd());
  }
  const { to: target, ...given } = readSettings(settingsTable, { argv: withSettingsOf(name, argv), env });
  // The settings for several brokers are removed for two reasons. No other broker may use the data during the
  // migration. And a broker that stores its data in files refuses these settings.
  const settings = { ...given, peer_listen: undefined, peer_url: undefined };
  if (target === undefined)
    throw new UsageError('--to is missing: set it to postgres://USER@HOST/DATABASE, or to files');
  const log = createLogger(name, settings.log_level);
  const report = (table: string, rows: number): void => print(`${table}: ${rows}`);
  if (target === 'files') {
    if (settings.database_url === undefined)
      throw new UsageError(
        '--database-url is missing: set it to the database to copy from, postgres://USER@HOST/DATABASE',
      );
    const copied = await copyToFiles({ ...settings, database_url: settings.database_url }, report, log);
    print(summary(copied, settings.data_dir));
    print(
      'Next, remove database_url, database_password_file, peer_listen and peer_url from the settings of this broker, and start it. Then delete the database.',
    );
    return;
  }
  const copied = await copyToDatabase({ ...settings, database_url: target }, report, log);
  print(summary(copied, copied.database));
  print(`The former files are in ${copied.aside}.`);
  print(
    `Next, set database_url for the broker, and database_password_file if the password is in a file (a service has these settings in /etc/farhand/broker.toml). Start the broker. Then delete ${copied.aside}.`,
  );
}

function summary({ documents, rows, seconds }: Copied, where: string): string {
  return `Copied ${documents} documents and ${rows} rows to ${where} in ${seconds} s, and compared them.`;
}
