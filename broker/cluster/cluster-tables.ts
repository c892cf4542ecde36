// SQL of the tables that list brokers and the owners of machines. All times are read from the database's clock.
import { knownGenerations } from '../state/documents-in-postgres.ts';

/** Milliseconds for which a lease is valid after a renewal. */
export const leaseMs = 10_000;

/**
 * These tables exist only in PostgreSQL. The column `changed` of `owners` is the id of the transaction that last
 * changed the row; brokers use it to find recent changes.
 */
export const tables = [
  `CREATE TABLE brokers (id TEXT PRIMARY KEY, url TEXT NOT NULL, lease_until TIMESTAMPTZ NOT NULL) WITHOUT ROWID;
  CREATE TABLE owners (machine_id TEXT PRIMARY KEY, broker_id TEXT NOT NULL, epoch INTEGER NOT NULL, link_id TEXT,
    changed XID8 NOT NULL DEFAULT pg_current_xact_id()) WITHOUT ROWID;
  CREATE INDEX owners_by_change ON owners (changed);
  CREATE FUNCTION fence(machine varchar, owned bigint) RETURNS void LANGUAGE plpgsql AS $$ BEGIN
    PERFORM 1 FROM owners WHERE machine_id = machine AND epoch = owned FOR SHARE;
    IF NOT FOUND THEN RAISE EXCEPTION 'another broker owns machine %', machine USING ERRCODE = 'FH001'; END IF;
  END $$`,
  // A crash of PostgreSQL may empty `rate_limits`, because it is UNLOGGED. This does no harm: its counts are valid for
  // a minute only.
  `CREATE TABLE tasks (name TEXT PRIMARY KEY, broker_id TEXT NOT NULL) WITHOUT ROWID;
  CREATE UNLOGGED TABLE rate_limits (key TEXT PRIMARY KEY, points INTEGER NOT NULL, expire INTEGER)`,
  // `broker_tokens` passes the secrets of an existing broker to a new one, encrypted with a key that is derived from
  // the token.
  `CREATE TABLE broker_tokens (id TEXT PRIMARY KEY, secrets TEXT NOT NULL, valid_until TIMESTAMPTZ NOT NULL)
    WITHOUT ROWID;
  ALTER TABLE brokers ADD COLUMN directory_id TEXT`,
];

export const renewal = `INSERT INTO brokers VALUES ($1, $2, clock_timestamp() + interval '${leaseMs} ms', $3)
  ON CONFLICT (id) DO UPDATE SET url = excluded.url, lease_until = excluded.lease_until`;
export const releasing = 'DELETE FROM brokers WHERE id = $1';
/**
 * Makes broker $1 the owner of the machines $2, with the link ids $3. A new owner raises the epoch of the machine. The
 * database then refuses writes of the former owner, because they contain the lower epoch.
 */
export const taking = `INSERT INTO owners AS o (machine_id, broker_id, epoch, link_id)
  SELECT machine, $1, 1, nullif(link, '') FROM unnest($2::varchar[], $3::varchar[]) AS t (machine, link) ORDER BY machine
  ON CONFLICT (machine_id) DO UPDATE SET epoch = o.epoch + CASE WHEN o.broker_id = $1 THEN 0 ELSE 1 END,
    broker_id = $1, link_id = excluded.link_id, changed = pg_current_xact_id()
  RETURNING machine_id, broker_id, epoch, link_id`;
/**
 * Claims each machine in $2 that has no owner, or whose owner has given up its lease. If $3 is true, also claims
 * machines whose owner has an expired lease.
 */
export const claiming = `INSERT INTO owners AS o (machine_id, broker_id, epoch)
  SELECT machine, $1, 1 FROM unnest($2::varchar[]) AS machine ORDER BY machine
  ON CONFLICT (machine_id) DO UPDATE SET epoch = o.epoch + 1, broker_id = $1, link_id = NULL,
    changed = pg_current_xact_id()
  WHERE o.broker_id <> $1 AND NOT EXISTS (
    SELECT 1 FROM brokers b WHERE b.id = o.broker_id AND (NOT $3 OR b.lease_until > clock_timestamp()))`;
export const unlinking = `UPDATE owners SET link_id = NULL, changed = pg_current_xact_id()
  WHERE broker_id = $1 AND machine_id = ANY($2::varchar[]) AND link_id = ANY($3::varchar[])`;
/**
 * - Claims each task in $2 that has no broker, or whose broker has given up its lease.
 * - If $3 is true, also claims tasks whose broker has an expired lease.
 * - Deletes this broker's claims to tasks that no longer exist (tasks not in $2).
 */
export const claimingTasks = `WITH gone AS (DELETE FROM tasks WHERE broker_id = $1 AND name <> ALL($2::varchar[]))
  INSERT INTO tasks AS t SELECT task, $1 FROM unnest($2::varchar[]) AS task ORDER BY task
  ON CONFLICT (name) DO UPDATE SET broker_id = $1 WHERE t.broker_id <> $1 AND NOT EXISTS (
    SELECT 1 FROM brokers b WHERE b.id = t.broker_id AND (NOT $3 OR b.lease_until > clock_timestamp()))`;
export const readingTasks = 'SELECT name FROM tasks WHERE broker_id = $1';
/** `ms` is the number of milliseconds until each lease ends. */
export const readingBrokers =
  'SELECT id, url, directory_id, (extract(epoch FROM lease_until - clock_timestamp()) * 1000)::float8 AS ms FROM brokers';
/**
 * Reads the id of the oldest transaction in progress. In each row that is committed from now on, `changed` is this id
 * or a larger one.
 */
export const readingHorizon = 'SELECT pg_snapshot_xmin(pg_current_snapshot())::text AS xid';
export const readingOwners =
  'SELECT machine_id, broker_id, epoch, link_id FROM owners WHERE changed >= $1::xid8';

/**
 * Reads the owner of one machine. Run this statement with a RowReader, because the statement contains `?`. A
 * LeaseConnection expects `$1` instead.
 */
export const readingOwner = 'SELECT broker_id FROM owners WHERE machine_id = ?';

/**
 * Lists the brokers that share a database, with the seconds until their leases end and the numbers of their machines.
 * Leaves out brokers whose lease ended over an hour ago. Also leaves out the old row of a broker that was started
 * again: the lease in that row has ended, and a newer row with the same URL has a valid lease.
 */
export const listingBrokers = `SELECT id, url, directory_id, (extract(epoch FROM lease_until) * 1000)::float8 AS until_ms,
  (extract(epoch FROM lease_until - clock_timestamp()))::float8 AS seconds,
  (SELECT count(*)::int FROM owners WHERE broker_id = brokers.id) AS machines,
  (SELECT count(*)::int FROM owners WHERE broker_id = brokers.id AND link_id IS NOT NULL) AS linked
  FROM brokers WHERE lease_until > clock_timestamp() - interval '1 hour' AND (lease_until > clock_timestamp()
    OR NOT EXISTS (SELECT 1 FROM brokers AS again WHERE again.url = brokers.url AND again.lease_until > clock_timestamp()))
  ORDER BY id`;

/** Stores encrypted secrets for `$3` seconds. */
export const storingToken = `INSERT INTO broker_tokens VALUES ($1, $2, clock_timestamp() + interval '1 second' * $3)`;
/**
 * Deletes the row of a token that `cluster token` made, and returns the encrypted secrets. `valid` is false if the
 * token has expired.
 */
export const redeemingToken =
  'DELETE FROM broker_tokens WHERE id = $1 RETURNING secrets, valid_until > clock_timestamp() AS valid';
/**
 * Each broker runs these statements once a minute. The second one deletes the old row of a broker that was started
 * again: the lease in that row has expired, and a newer row with the same directory_id has a valid lease.
 */
export const expiring = [
  'DELETE FROM broker_tokens WHERE valid_until <= clock_timestamp()',
  `DELETE FROM brokers b WHERE lease_until < clock_timestamp() AND EXISTS (SELECT 1 FROM brokers other
    WHERE other.directory_id = b.directory_id AND other.lease_until > clock_timestamp())`,
];

/**
 * Makes broker $1 the owner of removed machines whose owner has ended. This broker then ends their open commands and
 * sessions. Each broker runs this statement once a minute.
 */
export const claimingRemoved = `UPDATE owners SET epoch = epoch + 1, broker_id = $1, link_id = NULL,
  changed = pg_current_xact_id() WHERE broker_id <> $1
  AND NOT EXISTS (SELECT 1 FROM documents WHERE collection = 'machines' AND id = machine_id)
  AND NOT EXISTS (SELECT 1 FROM brokers WHERE id = broker_id AND lease_until > clock_timestamp() - interval '1 minute')`;

/** Statements that delete rows that are no longer needed. Each broker runs them once an hour. */
export const pruning = [
  "DELETE FROM brokers WHERE lease_until < clock_timestamp() - interval '1 day'",
  `DELETE FROM writers WHERE started < clock_timestamp() - interval '1 day' AND NOT EXISTS (
    SELECT 1 FROM brokers WHERE brokers.id = writers.id)`,
  `DELETE FROM owners WHERE NOT EXISTS (
    SELECT 1 FROM documents WHERE collection = 'machines' AND id = owners.machine_id)
    AND EXISTS (SELECT 1 FROM brokers WHERE id = broker_id AND lease_until > clock_timestamp())`,
  `DELETE FROM removed_documents WHERE generation < (SELECT generation FROM installation) - ${2 * knownGenerations}`,
  'DELETE FROM rate_limits WHERE expire < extract(epoch FROM clock_timestamp()) * 1000 - 3600000',
];

/** Returns an array of texts as PostgreSQL reads it. */
export function arrayOf(texts: readonly string[]): string {
  return `{${texts.map((text) => JSON.stringify(text)).join(',')}}`;
}
