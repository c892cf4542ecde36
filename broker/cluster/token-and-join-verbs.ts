// The verbs `farhand-broker cluster token` and `cluster join`. They copy the certificate authority and keys of a broker
// to a new one, encrypted, through the database.
import { hkdfSync } from 'node:crypto';
import { existsSync } from 'node:fs';
import { readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { z } from 'zod';
import { refuseForeign, takeDirectory } from '../../shared/directory-lock.ts';
import { writeDurably } from '../../shared/durable-file.ts';
import { StartError, UsageError } from '../../shared/errors.ts';
import { newSecret } from '../../shared/ids-and-secrets.ts';
import { createLogger, logLevels } from '../../shared/logger.ts';
import { helpText, type Invocation, readSettings } from '../../shared/read-settings.ts';
import { reasonOf } from '../../shared/system-error-messages.ts';
import { withSettingsOf } from '../../shared/systemd/install.ts';
import { authorityFiles, loadAuthority } from '../ca-and-broker-certificates.ts';
import { SecretVault, vaultFile } from '../deliveries/secret-encryption.ts';
import { LeaseConnection } from '../history/postgres-lease-and-notify-connection.ts';
import { addressOf } from '../history/postgres-settings.ts';
import { startErrorOf } from '../history/translate-postgres-errors.ts';
import { type BrokerSettings, brokerSettings } from '../settings-schema.ts';
import { redeemingToken, storingToken } from './cluster-tables.ts';

const name = 'farhand-broker';

/** Seconds for which a token is valid. */
const validSeconds = 15 * 60;

/**
 * Files that a new broker gets. authority.json is written last, because `join` refuses a directory that has this file.
 * So `join` can be run again after an interruption.
 */
const files = [...authorityFiles, vaultFile].reverse();
const [authorityFile] = authorityFiles;
const contents = z.array(z.tuple([z.enum(files), z.string()]));

const form = /^farhand_broker_[0-9A-Za-z]{43}$/;

const { data_dir, database_url, database_password_file, config, help } = brokerSettings;
const log_level = { ...brokerSettings.log_level, schema: z.enum(logLevels).default('warn') };
const tokenHelp = { data_dir, database_url, database_password_file, log_level, config, help };
const token_file = {
  schema: z.string().default('-'),
  value: 'FILE',
  help: 'file that contains the token; - (the default) is standard input',
  flagOnly: true,
};
/** Accepts all settings of the broker, because the file for --config may contain them. */
const settingsTable = { ...brokerSettings, log_level, token_file };

type Settings = BrokerSettings & { database_url: string; token_file: string };

interface ClusterVerb {
  purpose: string;
  flags: Parameters<typeof helpText>[2];
  /** Returns the text for standard output. */
  run(settings: Settings, connection: LeaseConnection): Promise<string>;
}

const verbs: Readonly<Record<string, ClusterVerb>> = {
  token: {
    purpose: 'prints a token with which one new broker can join within 15 minutes',
    flags: tokenHelp,
    run: makeToken,
  },
  join: {
    purpose: 'writes the certificate authority and keys of an existing broker into an empty data directory',
    flags: { token_file, ...tokenHelp },
    run: joinWithToken,
  },
};

/** Runs `cluster token` or `cluster join`. Returns the text to print. Throws UsageError and StartError. */
export async function cluster({ argv, env }: Invocation): Promise<string> {
  const [word = '', ...rest] = argv;
  const verb = Object.hasOwn(verbs, word) ? verbs[word] : undefined;
  if (!verb) {
    const lines = Object.entries(verbs).map(([one, { purpose }]) => `${name} cluster ${one}: ${purpose}\n`);
    if (word === '--help') return lines.join('');
    throw new UsageError(`cluster needs a verb: ${Object.keys(verbs).join(' or ')}`);
  }
  if (rest.includes('--help')) return helpText(`${name} cluster ${word}`, verb.purpose, verb.flags);
  const settings = readSettings(settingsTable, { argv: withSettingsOf(name, rest), env });
  const { database_url: url } = settings;
  if (url === undefined)
    throw new UsageError(
      '--database-url is missing: set it to the database of the brokers, postgres://USER@HOST/DATABASE',
    );
  const log = createLogger(name, settings.log_level);
  const address = addressOf({ ...settings, database_url: url });
  const connection = await LeaseConnection.open(address, log, () => {}).catch((error: unknown) => {
    throw startErrorOf(error, address.name);
  });
  try {
    await assertShared(connection, address.name);
    return await verb.run({ ...settings, database_url: url }, connection);
  } finally {
    await connection.close();
  }
}

async function assertShared(connection: LeaseConnection, database: string): Promise<void> {
  const [table] = await connection.query("SELECT to_regclass('broker_tokens') IS NOT NULL AS found");
  if (table?.found) return;
  throw new StartError(
    `${database} is not shared by several brokers yet: start the first broker with --peer-listen, then run ${name} cluster token on its machine`,
  );
}

async function makeToken({ data_dir }: Settings, connection: LeaseConnection): Promise<string> {
  if (existsSync(data_dir)) refuseForeign(data_dir);
  const authority = await loadAuthority(data_dir, false);
  // Creates the key for --tls if it is missing, even if --tls is not set. All brokers then have the same key if --tls
  // is set later.
  await authority.rest([]);
  const read = files.map(async (file) => [file, await readFile(join(data_dir, file), 'utf8')] as const);
  const token = `farhand_broker_${newSecret()}`;
  const { id, vault } = derivedFrom(token);
  const secrets = vault.encrypt(id, JSON.stringify(await Promise.all(read)));
  await connection.query(storingToken, [id, secrets, validSeconds]);
  process.stderr.write(
    `On the machine of the new broker, run ${name} cluster join. This token is valid for ${validSeconds / 60} minutes, and for one broker:\n`,
  );
  return `${token}\n`;
}

async function joinWithToken(settings: Settings, connection: LeaseConnection): Promise<string> {
  const { data_dir } = settings;
  const unlock = takeDirectory(data_dir, 'broker');
  try {
    for (const file of [authorityFile, 'state.json'])
      if (existsSync(join(data_dir, file)))
        throw new StartError(
          `${data_dir} already belongs to a broker: it contains ${file}; use an empty --data-dir`,
        );
    const { id, vault } = derivedFrom(await readToken(settings.token_file));
    // If the files cannot be written, the transaction is not committed, so that the token can be used again.
    await connection.query('BEGIN');
    const [row] = await connection.query(redeemingToken, [id]);
    const text = row?.valid ? vault.decrypt(id, String(row.secrets)) : undefined;
    if (text === undefined) {
      await connection.query('COMMIT');
      throw new StartError(
        `the token is wrong, was used already, or is older than ${validSeconds / 60} minutes: make another one with ${name} cluster token`,
        1,
      );
    }
    for (const [file, content] of contents.parse(JSON.parse(text)))
      await writeDurably(join(data_dir, file), content);
    await connection.query('COMMIT');
    return `${data_dir} now has the certificate authority and the keys of the other brokers. Next, install this broker, or start it, with --database-url and --peer-listen.\n`;
  } finally {
    unlock();
  }
}

/**
 * Derives two things from a token: the id of its row in the table broker_tokens, and a vault. The vault encrypts the
 * secrets that the row passes to the new broker.
 */
function derivedFrom(token: string): { id: string; vault: SecretVault } {
  const derive = (what: string): Buffer =>
    Buffer.from(hkdfSync('sha256', token, '', `farhand broker ${what}`, 32));
  return { id: derive('id').toString('hex'), vault: new SecretVault(derive('key')) };
}

/** Reads the token from a file, or from the first line of standard input. Throws StartError if there is no token. */
async function readToken(file: string): Promise<string> {
  const text = file === '-' ? await firstLineOfInput() : await readFile(file, 'utf8').catch(cannotRead);
  const token = text.trim();
  if (form.test(token)) return token;
  const where = file === '-' ? 'standard input' : file;
  throw new StartError(
    `${where} contains no token: it must be one line, farhand_broker_…; make one with ${name} cluster token`,
  );
}

function cannotRead(error: unknown): never {
  throw new StartError(`--token-file ${reasonOf(error)}`);
}

async function firstLineOfInput(): Promise<string> {
  if (process.stdin.isTTY) process.stderr.write('Token: ');
  for await (const line of createInterface({ input: process.stdin })) return line;
  return '';
}
