// Opens the two stores of a broker, state and history: files in the data directory, or a PostgreSQL database.
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { now } from '../../shared/clock.ts';
import { StartError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Authority } from '../ca-and-broker-certificates.ts';
import type { Cluster } from '../cluster/index.ts';
import { History } from '../history/history-database.ts';
import { openHistory } from '../history/open-sqlite-file.ts';
import type { CountTogether } from '../request-checks/rate-limits.ts';
import { countTimesFrom } from '../schedules/run-due-times.ts';
import type { BrokerSettings } from '../settings-schema.ts';
import { openState, State } from '../state/index.ts';

export interface StoreOpening {
  settings: BrokerSettings;
  /** Functions that close the parts that exist so far, called in reverse order. */
  closers: (() => unknown)[];
  log: Logger;
}

interface OpenedStores {
  state: State;
  history: History;
  /**
   * True at the first start of an installation, when the state has no commit yet. With a database, it is false as soon
   * as a broker has stored the fingerprint of its certificate authority there.
   */
  untouched: boolean;
  /** The other brokers on the same database; undefined with a single broker. */
  cluster?: Cluster | undefined;
  /**
   * Runs SQL in the database that the brokers share, so that they count the requests of each key together
   * (--rate-limit). Undefined with a single broker.
   */
  countTogether?: CountTogether;
  /** Lets other brokers start. Must be called as soon as all tables exist. */
  started?: () => Promise<void>;
  /**
   * The fingerprint of the certificate authority that all brokers on the database share; null until the first broker
   * has stored this fingerprint. Undefined without a database.
   */
  knownAuthority?: string | null;
}

/** Opens the stores, and registers how they are closed. Throws StartError. */
export function createStores(opening: StoreOpening): Promise<OpenedStores> {
  const { database_url: url, peer_listen, peer_url } = opening.settings;
  if (url === undefined && (peer_listen || peer_url))
    throw new StartError(
      '--peer-listen and --peer-url are for several brokers on one database: they need --database-url',
    );
  return url === undefined ? createInFiles(opening) : createInDatabase(opening, url);
}

async function createInFiles({ settings, closers, log }: StoreOpening): Promise<OpenedStores> {
  const state = await openState(settings.data_dir, settings.accept_state);
  closers.push(() => state.close());
  const untouched = state.generation === 1;
  const { new_history, old_history } = settings;
  // The schedules get a new `since` before the history is created. Otherwise, a crash in between would leave an empty
  // history and the old `since`. The next start would then run earlier due times again.
  if (new_history || old_history) await countTimesFrom(state, now());
  const history = historyOf(settings, state, untouched, log);
  closers.push(() => history.close());
  return { state, history, untouched };
}

async function createInDatabase(
  { settings, closers, log }: StoreOpening,
  database_url: string,
): Promise<OpenedStores> {
  const { data_dir, new_history, old_history, accept_state, database_password_file } = settings;
  if (new_history || old_history || accept_state)
    throw new StartError(
      '--new-history, --old-history and --accept-state are only for a broker without --database-url: leave them out',
    );
  const file = join(data_dir, 'state.json');
  if (existsSync(file))
    throw new StartError(
      `${file} has the state of a broker without --database-url: copy it to the database with farhand-broker migrate --to URL, or leave out --database-url`,
    );
  // These modules are loaded only here, because a broker without a database does not need them.
  const [{ PostgresDatabase }, { addressOf }, { PostgresStore }, { refuseMarked }] = await Promise.all([
    import('../history/postgres-database.ts'),
    import('../history/postgres-settings.ts'),
    import('../state/documents-in-postgres.ts'),
    import('../history/unfinished-or-moved-mark.ts'),
  ]);
  const address = { database_url, database_password_file };
  const several = settings.peer_listen && (await import('../cluster/index.ts'));
  const brokerId = several ? (await import('../cluster/own-broker-lease.ts')).newBrokerId() : undefined;
  const database = await PostgresDatabase.open(address, log, brokerId);
  const history = new History(database, log);
  closers.push(() => history.close());
  await refuseMarked(history, database.name);
  const state = new State(await PostgresStore.open(history));
  closers.push(() => state.close());
  const row = await history.get('SELECT authority FROM installation');
  const knownAuthority = typeof row?.authority === 'string' ? row.authority : null;
  const stores = {
    ...{ state, history, knownAuthority },
    untouched: state.generation === 1 && knownAuthority === null,
  };
  if (!several || brokerId === undefined) return stores;
  const { dataDirectoryId } = await import('../commands/output-directory-id.ts');
  const directoryId = await dataDirectoryId(data_dir);
  const options = { address: addressOf(address), brokerId, url: peerUrlOf(settings), directoryId, log };
  const cluster = await several.Cluster.open(options, state, history);
  closers.push(() => cluster.close());
  return {
    ...{ ...stores, cluster, started: () => database.writer.started() },
    countTogether: (text, values) => database.autocommit(text, values),
  };
}

/**
 * The first broker on a database stores the fingerprint of its certificate authority there. Throws StartError if this
 * broker has another authority, because agents and other brokers would not trust it.
 */
export async function assertAuthority(
  { fingerprint }: Pick<Authority, 'fingerprint'>,
  { history, knownAuthority: known }: Pick<OpenedStores, 'history' | 'knownAuthority'>,
): Promise<void> {
  if (known === null)
    await history.write((transaction) =>
      transaction.run('UPDATE installation SET authority = ?', fingerprint),
    );
  else if (known !== undefined && known !== fingerprint)
    throw new StartError(
      'authority.json differs from that of the other brokers on this database: copy the file from one of them, or run farhand-broker cluster join with an empty data directory. If this is a new installation, use an empty database instead',
    );
}

/**
 * Returns the URL at which other brokers reach the peer port. If --peer-url is not set, this URL is preliminary. Once
 * the port listens, advertise() replaces it with a URL that has the actual port number.
 */
function peerUrlOf({ peer_url, peer_listen }: BrokerSettings): string {
  const { host = '', port = 0 } = peer_listen ?? {};
  if (!peer_url && ['0.0.0.0', '::'].includes(host))
    throw new StartError(
      `--peer-listen ${host} is no address to which other brokers can connect: set --peer-url to https://HOST:PORT of this broker`,
    );
  return peer_url ?? `https://${host.includes(':') ? `[${host}]` : host}:${port}`;
}

function historyOf(settings: BrokerSettings, state: State, untouched: boolean, log: Logger): History {
  const file = join(settings.data_dir, 'history.db');
  if (settings.new_history && !existsSync(file))
    log.warn('starting with a new history: past commands and events are gone');
  try {
    return openHistory(file, state.installId, log, {
      isNew: untouched || settings.new_history,
      isOld: settings.old_history,
    });
  } catch (error) {
    if (error instanceof StartError) throw error;
    const text = error instanceof Error ? error.message : String(error);
    if (!/not a database|malformed/.test(text)) {
      throw new StartError(
        `${file} cannot be opened (${text}): fix the cause and start again; no data is lost`,
        1,
      );
    }
    throw new StartError(
      `${file} is damaged (${text}): restore it from a backup, or move it away and start once with --new-history`,
    );
  }
}
