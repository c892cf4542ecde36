// Checks of a PostgreSQL database for `farhand-broker doctor`: connection, version, settings, brokers, size and
// clock.
import { Client } from 'pg';
import { mostSkewMs, now } from '../../shared/clock.ts';
import { type Finding, fail, ok, reason, warn } from '../../shared/doctor/check-result.ts';
import { reachPort } from '../../shared/doctor/reachable-port.ts';
import { listingBrokers } from '../cluster/cluster-tables.ts';
import { storedDirectoryId } from '../commands/output-directory-id.ts';
import { addressOf, type PostgresSettings } from './postgres-settings.ts';
import { oldestVersion } from './postgres-write-connection.ts';
import { startErrorOf } from './translate-postgres-errors.ts';

/** Milliseconds in which each query must be answered. */
const answerMs = 5_000;

const server = `SELECT current_setting('server_version_num')::int AS number, current_setting('server_version') AS version,
  current_setting('server_encoding') AS encoding, current_setting('fsync') AS fsync,
  current_setting('synchronous_commit') AS synchronous_commit, pg_is_in_recovery() AS standby,
  coalesce(has_schema_privilege(current_schema(), 'CREATE'), false) AS may_create,
  pg_size_pretty(pg_database_size(current_database())) AS size,
  (extract(epoch FROM clock_timestamp()) * 1000)::float8 AS clock`;

interface Server {
  number: number;
  version: string;
  encoding: string;
  fsync: string;
  synchronous_commit: string;
  standby: boolean;
  may_create: boolean;
  size: string;
  clock: number;
}

/** Lists the brokers that use the database. Each of them has an advisory lock. */
const users = `SELECT DISTINCT application_name AS program, coalesce(host(client_addr), 'the same box') AS address, pid,
  to_char(backend_start AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"') AS since
  FROM pg_locks JOIN pg_stat_activity USING (pid)
  WHERE locktype = 'advisory' AND granted AND datname = current_database() ORDER BY since`;

/** A row of `listingBrokers`. */
interface BrokerRow {
  id: string;
  url: string;
  /** Id of the broker's data directory. */
  directory_id: string | null;
  seconds: number;
  machines: number;
  linked: number;
}

interface User {
  program: string;
  address: string;
  pid: number;
  since: string;
}

/**
 * Runs all checks. If the check of the connection fails, the other checks are left out. `directory` is the data
 * directory of this machine's broker.
 */
export async function examineDatabase(settings: PostgresSettings, directory: string): Promise<Finding[]> {
  let name = 'the database';
  try {
    const address = addressOf(settings);
    name = address.name;
    const client = new Client({
      ...address.config,
      query_timeout: answerMs,
      application_name: 'farhand doctor',
    });
    // Without a listener, a connection that fails later would end the process. The listener does nothing, because the
    // running query fails too.
    client.on('error', () => {});
    await client.connect();
    try {
      const before = now();
      const [found] = (await client.query<Server>(server)).rows;
      if (!found) return [];
      const skew = Math.abs(found.clock - (before + now()) / 2);
      const { rows } = await client.query<User>(users);
      const shared = await client.query<{ found: boolean }>(
        "SELECT to_regclass('brokers') IS NOT NULL AS found",
      );
      const sharing = shared.rows[0]?.found ? (await client.query<BrokerRow>(listingBrokers)).rows : [];
      // If the directory cannot be read, another check reports this, and no broker is marked as this machine’s broker.
      const own = await storedDirectoryId(directory).catch(() => undefined);
      const others = await Promise.all(sharing.map((row) => ofBroker(row, row.directory_id === own)));
      const size = ok('database size', found.size);
      return [...ofServer(name, found), user(rows), ...others, ...copies(sharing), size, clock(skew)];
    } finally {
      await client.end().catch(() => {});
    }
  } catch (error) {
    const { message, exitCode } = startErrorOf(error, name);
    const start = 'check that the server runs and that firewalls let this machine connect to its port';
    return [
      fail('database', message, exitCode === 1 ? start : 'correct the settings that the finding names'),
    ];
  }
}

function ofServer(name: string, found: Server): Finding[] {
  const { number, version, encoding, standby, may_create } = found;
  const oldest = oldestVersion / 10_000;
  return [
    standby
      ? fail('database', `${name} is a standby, which cannot be written`, 'set --database-url to the primary')
      : ok('database', `${name} answers`),
    number >= oldestVersion
      ? ok('database version', version)
      : fail('database version', version, `upgrade the server to PostgreSQL ${oldest} or newer`),
    encoding === 'UTF8'
      ? ok('encoding', encoding)
      : fail('encoding', encoding, 'create the database with createdb --encoding UTF8 --template template0'),
    ...(may_create
      ? []
      : [fail('tables', 'this user cannot create tables', 'make the user the owner of the database')]),
    ...durability(found),
  ];
}

function durability({ fsync, synchronous_commit: commit }: Server): Finding[] {
  const off = 'a power failure can lose or damage the data';
  return [
    fsync === 'off' ? warn('fsync', `off: ${off}`, 'set fsync = on in postgresql.conf') : ok('fsync', fsync),
    commit === 'off'
      ? ok('synchronous_commit', 'off in the server, but on in the broker’s own transactions')
      : ok('synchronous_commit', commit),
  ];
}

function user(rows: readonly User[]): Finding {
  const all = rows.map(
    ({ program, address, pid, since }) => `${program} of ${address} since ${since} (pid ${pid})`,
  );
  if (all.length > 0) return ok('used by', all.join(', '));
  return warn('used by', 'no broker uses the database', 'run systemctl start farhand-broker');
}

async function ofBroker({ id, url, seconds, machines, linked }: BrokerRow, isOwn: boolean): Promise<Finding> {
  const owns = `${url}${isOwn ? ' (this machine’s broker)' : ''} owns ${machines} machines, ${linked} of them linked`;
  const about = Math.round(Math.abs(seconds));
  if (seconds <= 0)
    return warn(
      id,
      `${owns}; its lease ended ${about} s ago`,
      `check that the broker at ${url} runs and reaches the database`,
    );
  try {
    const { hostname, port } = new URL(url);
    await reachPort(hostname.replace(/^\[|\]$/g, ''), Number(port || 443));
  } catch (error) {
    return warn(
      id,
      `${owns}; its lease ends in ${about} s, but it cannot be reached from this machine: ${reason(error)}`,
      `check the broker’s --peer-url, and that firewalls let this machine connect to ${url}`,
    );
  }
  return ok(id, `${owns}; its lease ends in ${about} s`);
}

/** Finds brokers that run on copies of one data directory. */
function copies(rows: readonly BrokerRow[]): Finding[] {
  const living = rows.filter(({ seconds, directory_id }) => seconds > 0 && directory_id !== null);
  const byDirectory = [...Map.groupBy(living, ({ directory_id }) => directory_id).values()];
  return byDirectory
    .filter(({ length }) => length > 1)
    .map((some) =>
      warn(
        'copied directory',
        `${some.map(({ url }) => url).join(' and ')} use copies of one data directory; outputs of finished commands may be read from the wrong copy`,
        'if one of them was just restarted, check again after 10 s; otherwise stop one, delete directory-id in its data directory, and start it again',
      ),
    );
}

function clock(skew: number): Finding {
  if (skew < mostSkewMs) return ok('database clock', 'agrees with the clock of this machine');
  const what = `differs by ${Math.round(skew / 1000)} s from the clock of this machine`;
  return warn(
    'database clock',
    what,
    'run timedatectl set-ntp true on this machine and on the database server, so that both follow a time server',
  );
}
