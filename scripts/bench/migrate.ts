// Measures `farhand-broker migrate` from files to PostgreSQL and back, and then compares every row.
//
//   npx node scripts/bench/migrate.ts --database-url postgres://USER@HOST/DATABASE      10,000 machines, 100,000 rows a table
//   npx node scripts/bench/migrate.ts --database-url URL --machines 100 --rows 1000 --out scripts/bench/results/migrate.txt
//
// The database must be empty.
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { readdirSync, readFileSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { DatabaseSync } from 'node:sqlite';
import { isDeepStrictEqual, parseArgs } from 'node:util';
import { withBroker } from '../../broker/cli/connect-to-broker.ts';
import { openState } from '../../broker/state/index.ts';
import { joinTokenId, machineId } from '../../shared/api/shared-schemas.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import { fillHistory } from './fleet/fill-history-rows.ts';
import { Figures } from './fleet/print-figures.ts';
import { bench, mebibytes } from './start-and-measure-programs.ts';

const { values } = parseArgs({
  options: {
    'database-url': { type: 'string' },
    machines: { type: 'string', default: '10000' },
    rows: { type: 'string', default: '100000' },
    out: { type: 'string' },
  },
});

const program = join(import.meta.dirname, '../../broker/main.ts');
/** Number of commands with more than 64 KiB of output. The part beyond 64 KiB is stored in a table of its own. */
const longOutputs = 50;
const packagesOfMachine = 10;

async function fill(dataDir: string, machines: number, rows: number): Promise<void> {
  const place = { dataDir, url: undefined, apiKey: undefined, mayCreate: true };
  const { id: keyId } = await withBroker(place, (client) =>
    client.keys.create({ name: 'bench', scopes: ['admin'] }),
  );
  const state = await openState(dataDir);
  const machineIds = Array.from({ length: machines }, () => machineId.parse(newId('machine')));
  await state.change((transaction) => {
    for (const [n, id] of machineIds.entries()) {
      const public_key = Buffer.alloc(32, n).toString('base64');
      const rest = {
        public_key,
        join_token_id: joinTokenId.parse(newId('joinToken')),
        created_at: new Date(0).toISOString(),
      };
      transaction.put('machines', { id, name: `node-${n}`, tags: ['bench', `rack-${n % 40}`], ...rest });
    }
  });
  await state.close();
  const [machine_id = ''] = machineIds;
  const [scheduleId, webhookId] = await withBroker(place, async (client) => {
    const timing = { cron: '0 0 1 1 *', enabled: false };
    const schedule = await client.schedules.create({ name: 'bench', machine_id, command: 'true', ...timing });
    const webhook = await client.webhooks.create({ url: 'https://receiver.example', events: ['session.*'] });
    return [schedule.id, webhook.id];
  });
  const file = join(dataDir, 'history.db');
  fillHistory(file, { rows, machineIds, scheduleId, webhookId, keyId });
  fillMore(file, machineIds);
}

/** Fills tables that fillHistory() leaves empty, including rows with long outputs and with fractional numbers. */
function fillMore(file: string, machineIds: readonly string[]): void {
  const database = new DatabaseSync(file);
  database.exec('PRAGMA synchronous = OFF; BEGIN');
  const facts = JSON.stringify({
    hostname: 'node',
    os: 'linux',
    arch: 'x64',
    agent_version: '0.1.0',
    ip: '::1',
  });
  const fact = database.prepare('INSERT INTO machine_facts VALUES (?, ?, ?, NULL)');
  const metric = database.prepare('INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?, ?, ?)');
  const found = database.prepare('INSERT INTO inventory_packages VALUES (?, ?, ?, ?)');
  for (const [n, id] of machineIds.entries()) {
    fact.run(id, facts.replace('}', ',"capabilities":[]}'), Date.now());
    for (let minute = 0; minute < 10; minute += 1)
      metric.run(id, Date.now() - minute * 60_000, n / 7, 1e9 + n, 8e9, n * 1.5, 1e12, minute / 3);
    for (let k = 0; k < packagesOfMachine; k += 1) found.run(id, `package-${k}`, `1.${n % 9}.${k}`, 'amd64');
  }
  const tail = database.prepare('INSERT INTO command_tails VALUES (?, ?, ?)');
  const commands = database.prepare('SELECT id FROM commands LIMIT ?').all(longOutputs);
  for (const [n, { id }] of commands.entries())
    tail.run(id ?? '', Buffer.alloc(1_048_576, n), Buffer.alloc(n));
  database.exec('COMMIT; PRAGMA wal_checkpoint(TRUNCATE)');
  database.close();
}

/** Runs farhand-broker migrate. Returns its duration, its highest memory, and what it printed. */
async function migrate(...args: string[]): Promise<{ seconds: number; mebibytes: number; text: string }> {
  const begun = performance.now();
  const child = spawn(process.execPath, [program, 'migrate', ...args], {
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  let text = '';
  child.stdout.setEncoding('utf8').on('data', (part: string) => {
    text += part;
  });
  let most = 0;
  // A process that has just ended has no VmHWM. In this case the previous value stays.
  const look = setInterval(() => {
    most = mebibytes(child.pid ?? 0, 'VmHWM') || most;
  }, 100);
  await once(child, 'close');
  clearInterval(look);
  if (child.exitCode !== 0) throw new Error(`migrate ended with ${child.exitCode}`);
  return { seconds: (performance.now() - begun) / 1000, mebibytes: most, text };
}

/** Compares two history.db files. Returns the number of rows of `one`, and the tables whose rows differ in `other`. */
function compare(one: string, other: string): { rows: number; different: string[] } {
  const database = new DatabaseSync(one, { readOnly: true });
  database.prepare('ATTACH ? AS other').run(other);
  const tables = database
    .prepare(
      "SELECT name, wr FROM pragma_table_list WHERE schema = 'main' AND type = 'table' AND name NOT LIKE 'sqlite%'",
    )
    .all()
    .filter(({ name }) => name !== 'installation');
  let rows = 0;
  const different = tables.filter(({ name, wr }) => {
    const select = (schema: string) => `SELECT ${wr === 1 ? '*' : 'rowid, *'} FROM ${schema}.${String(name)}`;
    const count = (sql: string): number =>
      Number(database.prepare(`SELECT count(*) AS n FROM (${sql})`).get()?.n);
    const [here, there] = [count(select('main')), count(select('other'))];
    rows += here;
    return here !== there || count(`${select('main')} EXCEPT ${select('other')}`) > 0;
  });
  database.close();
  return { rows, different: different.map(({ name }) => String(name)) };
}

function stateOf(folder: string): object {
  const text = readFileSync(join(folder, 'state.json'), 'utf8');
  const { checksum: _, outbox: __, ...rest } = JSON.parse(text) as Record<string, unknown>;
  return rest;
}

await bench(async (folder) => {
  const url = values['database-url'];
  if (url === undefined) throw new Error('set --database-url to an empty database');
  const [machines, rows] = [Number(values.machines), Number(values.rows)];
  const figures = new Figures(values.out);
  const dataDir = join(folder, 'broker');
  await fill(dataDir, machines, rows);
  const size = statSync(join(dataDir, 'history.db')).size / 1024 ** 2;
  figures.line(
    `${machines} machines, ${rows} rows in each of five tables; history.db has ${size.toFixed(0)} MiB`,
  );
  const there = await migrate('--data-dir', dataDir, '--to', url);
  const aside = join(
    dataDir,
    readdirSync(dataDir).find((name) => name.startsWith('before-migration-')) ?? '',
  );
  const back = await migrate('--data-dir', dataDir, '--database-url', url, '--to', 'files');
  for (const [what, { seconds, mebibytes, text }] of Object.entries({ there, back })) {
    figures.line(
      text
        .split('\n')
        .filter((line) => line.startsWith('Copied'))[0]
        ?.replace(/ to .* in /, ' in ') ?? '',
    );
    figures.row(what, `${seconds.toFixed(1)} s`, `${mebibytes.toFixed(0)} MiB at most`);
  }
  const found = compare(join(aside, 'history.db'), join(dataDir, 'history.db'));
  const isEqual = found.different.length === 0 && isDeepStrictEqual(stateOf(aside), stateOf(dataDir));
  figures.row(
    'rows compared after migrating to PostgreSQL and back',
    `${found.rows}`,
    isEqual ? 'equal' : 'different',
  );
  figures.print();
  if (!isEqual)
    throw new Error(
      found.different.length > 0
        ? `the migration changed rows of these tables: ${found.different.join(', ')}`
        : 'the migration changed state.json',
    );
});
