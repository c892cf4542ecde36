// The verb farhand-broker migrate: the data of a broker moves from files to PostgreSQL and back, complete and
// unchanged.
import { existsSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { DatabaseSync } from 'node:sqlite';
import { expect, test } from 'vitest';
import { migrate } from '../../broker/migrate/index.ts';
import { refusePasswordIn } from '../../broker/settings-schema.ts';
import { Farhand } from '../../shared/sdk/index.ts';
import { shared } from '../close-after-tests.ts';
import { startFarhand, temporaryFolder } from '../start-farhand.ts';
import { program } from '../start-processes.ts';
import { createServer, databaseOf, startAgain, withPostgres } from './postgres-fixture.ts';

const server = shared(() => createServer());

/** Runs the verb. Returns the lines that it prints. */
async function run(...argv: string[]): Promise<string[]> {
  const lines: string[] = [];
  await migrate({ argv: [...argv, '--log-level', 'silent'], env: {} }, (line) => void lines.push(line));
  return lines;
}

const toDatabase = (dataDir: string, url: string) => run('--data-dir', dataDir, '--to', url);
/** Also passes --peer-listen, a setting for several brokers, which the migration must ignore. */
const toFiles = (dataDir: string, url: string) =>
  run('--data-dir', dataDir, '--database-url', url, '--peer-listen', '127.0.0.1:0', '--to', 'files');

const refused = (exitCode: number, part: string) => ({
  name: 'StartError',
  exitCode,
  message: expect.stringContaining(part),
});

/** A stopped broker that stores its data in files, with a row in almost every table. */
async function createFiles() {
  const { broker, dataDir, client, key, agent } = await startFarhand();
  const { machineId: machine_id } = await agent({ name: 'web-1', tags: 'prod' });
  const command = await client.commands.create({ machine_id, command: 'printf "\\0\\377x"', wait: 5_000 });
  // This output is longer than the part of it that a list of commands contains.
  await client.commands.create({ machine_id, command: 'head -c 300000 /dev/zero', wait: 5_000 });
  await client.schedules.create({ name: 'nightly', machine_id, command: 'true', cron: '0 3 * * *' });
  await client.webhooks.create({ url: 'https://hooks.example.org/', events: ['*'], enabled: false });
  await client.sessions.create({ machine_id });
  const { items: events } = await client.events.list({ limit: 100, sort: '-created_at' });
  await broker.close();
  return { dataDir, key, machine_id, command, newest: events[0]?.id };
}

/** All rows of a history.db by table, with their row ids, except tables that only SQLite needs. */
function rowsOf(folder: string): Record<string, unknown[]> {
  const database = new DatabaseSync(join(folder, 'history.db'), { readOnly: true });
  const tables = database
    .prepare("SELECT name, wr FROM pragma_table_list WHERE type = 'table' AND name NOT LIKE 'sqlite%'")
    .all()
    .filter(({ name }) => name !== 'installation');
  const rows = tables.map(({ name, wr }) => {
    const columns = wr === 1 ? '*' : 'rowid AS number, *';
    return [String(name), database.prepare(`SELECT ${columns} FROM ${String(name)} ORDER BY 1, 2`).all()];
  });
  database.close();
  return Object.fromEntries(rows);
}

/** The documents of a state.json, without outbox entries that are already in the history. */
function stateOf(folder: string): object {
  const { checksum: _, outbox: __, ...rest } = JSON.parse(readFileSync(join(folder, 'state.json'), 'utf8'));
  return rest;
}

/** The directory with the files from before the migration. */
const asideOf = (dataDir: string): string =>
  join(dataDir, readdirSync(dataDir).find((name) => name.startsWith('before-migration-')) ?? 'missing');

function changeFile(dataDir: string, sql: string): void {
  const database = new DatabaseSync(join(dataDir, 'history.db'));
  database.exec(sql);
  database.close();
}

withPostgres('migrate is refused', () => {
  test('without a target, with an invalid target, and without a database to copy from', async () => {
    const dataDir = temporaryFolder('broker');
    await expect(run('--data-dir', dataDir)).rejects.toThrow('--to is missing');
    await expect(run('--data-dir', dataDir, '--to', '/srv')).rejects.toThrow('the word files');
    await expect(run('--data-dir', dataDir, '--to', 'files')).rejects.toThrow('--database-url');
  });

  test('while a broker uses the directory or the database', { timeout: 60_000 }, async () => {
    const { createDatabase } = await server();
    const running = await startFarhand();
    await expect(toDatabase(running.dataDir, await createDatabase())).rejects.toMatchObject(
      refused(1, 'already uses'),
    );
    const { dataDir } = await createFiles();
    const url = await createDatabase();
    const other = await startFarhand({ flags: ['--database-url', url] });
    const [there, back] = await Promise.allSettled([
      toDatabase(dataDir, url),
      toFiles(temporaryFolder('broker'), url),
    ]);
    for (const outcome of [there, back])
      expect(outcome).toMatchObject({ reason: refused(1, 'another farhand-broker') });
    await other.broker.close();
  });

  test('if the target has data already, and if there is no data to copy', { timeout: 60_000 }, async () => {
    const { createDatabase, query } = await server();
    const url = await createDatabase();
    await expect(toDatabase(temporaryFolder('empty'), url)).rejects.toMatchObject(
      refused(78, 'has no state.json'),
    );
    await expect(toFiles(temporaryFolder('empty'), url)).rejects.toMatchObject(
      refused(78, 'has no data of a broker'),
    );
    const { dataDir } = await createFiles();
    await expect(toFiles(dataDir, url)).rejects.toMatchObject(refused(78, 'has a state.json already'));
    const foreign = await createDatabase();
    await query('CREATE TABLE events (name TEXT)', databaseOf(foreign));
    await expect(toDatabase(dataDir, foreign)).rejects.toMatchObject(refused(78, 'is not empty'));
    const used = await createDatabase();
    const { broker, dataDir: ofOther } = await startFarhand({ flags: ['--database-url', used] });
    await broker.close();
    await expect(toDatabase(dataDir, used)).rejects.toMatchObject(refused(78, 'is not empty'));
    await startAgain(ofOther, used);
    await startFarhand({ dataDir });
  });
});

withPostgres('migrate', () => {
  test('to PostgreSQL and back leaves every row, row id and document unchanged', async () => {
    const url = await (await server()).createDatabase();
    const { dataDir } = await createFiles();
    const printed = await toDatabase(dataDir, url);
    const aside = asideOf(dataDir);
    expect(readdirSync(aside).sort()).toEqual(['history.db', 'state.json', 'state.json.last']);
    expect(readdirSync(dataDir)).not.toContain('state.json');
    expect(printed).toContain('commands: 2');
    expect(printed.at(-2)).toBe(`The former files are in ${aside}.`);
    await expect(startFarhand({ dataDir })).rejects.toMatchObject(refused(78, 'was moved to a database ('));
    const after = await toFiles(dataDir, url);
    expect(after.at(-1)).toContain('remove database_url, ');
    const [before, now] = [rowsOf(aside), rowsOf(dataDir)];
    for (const table of ['commands', 'command_tails', 'events', 'audit', 'sessions', 'machine_facts'])
      expect(before[table]?.length).toBeGreaterThan(0);
    expect(now).toEqual(before);
    expect(stateOf(dataDir)).toEqual(stateOf(aside));
    expect(existsSync(join(dataDir, 'migration'))).toBe(false);
  }, 60_000);

  test('a broker continues with the data from before the migration, in both directions', async () => {
    const url = await (await server()).createDatabase();
    const { dataDir, key, machine_id, command, newest } = await createFiles();
    await toDatabase(dataDir, url);
    const onDatabase = await startAgain(dataDir, url);
    const client = new Farhand({ baseUrl: onDatabase.url, apiKey: key, retries: 0 });
    expect(await client.machines.get({ machine_id })).toMatchObject({ name: 'web-1', tags: ['prod'] });
    expect(await client.commands.get({ command_id: command.id })).toEqual(command);
    expect((await client.commands.list()).total).toBe(2);
    // New rows get higher row ids than the copied ones.
    const queued = await client.commands.create({ machine_id, command: 'true', queue_for: 60_000, wait: 0 });
    expect((await client.commands.list()).items.map(({ id }) => id)).toContain(queued.id);
    const added = await client.keys.create({ name: 'later', scopes: ['machines:read'] });
    const { items } = await client.events.list({ limit: 100, sort: '-created_at' });
    expect(items.findIndex(({ id }) => id === newest)).toBeGreaterThan(0);
    await onDatabase.broker.close();
    await toFiles(dataDir, url);
    // The files are now newer than the database.
    const elsewhere = temporaryFolder('broker');
    await expect(startAgain(elsewhere, url)).rejects.toMatchObject(refused(78, 'has moved to files'));
    const onFiles = await startFarhand({ dataDir });
    const again = new Farhand({ baseUrl: onFiles.url, apiKey: key, retries: 0 });
    expect((await again.keys.list()).items.map(({ id }) => id)).toContain(added.id);
    expect(await again.commands.get({ command_id: command.id })).toEqual(command);
    expect((await again.commands.list()).total).toBe(3);
  }, 60_000);

  test('no broker starts on the database of a failed copy, and the copy can be started again', async () => {
    const { createDatabase } = await server();
    const url = await createDatabase();
    const { dataDir } = await createFiles();
    // PostgreSQL cannot store a text with this character.
    changeFile(dataDir, "UPDATE sessions SET machine_hostname = 'a' || char(0)");
    await expect(toDatabase(dataDir, url)).rejects.toThrow('NUL character');
    await expect(startAgain(temporaryFolder('broker'), url)).rejects.toMatchObject(
      refused(78, 'unfinished copy'),
    );
    // The files still have the data from before.
    const { broker } = await startFarhand({ dataDir });
    await broker.close();
    changeFile(dataDir, "UPDATE sessions SET machine_hostname = 'a'");
    const printed = await toDatabase(dataDir, url);
    expect(printed).toContain('sessions: 1');
    await startAgain(dataDir, url);
  }, 60_000);

  test('no broker starts on the database of a killed copy, and the copy can be started again', async () => {
    const url = await (await server()).createDatabase();
    const { dataDir } = await createFiles();
    changeFile(
      dataDir,
      `WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 30000)
       INSERT INTO events (seq, id, type, created_at, data) SELECT i, 'evt_' || i, 'machine.online', i, '{}' FROM n`,
    );
    const words = ['migrate', '--data-dir', dataDir, '--to', url];
    const copying = program('broker/main.ts', words);
    const { query } = await server();
    const copied = async (): Promise<number> => {
      const [row] = await query('SELECT count(*) AS n FROM events', databaseOf(url)).catch(() => []);
      return Number(row?.n ?? 0);
    };
    await expect.poll(copied, { interval: 5, timeout: 30_000 }).toBeGreaterThan(0);
    copying.kill('SIGKILL');
    await new Promise((resolve) => copying.once('exit', resolve));
    await expect(startAgain(temporaryFolder('broker'), url)).rejects.toMatchObject(
      refused(78, 'unfinished copy'),
    );
    const events = (await toDatabase(dataDir, url)).find((line) => line.startsWith('events: '));
    expect(Number(events?.split(' ')[1])).toBeGreaterThan(30_000);
    await startAgain(dataDir, url);
  }, 60_000);

  test('no broker starts on the data directory of an unfinished copy to files', async () => {
    const url = await (await server()).createDatabase();
    const { dataDir } = await createFiles();
    await toDatabase(dataDir, url);
    // A migration that was killed while it copied leaves the directory in this state.
    mkdirSync(join(dataDir, 'migration'));
    writeFileSync(join(dataDir, 'history.db'), 'not complete');
    await expect(startFarhand({ dataDir })).rejects.toMatchObject(refused(78, 'state.json is missing'));
    await toFiles(dataDir, url);
    const { client } = await startFarhand({ dataDir });
    expect((await client.sessions.list()).total).toBe(1);
  }, 60_000);
});

test('a password in the target is refused, because ps lists it', () => {
  expect(() => refusePasswordIn(['migrate', '--to', 'postgres://me:secret-word@h/d'])).toThrow('ps shows');
});
