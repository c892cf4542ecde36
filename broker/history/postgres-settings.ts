// The settings of the connection to PostgreSQL: the URL of --database-url with its TLS options, and the file
// with the password.
import { readFileSync } from 'node:fs';
import type { ClientConfig } from 'pg';
import { StartError } from '../../shared/errors.ts';
import { isLoopback } from '../../shared/loopback.ts';
import { atPath, reasonOf } from '../../shared/system-error-messages.ts';

export interface PostgresSettings {
  database_url: string;
  database_password_file?: string | undefined;
}

export interface PostgresAddress {
  config: ClientConfig;
  /** The address without secrets, for messages. */
  name: string;
}

const modes = ['disable', 'require', 'verify-ca', 'verify-full'] as const;
type Mode = (typeof modes)[number];
const parameters = [
  'host',
  'port',
  'user',
  'dbname',
  'password',
  'sslmode',
  'sslrootcert',
  'sslcert',
  'sslkey',
];

/** Milliseconds after which an attempt to connect counts as failed. */
const connectMs = 5_000;
/**
 * With these values, the server ends a broker's session some 25 s after that broker has vanished. Another
 * broker can then start.
 */
const keepAlive = '-c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3';

/** Parses --database-url. Throws StartError, with a message that never contains the password. */
export function addressOf({ database_url, database_password_file }: PostgresSettings): PostgresAddress {
  const form =
    '--database-url must be postgres://USER@HOST:5432/DATABASE; in a password, replace each special character by % and its code, or use --database-password-file';
  if (!/^postgres(ql)?:\/\//.test(database_url) || !URL.canParse(database_url)) throw new StartError(form);
  const url = new URL(database_url);
  const given = Object.fromEntries(url.searchParams);
  const unknown = Object.keys(given).find((name) => !parameters.includes(name));
  if (unknown)
    throw new StartError(
      `--database-url has the unknown parameter ${unknown}; allowed are ${parameters.join(', ')}`,
    );
  const decoded = (text: string): string => {
    try {
      return decodeURIComponent(text);
    } catch {
      throw new StartError(form);
    }
  };
  const host = given.host ?? decoded(url.hostname).replace(/^\[|\]$/g, '');
  const user = given.user ?? decoded(url.username);
  const database = given.dbname ?? decoded(url.pathname.slice(1));
  const port = Number(given.port ?? (url.port || 5432));
  if (host === '' || user === '' || database === '')
    throw new StartError(`${form}; it lacks the ${host === '' ? 'host' : user === '' ? 'user' : 'database'}`);
  const password = given.password ?? decoded(url.password);
  if (database_password_file && password !== '')
    throw new StartError(
      '--database-url has a password, so --database-password-file cannot be used: choose one',
    );
  const read = (): string =>
    database_password_file
      ? readSetting('--database-password-file', database_password_file).trimEnd()
      : password;
  read();
  const config: ClientConfig = {
    ...{ host, port, user, database, application_name: 'farhand-broker', options: keepAlive },
    // The file is read for each connection, so that a new password needs no restart.
    password: read,
    ssl: tlsOf(given, host),
    ...{ keepAlive: true, keepAliveInitialDelayMillis: 10_000, connectionTimeoutMillis: connectMs },
  };
  return { config, name: `postgres://${user}@${host}:${port}/${database}` };
}

/** Returns the TLS options. Without sslmode, connections to other machines use TLS and verify the server's name. */
function tlsOf(given: Record<string, string>, host: string): ClientConfig['ssl'] {
  const { sslmode, sslrootcert, sslcert, sslkey } = given;
  const isLocal = host.startsWith('/') || isLoopback(host);
  const mode = (sslmode as Mode | undefined) ?? (isLocal && !sslrootcert ? 'disable' : 'verify-full');
  if (!modes.includes(mode))
    throw new StartError(`sslmode of --database-url must be one of ${modes.join(', ')}`);
  if (mode === 'disable') return false;
  return {
    // The name or address that the server's certificate must contain.
    host,
    ...(sslrootcert && { ca: readSetting('sslrootcert', sslrootcert) }),
    ...(sslcert && { cert: readSetting('sslcert', sslcert) }),
    ...(sslkey && { key: readSetting('sslkey', sslkey) }),
    // As in PostgreSQL's own programs, `require` verifies the server only if an authority is set.
    ...(mode === 'require' && !sslrootcert && { rejectUnauthorized: false }),
    ...(mode !== 'verify-full' && { checkServerIdentity: () => undefined }),
  };
}

function readSetting(name: string, file: string): string {
  try {
    return readFileSync(file, 'utf8');
  } catch (error) {
    throw new StartError(`${name}: ${reasonOf(atPath(error, file))}`);
  }
}
