// Writes invented rows of two days into the history.db of a stopped broker. A broker would take hours to record as
// many.
import { DatabaseSync } from 'node:sqlite';
import { newTimedId } from '../../../shared/ids-and-secrets.ts';

export interface HistoryParams {
  rows: number;
  /** Ids of the machines. The rows get them in turn. */
  machineIds: string[];
  scheduleId: string;
  webhookId: string;
  keyId: string;
}

const spanMs = 48 * 3_600_000;

/** Columns by name: each is an SQL expression of `n`, the number of the row, and `at`, its time in milliseconds. */
type Columns = Record<string, string>;

/**
 * Returns SQL that computes an id from the row number `n`, so that another table can refer to the row. Ids of
 * successive rows are far apart, like random ids.
 */
const id = (prefix: string): string => `'${prefix}_' || printf('%022d', (n * 2654435761) % 4294967291)`;
/**
 * Every tenth command belongs to a batch, and a new batch begins after this many commands. So each batch has a hundred
 * commands.
 */
const rowsOfBatch = 1_000;
const batchOf = (n: string): string => `'batch_' || printf('%022d', ${n})`;
const json = (text: string): string => `'${text.replaceAll("'", "''")}'`;
/**
 * Returns SQL for a column that has the value `seldom`, such as a failure, in one row of a thousand, and otherwise
 * `usual`.
 */
const rare = (usual: string, seldom: string): string => `iif(n % 1000 = 7, '${seldom}', '${usual}')`;
const machine = 'machine_of(n)';

const attempts = json(
  JSON.stringify([{ at: '2026-01-01T00:00:00.000Z', status_code: 200, duration: 12, error: null }]),
);

function tables({ scheduleId, webhookId, keyId }: HistoryParams): Record<string, Columns> {
  return {
    events: {
      seq: 'at * 1000 + 1',
      id: id('evt'),
      type: `CASE WHEN n % 1000 = 7 THEN 'command.failed' WHEN n % 2 = 0 THEN 'command.started' ELSE 'command.completed' END`,
      created_at: 'at',
      machine_id: machine,
      data: `json_object('machine_id', ${machine}, 'machine_name', 'node', 'command_id', ${id('cmd')}, 'command', 'true',
        'status', 'completed', 'exit_code', 0)`,
    },
    commands: {
      id: id('cmd'),
      machine_id: machine,
      command: `'systemctl is-active web-' || (n % 50)`,
      status: rare('completed', 'failed'),
      exit_code: 'iif(n % 1000 = 7, 1, 0)',
      stdout: `CAST('active' AS BLOB)`,
      stderr: `X''`,
      stdout_bytes: '6',
      stderr_bytes: '0',
      stdout_start: '0',
      stderr_start: '0',
      kept_bytes: '0',
      created_at: 'at',
      started_at: 'at + 2',
      finished_at: 'at + 40',
      requested_by: `'${keyId}'`,
      schedule_id: `iif(n % 10 = 3, '${scheduleId}', NULL)`,
      batch_id: `iif(n % 10 = 5, ${batchOf(`n / ${rowsOfBatch}`)}, NULL)`,
      journal_id: `'journal'`,
      cancel: '0',
    },
    batches: {
      id: batchOf('n'),
      command: `'true'`,
      created_at: 'at',
      requested_by: `'${keyId}'`,
      cancel: '0',
    },
    audit: {
      seq: 'at * 1000 + 1',
      id: 'audit_id(at)',
      created_at: 'at',
      key_id: `iif(n % 1000 = 7, 'key_0000000000000000000000', '${keyId}')`,
      key_name: `'bench'`,
      action: rare('commands.create', 'machines.update'),
      machine_id: machine,
      what: json('{"command":"true"}'),
      request_id: id('req'),
      result: rare('ok', 'forbidden'),
      address: `'127.0.0.1'`,
    },
    schedule_runs: {
      decided_at: 'at',
      id: id('run'),
      schedule_id: `'${scheduleId}'`,
      machine_id: machine,
      command_id: id('cmd'),
      status: rare('completed', 'failed'),
      trigger: `'cron'`,
      scheduled_for: 'at',
      started_at: 'at + 2',
      finished_at: 'at + 40',
      exit_code: 'iif(n % 1000 = 7, 1, 0)',
      duration: '38',
    },
    webhook_deliveries: {
      id: id('dlv'),
      webhook_id: `'${webhookId}'`,
      event_id: id('evt'),
      type: rare('command.completed', 'command.failed'),
      machine_id: machine,
      created_at: 'at',
      status: rare('delivered', 'failed'),
      reason: `iif(n % 1000 = 7, 'attempts_failed', NULL)`,
      tries: '1',
      attempts,
    },
  };
}

/** Adds the rows. The broker that uses the file must have stopped. */
export function fillHistory(file: string, params: HistoryParams): void {
  const { rows, machineIds } = params;
  const database = new DatabaseSync(file);
  database.exec('PRAGMA synchronous = OFF; PRAGMA cache_size = -1000000');
  database.function(
    'machine_of',
    { deterministic: true },
    (n) => machineIds[Number(n) % machineIds.length] ?? '',
  );
  database.function('audit_id', (at) => newTimedId('audit', Number(at)));
  const first = Date.now() - spanMs - 60_000;
  for (const [table, columns] of Object.entries(tables(params))) {
    const count = table === 'batches' ? Math.ceil(rows / rowsOfBatch) : rows;
    const added = `INSERT INTO ${table} (${Object.keys(columns).join(', ')})
      WITH RECURSIVE numbered (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbered LIMIT ${count}),
        timed AS (SELECT n, ${first} + CAST(n * ${spanMs}.0 / ${count} AS INTEGER) AS at FROM numbered)
      SELECT ${Object.values(columns).join(', ')} FROM timed`;
    database.exec(added);
  }
  database.exec('PRAGMA wal_checkpoint(TRUNCATE)');
  database.close();
}
