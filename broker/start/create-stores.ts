// Opens the two stores of a broker, state and history: files in the data directory, or a PostgreSQL database.
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { now } from '../../shared/clock.ts';
import { StartError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { History } from '../history/history.ts';
import { openHistory } from '../history/open-sqlite-file.ts';
import { countTimesFrom } from '../schedules/run-due-times.ts';
import type { BrokerSettings } from '../settings-schema.ts';
import { openState, State } from '../state/in-memory-state.ts';

interface Opening {
  settings: BrokerSettings;
  /** Functions that close what was opened, called in reverse order. */
  closers: (() => unknown)[];
  log: Logger;
}

interface OpenedStores {
  state: State;
  history: History;
  /** True if no document was ever declared. */
  untouched: boolean;
}

/** Opens the stores and registers how they are closed. Throws StartError. */
export function createStores(opening: Opening): Promise<OpenedStores> {
  const url = opening.settings.database_url;
  return url === undefined ? createInFiles(opening) : createInDatabase(opening, url);
}

async function createInFiles({ settings, closers, log }: Opening): Promise<OpenedStores> {
  const state = await openState(settings.data_dir, settings.accept_state);
  closers.push(() => state.close());
  const untouched = state.generation === 1;
  const { new_history, old_history } = settings;
  // This is written before a new history exists. Otherwise a later start could repeat runs of schedules.
  if (new_history || old_history) await countTimesFrom(state, now(), () => true);
  const history = historyOf(settings, state, untouched, log);
  closers.push(() => history.close());
  return { state, history, untouched };
}

async function createInDatabase(
  { settings, closers, log }: Opening,
  database_url: string,
): Promise<OpenedStores> {
  const { data_dir, new_history, old_history, accept_state, database_password_file } = settings;
  if (new_history || old_history || accept_state)
    throw new StartError(
      '--new-history, --old-history and --accept-state are about files: leave them out with --database-url',
    );
  const file = join(data_dir, 'state.json');
  if (existsSync(file))
    throw new StartError(
      `${file} has the state of a broker without --database-url: use an empty data directory, or leave out --database-url`,
    );
  // These modules are loaded only here, because a broker without a database does not need them.
  const [{ PostgresDatabase }, { PostgresStore }, { refuseMarked }] = await Promise.all([
    import('../history/postgres-database.ts'),
    import('../state/postgres-documents.ts'),
    import('../history/unfinished-copy-mark.ts'),
  ]);
  const database = await PostgresDatabase.open({ database_url, database_password_file }, log);
  const history = new History(database, log);
  closers.push(() => history.close());
  await refuseMarked(history, database.name);
  const state = new State(await PostgresStore.open(history));
  closers.push(() => state.close());
  await database.writer.claim();
  return { state, history, untouched: state.generation === 1 };
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
        `${file} cannot be opened (${text}): correct that and start again; no data is lost`,
        1,
      );
    }
    throw new StartError(
      `${file} is damaged (${text}): restore it from a backup, or move it away and start once with --new-history`,
    );
  }
}
