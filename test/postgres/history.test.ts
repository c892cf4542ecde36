// History on PostgreSQL: writes share transactions, a failed write undoes only itself, resolved writes are durable, and
// SQL is translated from SQLite.
import { expect, onTestFinished, test } from 'vitest';
import { History, type HistoryTransaction, type Row } from '../../broker/history/history-database.ts';
import { PostgresDatabase } from '../../broker/history/postgres-database.ts';
import { createCounts, sumOf, totalOf } from '../../broker/history/row-counts.ts';
import { stepToPostgres, toPostgres } from '../../broker/history/translate-to-postgres.ts';
import { shared } from '../close-after-tests.ts';
import { quiet } from '../start-farhand.ts';
import { clientOf } from '../start-postgres.ts';
import { startProxy } from '../tcp-proxy.ts';
import { createServer, databaseOf, withPostgres } from './postgres-fixture.ts';

const server = shared(() => createServer());
const table = ['CREATE TABLE notes (id TEXT NOT NULL UNIQUE, at INTEGER NOT NULL, text TEXT NOT NULL)'];

async function createHistory(url?: string, brokerId?: string) {
  const { createDatabase, query } = await server();
  const database_url = url ?? (await createDatabase());
  const history = new History(await PostgresDatabase.open({ database_url }, quiet, brokerId), quiet);
  onTestFinished(() => history.close());
  await history.migrate('notes', table);
  return {
    history,
    note(transaction: HistoryTransaction, id: string): string {
      transaction.run('INSERT INTO notes VALUES (?, ?, ?)', id, 1, '');
      return id;
    },
    /** Returns the ids of the rows that another connection sees. */
    committed: async () =>
      (await query('SELECT id FROM notes ORDER BY rowid', databaseOf(database_url))).map(({ id }) => id),
  };
}

withPostgres('a write', () => {
  test('that fails undoes only itself, and the others of its group get their own results', async () => {
    const { history, note, committed } = await createHistory();
    const received: string[] = [];
    const outcomes = await Promise.allSettled([
      history.write((transaction) => {
        transaction.committed(() => received.push('a'));
        return note(transaction, 'a');
      }),
      history.write((transaction) => {
        transaction.committed(() => received.push('b'));
        note(transaction, 'b');
        throw new Error('not this one');
      }),
      history.write((transaction) => note(transaction, 'a')),
      history.write(async (transaction) => {
        const before = await transaction.all('SELECT id FROM notes');
        note(transaction, 'c');
        return before.length;
      }),
    ]);
    expect(outcomes).toEqual([
      { status: 'fulfilled', value: 'a' },
      { status: 'rejected', reason: expect.objectContaining({ message: 'not this one' }) },
      { status: 'rejected', reason: expect.objectContaining({ message: expect.stringContaining('unique') }) },
      { status: 'fulfilled', value: 1 },
    ]);
    expect([await committed(), received]).toEqual([['a', 'c'], ['a']]);
  });

  test('that is alone and fails, at once or in a statement that nothing awaits, leaves nothing', async () => {
    const { history, note, committed } = await createHistory();
    await history.write((transaction) => note(transaction, 'a'));
    const twice = history.write((transaction) => {
      note(transaction, 'b');
      note(transaction, 'a');
    });
    await expect(twice).rejects.toThrow('unique');
    const thrown = history.write((transaction) => {
      note(transaction, 'c');
      throw new Error('no');
    });
    await expect(thrown).rejects.toThrow('no');
    expect(await history.write((transaction) => note(transaction, 'd'))).toBe('d');
    expect(await committed()).toEqual(['a', 'd']);
  });

  test('is answered as it is stored if the connection breaks before the server has reported anything', async () => {
    const { createDatabase, port, query } = await server();
    const proxy = await startProxy(`127.0.0.1:${port}`);
    onTestFinished(() => proxy.close());
    const name = databaseOf(await createDatabase());
    const { history, note } = await createHistory(
      `postgres://farhand@${proxy.address}/${name}?sslmode=disable`,
      'broker_a',
    );
    const stored = () => query('SELECT id FROM notes', name);
    proxy.holdAnswers();
    const written = history.write((transaction) => note(transaction, 'a'));
    await expect.poll(stored).toEqual([{ id: 'a' }]);
    proxy.cut();
    expect(await written).toBe('a');
  });

  test('whose connection breaks while several brokers share the database resolves once the slow commit has ended', async () => {
    // The server waits at each commit for a standby that does not exist, so this test has a server of its own.
    const { createDatabase, port, query } = await createServer();
    const proxy = await startProxy(`127.0.0.1:${port}`);
    onTestFinished(() => proxy.close());
    const name = databaseOf(await createDatabase());
    const through = `postgres://farhand@${proxy.address}/${name}?sslmode=disable`;
    const { history, note } = await createHistory(through, 'broker_a');
    const waiting = () => query("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'");
    const asked = () =>
      query(
        "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'UPDATE writers SET session%' AND pid <> pg_backend_pid()",
      );
    await query("ALTER SYSTEM SET synchronous_standby_names = 'missing'");
    await query('SELECT pg_reload_conf()');
    // PostgreSQL's checkpointer decides whether commits wait. After a checkpoint, it has read the new setting.
    await query('CHECKPOINT');
    const written = history.write((transaction) => note(transaction, 'a'));
    await expect.poll(async () => (await waiting()).length).toBe(1);
    proxy.cut();
    await expect.poll(async () => (await asked()).length).toBeGreaterThan(0);
    await query('ALTER SYSTEM RESET synchronous_standby_names');
    await query('SELECT pg_reload_conf()');
    expect(await written).toBe('a');
  });

  test('that the server ends because of a deadlock is refused as unavailable and leaves nothing', async () => {
    const { createDatabase, query } = await server();
    const url = await createDatabase();
    const { history, note } = await createHistory(url);
    await history.write((transaction) => ['a', 'b'].map((id) => note(transaction, id)));
    const other = await clientOf(url);
    onTestFinished(() => other.end());
    // Only the history looks for a deadlock, so the server ends the transaction of the history.
    await other.query("SET deadlock_timeout = '1h'");
    await other.query('BEGIN');
    await other.query("UPDATE notes SET text = 'other' WHERE id = 'b'");
    let blocked: Promise<unknown> | undefined;
    const written = history.write(async (transaction) => {
      await transaction.all("UPDATE notes SET text = 'own' WHERE id = 'a'");
      blocked = other.query("UPDATE notes SET text = 'other' WHERE id = 'a'");
      const waiting = () => query("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'");
      await expect.poll(async () => (await waiting()).length).toBe(1);
      transaction.run("UPDATE notes SET text = 'own' WHERE id = 'b'");
    });
    await expect(written).rejects.toMatchObject({ code: 'unavailable' });
    await blocked;
    await other.query('ROLLBACK');
    expect(await history.all('SELECT DISTINCT text FROM notes')).toEqual([{ text: '' }]);
  });

  test('is seen by reads that are requested after it, before it has resolved', async () => {
    const { history, note } = await createHistory();
    const write = history.write((transaction) => note(transaction, 'a'));
    expect(await history.all('SELECT id FROM notes')).toEqual([{ id: 'a' }]);
    await write;
  });

  test('passes the answer of a statement to its hooks, although it does not wait for the answer', async () => {
    const { history } = await createHistory();
    let seen: unknown;
    const inHook = new Promise((resolve) => {
      void history.write((transaction) => {
        transaction.committed(() => resolve(seen));
        const sql = "INSERT INTO notes VALUES ('a', ?, '') RETURNING at";
        void transaction.ask(sql, [7], (row) => {
          seen = row?.at;
        });
      });
    });
    expect(await inHook).toBe(7);
  });
});

withPostgres('a list', () => {
  test('reads all queries from one snapshot, and a failed query harms no other', async () => {
    const { history, note } = await createHistory();
    const queries = [1, 2].map(() => ({ sql: 'SELECT count(*) AS n FROM notes', values: [] }));
    let isOver = false;
    const writing = (async () => {
      for (let n = 0; !isOver; n += 1) await history.write((transaction) => note(transaction, `n${n}`));
    })();
    for (let n = 0; n < 50; n += 1) {
      const [first, second] = await history.read(queries);
      expect(first).toEqual(second);
    }
    isOver = true;
    await writing;
    await expect(history.read([...queries, { sql: 'SELECT unknown', values: [] }])).rejects.toThrow(
      'unknown',
    );
    expect(await history.read([{ sql: 'SELECT CAST(? AS BIGINT) AS n', values: [1] }])).toEqual([[{ n: 1 }]]);
  });
});

withPostgres('totals of lists', () => {
  test('are exact at every moment while rows are added, changed, deleted and counted', async () => {
    const { history } = await createHistory();
    const counted = { table: 'jobs', time: 'at', number: 'rowid', columns: ['status'] } as const;
    await history.migrate('jobs', [
      `CREATE TABLE jobs (id TEXT NOT NULL UNIQUE, machine_id TEXT, at INTEGER NOT NULL, status TEXT NOT NULL);
      ${createCounts(counted)}`,
    ]);
    history.count(counted);
    const total = (status: string) => {
      const [sql, values] = totalOf(counted, ['status'], ['status = ?', [status]], {}) ?? ['', []];
      return [
        { sql, values },
        { sql: 'SELECT count(*) AS n FROM jobs WHERE status = ?', values: [status] },
      ];
    };
    let isOver = false;
    let next = 0;
    const insert = (transaction: HistoryTransaction): void => {
      for (let left = 40; left > 0; left -= 1) {
        next += 1;
        transaction.run(
          "INSERT INTO jobs (id, machine_id, at, status) VALUES (?, 'm', ?, 'open')",
          `${next}`,
          next,
        );
      }
    };
    const end = (transaction: HistoryTransaction): void => {
      transaction.run("UPDATE jobs SET status = 'done' WHERE CAST(id AS INTEGER) % 7 = ?", next % 7);
      transaction.run('DELETE FROM jobs WHERE CAST(id AS INTEGER) % 50 = ?', next % 50);
    };
    const working = [insert, insert, end].map(async (change) => {
      while (!isOver) await history.write(change);
    });
    const counting = (async () => {
      while (!isOver) await history.countRows();
    })();
    const wrong: unknown[] = [];
    while (next < 6_000) {
      for (const status of ['open', 'done']) {
        const [[sums], [real]] = (await history.read(total(status))) as [Row[], Row[]];
        if (sumOf(sums ?? {}) !== Number(real?.n)) wrong.push({ status, sums, real });
      }
    }
    isOver = true;
    await Promise.all([...working, counting]);
    expect(wrong).toEqual([]);
    const [row] = await history.all("SELECT last FROM counted WHERE name = 'jobs'");
    expect(Number(row?.last)).toBeGreaterThan(3_000);
  });
});

test('queries and tables are translated', () => {
  expect(toPostgres('a = ? AND +b IN (SELECT value FROM json_each(?3)) AND c < ?')).toBe(
    'a = $1 AND b IN (SELECT value FROM json_array_elements_text($3::json)) AND c < $4',
  );
  expect(toPostgres('SELECT count(*) FROM t NOT INDEXED WHERE n + 1 > max(t.n, 2)')).toBe(
    'SELECT count(*) FROM t WHERE n + 1 > greatest(t.n, 2)',
  );
  expect(stepToPostgres('CREATE TABLE a (b INTEGER, c BLOB) WITHOUT ROWID; CREATE INDEX d ON a (b)')).toBe(
    'CREATE TABLE a (b BIGINT, c BYTEA);\nCREATE INDEX d ON a (b)',
  );
});
