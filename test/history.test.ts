// The file history.db: a file of another installation is refused, the writes of one turn share a transaction, resolved
// writes are durable, and old rows are removed.
import { execFileSync } from 'node:child_process';
import { cpSync, existsSync, renameSync, rmSync, statSync, truncateSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { DatabaseSync } from 'node:sqlite';
import { describe, expect, onTestFinished, test, vi } from 'vitest';
import { AlertRecords } from '../broker/alerts/alert-records.ts';
import { withSocket } from '../broker/cli/call-or-start-local-broker.ts';
import { Events } from '../broker/event-log.ts';
import type { History, HistoryTransaction, OutboxEntry, Row } from '../broker/history/history-database.ts';
import { openHistory } from '../broker/history/open-sqlite-file.ts';
import { rowsSince } from '../broker/history/time-ordered-table.ts';
import { Idempotency } from '../broker/request-checks/idempotency.ts';
import { allRoutes, type Caller } from '../shared/api/route-table.ts';
import { now } from '../shared/clock.ts';
import { newId } from '../shared/ids-and-secrets.ts';
import { mayMount } from './file-operations-fixture.ts';
import { quiet, startFarhand, temporaryFolder } from './start-farhand.ts';
import { waitFor } from './wait-for.ts';
import { startReceiver, startWebhookSystem } from './webhook-receivers.ts';

const table = ['CREATE TABLE notes (id TEXT NOT NULL UNIQUE, at INTEGER NOT NULL, text TEXT NOT NULL)'];

interface Bench {
  history: History;
  file: string;
  /** Inserts a row and returns its id. */
  note(transaction: HistoryTransaction, id: string, at?: number, text?: string): string;
  /** Returns the ids of the rows that another connection sees, which are the committed ones. */
  committed(): string[];
}

/** Creates a history with one table. Closes it at the end of the test. */
async function createBench(): Promise<Bench> {
  const file = join(temporaryFolder('history'), 'history.db');
  const history = openHistory(file, 'installation', quiet);
  await history.migrate('notes', table);
  const reader = new DatabaseSync(file);
  onTestFinished(async () => {
    reader.close();
    await history.close();
  });
  return {
    history,
    file,
    note(transaction, id, at = now(), text = '') {
      transaction.run('INSERT INTO notes VALUES (?, ?, ?)', id, at, text);
      return id;
    },
    committed: () =>
      reader
        .prepare('SELECT id FROM notes ORDER BY rowid')
        .all()
        .map((row) => String(row.id)),
  };
}

/** Makes the data directory of a broker that has stored something and was closed. */
async function usedFolder(): Promise<string> {
  const system = await startFarhand();
  await system.broker.close();
  return system.dataDir;
}

/** Makes the data directory of a killed broker: a copy of a running broker's directory while nothing is written. */
async function killedFolder(): Promise<string> {
  const { dataDir } = await startFarhand();
  const copy = temporaryFolder('killed');
  for (const name of ['state.json', 'authority.json', 'history.db', 'history.db-wal']) {
    cpSync(join(dataDir, name), join(copy, name));
  }
  return copy;
}

function change(file: string, sql: string): void {
  const database = new DatabaseSync(file);
  database.exec(sql);
  database.close();
}

const refused = (part: string) => ({
  name: 'StartError',
  exitCode: 78,
  message: expect.stringContaining(part),
});

describe('a start is refused', () => {
  test('when history.db belongs to another installation', async () => {
    const [mine, other] = [await usedFolder(), await usedFolder()];
    renameSync(join(other, 'history.db'), join(mine, 'history.db'));
    await expect(startFarhand({ dataDir: mine })).rejects.toMatchObject(
      refused('belong to two installations'),
    );
  });

  test('when a newer broker wrote history.db', async () => {
    const dataDir = await usedFolder();
    change(join(dataDir, 'history.db'), 'PRAGMA user_version = 2');
    await expect(startFarhand({ dataDir })).rejects.toMatchObject(refused('newer farhand-broker'));
  });

  test('when the tables of one kind of record are newer than this broker knows', async () => {
    const dataDir = await usedFolder();
    change(join(dataDir, 'history.db'), "UPDATE migrations SET steps = steps + 1 WHERE noun = 'commands'");
    await expect(startFarhand({ dataDir })).rejects.toMatchObject(
      refused('commands of a newer farhand-broker'),
    );
  });

  test('when history.db is no database', async () => {
    const dataDir = await usedFolder();
    writeFileSync(join(dataDir, 'history.db'), 'x'.repeat(8192));
    await expect(startFarhand({ dataDir })).rejects.toMatchObject(refused('--new-history'));
  });

  test('when history.db is missing, and accepted with --new-history and at later starts', async () => {
    const dataDir = await usedFolder();
    rmSync(join(dataDir, 'history.db'));
    await expect(startFarhand({ dataDir })).rejects.toMatchObject(refused('--new-history'));
    expect(existsSync(join(dataDir, 'history.db'))).toBe(false);
    const again = await startFarhand({ dataDir, flags: ['--new-history'] });
    const { machineId } = await again.agent();
    await again.broker.close();
    const { client } = await startFarhand({ dataDir });
    expect((await client.events.list({ machine_id: machineId, type: 'machine.registered' })).total).toBe(1);
  });
});

describe('a history.db that has lost its content', () => {
  test('is refused when it is empty, and accepted with --new-history', async () => {
    const dataDir = await usedFolder();
    truncateSync(join(dataDir, 'history.db'));
    for (const _start of ['first', 'second']) {
      await expect(startFarhand({ dataDir })).rejects.toMatchObject(refused('is empty'));
      expect(statSync(join(dataDir, 'history.db')).size).toBe(0);
    }
    await startFarhand({ dataDir, flags: ['--new-history'] });
  });

  test('is refused when all of it was in a -wal that is missing', async () => {
    const dataDir = await usedFolder();
    rmSync(join(dataDir, 'history.db'));
    change(join(dataDir, 'history.db'), 'PRAGMA journal_mode = WAL');
    for (const _start of ['first', 'second']) {
      await expect(startFarhand({ dataDir })).rejects.toMatchObject(refused('--new-history'));
    }
    await startFarhand({ dataDir, flags: ['--new-history'] });
  });

  test.each<[string, (wal: string) => void]>([
    ['gone', (wal) => rmSync(wal)],
    ['empty', (wal) => truncateSync(wal)],
  ])(
    'is refused when the -wal of a killed broker is %s, and accepted with --old-history',
    async (_, lose) => {
      const dataDir = await killedFolder();
      lose(join(dataDir, 'history.db-wal'));
      for (const _start of ['first', 'second']) {
        await expect(startFarhand({ dataDir })).rejects.toMatchObject(refused('--old-history'));
      }
      const again = await startFarhand({ dataDir, flags: ['--old-history'] });
      await again.broker.close();
      await startFarhand({ dataDir });
    },
  );
});

describe('a history.db that has lost nothing is accepted', () => {
  test('after a clean end, after kill -9 and after both', async () => {
    const dataDir = await killedFolder();
    for (const _start of ['first', 'second']) {
      const { broker } = await startFarhand({ dataDir });
      await broker.close();
      expect(existsSync(join(dataDir, 'history.db-wal'))).toBe(false);
    }
  });

  test('from a backup of a broker that runs', async () => {
    const { dataDir } = await startFarhand();
    const copy = temporaryFolder('restored');
    await withSocket(dataDir, async (_client, post) => {
      cpSync((await post<{ directory: string }>('/local/backup')).directory, copy, { recursive: true });
    });
    expect(existsSync(join(copy, 'history.db-wal'))).toBe(false);
    await startFarhand({ dataDir: copy });
  });

  test('of version 0.1.0, which does not know whether there must be a -wal', async () => {
    const dataDir = await usedFolder();
    const older =
      "ALTER TABLE installation DROP COLUMN running; DELETE FROM migrations WHERE noun = 'history'";
    change(join(dataDir, 'history.db'), older);
    await startFarhand({ dataDir });
  });

  test('when a full disk prevented close from recording that the history was closed cleanly', async () => {
    const file = join(temporaryFolder('history'), 'history.db');
    const history = openHistory(file, 'installation', quiet);
    const full = "CREATE TRIGGER full BEFORE UPDATE ON installation BEGIN SELECT RAISE(ABORT, 'full'); END";
    change(file, full);
    await history.close();
    expect(statSync(`${file}-wal`).size).toBeGreaterThan(0);
    change(file, 'DROP TRIGGER full');
    await history.close();
    expect(existsSync(`${file}-wal`)).toBe(false);
  });
});

describe('a write that fails', () => {
  test('undoes only itself, and the other writes of its turn get their own results', async () => {
    const { history, note, committed } = await createBench();
    const outcomes = await Promise.allSettled([
      history.write((transaction) => note(transaction, 'a')),
      history.write((transaction) => {
        note(transaction, 'b');
        throw new Error('not this one');
      }),
      history.write((transaction) => note(transaction, 'a')),
      history.write((transaction) => note(transaction, 'c')),
    ]);
    expect(outcomes).toEqual([
      { status: 'fulfilled', value: 'a' },
      { status: 'rejected', reason: expect.objectContaining({ message: 'not this one' }) },
      { status: 'rejected', reason: expect.objectContaining({ message: expect.stringContaining('UNIQUE') }) },
      { status: 'fulfilled', value: 'c' },
    ]);
    expect(committed()).toEqual(['a', 'c']);
  });

  test('runs no hook of a change that was undone', async () => {
    const { history, note } = await createBench();
    const received: string[] = [];
    const outcomes = await Promise.allSettled([
      history.write((transaction) => transaction.committed(() => received.push('kept'))),
      history.write((transaction) => {
        note(transaction, 'a');
        transaction.committed(() => received.push('undone'));
        throw new Error('no');
      }),
    ]);
    expect(outcomes.map(({ status }) => status)).toEqual(['fulfilled', 'rejected']);
    expect(received).toEqual(['kept']);
  });

  test('because of an entry of an unknown kind undoes the entries before it', async () => {
    const { history, note, committed } = await createBench();
    history.onEntry('note', ({ id }: { kind: string; id: string }, transaction) => {
      note(transaction, id);
    });
    const write = history.write((transaction) => {
      const known = { kind: 'note', id: 'a' };
      transaction.append(known);
      transaction.append({ kind: 'unknown' });
    });
    await expect(write).rejects.toThrow('unknown');
    expect(committed()).toEqual([]);
  });

  test('with its whole transaction rejects every caller, and the next one works', async () => {
    const { history, file, note, committed } = await createBench();
    const other = new DatabaseSync(file);
    onTestFinished(() => other.close());
    other.exec('BEGIN IMMEDIATE');
    const received = vi.fn();
    const outcomes = await Promise.allSettled([
      history.write((transaction) => note(transaction, 'a')),
      history.write((transaction) => {
        note(transaction, 'b');
        transaction.committed(received);
      }),
    ]);
    expect(outcomes.map(({ status }) => status)).toEqual(['rejected', 'rejected']);
    other.exec('ROLLBACK');
    expect(await history.write((transaction) => note(transaction, 'c'))).toBe('c');
    expect(committed()).toEqual(['c']);
    expect(received).not.toHaveBeenCalled();
  });

  test('because a statement failed rejects, even if the write catches the error and goes on', async () => {
    const { history, note, committed } = await createBench();
    const write = history.write((transaction) => {
      note(transaction, 'a');
      try {
        note(transaction, 'a');
      } catch {
        return 'went on';
      }
      return 'twice';
    });
    await expect(write).rejects.toThrow('UNIQUE');
    expect(committed()).toEqual([]);
  });

  test('because an entry could not be written rejects', async () => {
    const { history, note, committed } = await createBench();
    history.onEntry('twice', async (_entry: OutboxEntry, transaction) => {
      await transaction.get('SELECT 1');
      note(transaction, 'a');
    });
    const write = history.write((transaction) => {
      for (const _time of ['first', 'second']) transaction.append({ kind: 'twice' });
    });
    await expect(write).rejects.toThrow('UNIQUE');
    expect(committed()).toEqual([]);
  });

  test('because its transaction has ended throws', async () => {
    const { history, note, committed } = await createBench();
    const left: HistoryTransaction[] = [];
    await history.write((transaction) => void left.push(transaction));
    expect(() => note(left[0]!, 'a')).toThrow('has ended');
    await expect(left[0]!.get('SELECT 1')).rejects.toThrow('has ended');
    expect(committed()).toEqual([]);
  });

  test('because history is closed rejects', async () => {
    const file = join(temporaryFolder('history'), 'history.db');
    const history = openHistory(file, 'installation', quiet);
    await history.close();
    await expect(history.write(() => 1)).rejects.toThrow();
  });
});

describe('a write', () => {
  test('is committed and fully synced before it resolves', async () => {
    const { history, note, committed } = await createBench();
    for (const id of ['a', 'b', 'c']) {
      await history.write((transaction) => note(transaction, id));
      expect(committed()).toContain(id);
    }
    expect(await history.get('PRAGMA synchronous')).toEqual({ synchronous: 2 });
    expect(await history.get('PRAGMA journal_mode')).toEqual({ journal_mode: 'wal' });
  });

  test('shares its transaction with the other writes of its turn, and each write has its own result', async () => {
    const { history, note, committed } = await createBench();
    const seen: string[][] = [];
    const own = (id: string) => (transaction: HistoryTransaction) => {
      seen.push(committed());
      return note(transaction, id);
    };
    const together = await Promise.all(['a', 'b', 'c'].map((id) => history.write(own(id))));
    expect(together).toEqual(['a', 'b', 'c']);
    expect(await history.write(own('d'))).toBe('d');
    // `seen` has the committed rows at each write. The first three writes share a transaction, so nothing is committed
    // while they run. The fourth runs after their commit.
    expect(seen).toEqual([[], [], [], ['a', 'b', 'c']]);
  });

  test('reads its own writes, and those of earlier changes in its turn', async () => {
    const { history, note } = await createBench();
    const count = async (transaction: HistoryTransaction) =>
      (await transaction.all('SELECT id FROM notes')).length;
    const own = (id: string) => async (transaction: HistoryTransaction) => {
      const before = await count(transaction);
      note(transaction, id);
      return [before, await count(transaction)];
    };
    const counts = await Promise.all(['a', 'b', 'c'].map((id) => history.write(own(id))));
    expect(counts).toEqual([
      [0, 1],
      [1, 2],
      [2, 3],
    ]);
  });

  test('lets other work run between two groups of changes of one turn, which stay in order', async () => {
    const { history, note, committed } = await createBench();
    const ids = Array.from({ length: 350 }, (_, n) => `note_${n}`);
    const seen = new Set<number>();
    const look = (): void => {
      seen.add(committed().length);
      if (!seen.has(ids.length)) setImmediate(look);
    };
    const writes = ids.map((id) => history.write((transaction) => note(transaction, id)));
    look();
    await Promise.all(writes);
    await expect.poll(() => seen.has(ids.length)).toBe(true);
    expect(committed()).toEqual(ids);
    expect([...seen]).toEqual(expect.arrayContaining([0, 100, 200, 300]));
  });

  test('is not seen by others before its commit, even while it waits for its reads', async () => {
    const { history, note } = await createBench();
    const seen: Promise<unknown>[] = [];
    const look = () => void seen.push(history.all('SELECT id FROM notes'));
    await history
      .write(async (transaction) => {
        note(transaction, 'a');
        look();
        await transaction.get('SELECT 1');
        look();
        throw new Error('no');
      })
      .catch(() => {});
    expect(await Promise.all(seen)).toEqual([[], []]);
  });

  test('that is requested while others run is in the group of the next turn', async () => {
    const { history, note, committed } = await createBench();
    const later: Promise<string[]>[] = [];
    await history.write(async (transaction) => {
      note(transaction, 'a');
      await transaction.get('SELECT 1');
      later.push(
        history.write((next) => {
          note(next, 'b');
          return committed();
        }),
      );
    });
    expect(await Promise.all(later)).toEqual([['a']]);
    expect(committed()).toEqual(['a', 'b']);
  });

  test('runs the hooks of its changes after the commit, in order', async () => {
    const { history, note, committed } = await createBench();
    const received: [string, string[]][] = [];
    const write = (id: string) =>
      history.write((transaction) => {
        note(transaction, id);
        transaction.committed(() => received.push([id, committed()]));
      });
    await Promise.all([write('a'), write('b')]);
    expect(received).toEqual([
      ['a', ['a', 'b']],
      ['b', ['a', 'b']],
    ]);
  });

  test('that waits is committed by close', async () => {
    const file = join(temporaryFolder('history'), 'history.db');
    const history = openHistory(file, 'installation', quiet);
    await history.migrate('notes', table);
    const write = history.write((transaction) => transaction.run("INSERT INTO notes VALUES ('a', 1, '')"));
    await history.close();
    await write;
    const again = openHistory(file, 'installation', quiet);
    onTestFinished(() => again.close());
    expect(await again.all('SELECT id FROM notes')).toEqual([{ id: 'a' }]);
  });

  test('that is requested while history closes is committed, or rejects', async () => {
    const file = join(temporaryFolder('history'), 'history.db');
    const history = openHistory(file, 'installation', quiet);
    await history.migrate('notes', table);
    await history.read([{ sql: 'SELECT id FROM notes', values: [] }]);
    const closing = history.close();
    let count = 0;
    const insert = (transaction: HistoryTransaction) =>
      transaction.run("INSERT INTO notes VALUES (?, 1, '')", String(count));
    // The writes follow each other, so one of them waits when the database is closed.
    await expect(
      (async () => {
        for (;;) {
          await history.write(insert);
          count += 1;
        }
      })(),
    ).rejects.toThrow('history.db is closed');
    await closing;
    const again = openHistory(file, 'installation', quiet);
    onTestFinished(() => again.close());
    expect(await again.get('SELECT count(*) AS n FROM notes')).toEqual({ n: count });
  });

  test('costs the same with 100,000 events as with none', async () => {
    const { history } = await createBench();
    const events = await Events.open(history, 3_600_000);
    const emit = () =>
      history.write((transaction) => {
        events.emit(transaction, 'machine.online', { id: 'mach_0', name: 'web' }, {});
      });
    const median = async (): Promise<number> => {
      const times: number[] = [];
      for (let n = 0; n < 101; n += 1) {
        const started = performance.now();
        await emit();
        times.push(performance.now() - started);
      }
      return times.sort((a, b) => a - b)[50]!;
    };
    await median();
    const before = await median();
    // One statement is ten times as fast as 100,000 calls of emit().
    await history.write((transaction) => {
      transaction.run(`WITH RECURSIVE copies(n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM copies LIMIT 100000)
        INSERT INTO events (id, type, created_at, machine_id, data)
        SELECT 'evt_' || n, type, created_at, 'mach_' || n % 100, data
        FROM copies JOIN (SELECT * FROM events LIMIT 1)`);
    });
    expect(await history.get('SELECT count(*) > 100000 AS ok FROM events')).toEqual({ ok: 1 });
    expect(await median()).toBeLessThan(before * 5 + 2);
  });
});

describe('an event', () => {
  test('that is applied a second time changes nothing and reaches no listener', async () => {
    const { history } = await createBench();
    const events = await Events.open(history, 3_600_000);
    const received: string[] = [];
    events.listen(['machine.online'], ({ id }) => received.push(id));
    const entries: { kind: string }[] = [];
    events.emit({ append: (entry) => void entries.push(entry) }, 'machine.online', undefined, {});
    for (const _time of ['first', 'second']) {
      await history.write((transaction) => {
        for (const entry of entries) transaction.append(entry);
      });
    }
    expect((await history.all('SELECT id FROM events')).map(({ id }) => id)).toEqual(received);
    expect(received).toHaveLength(1);
  });
});

/**
 * Returns a request with an Idempotency-Key that ends with `answer`, and a function that counts how often the request
 * has run.
 */
function touchOnce() {
  const answer = Promise.withResolvers<unknown>();
  let runs = 0;
  const request = {
    route: allRoutes().find(({ noun, operation }) => noun === 'files' && operation === 'touch')!.route,
    caller: { key_id: 'key_a', headers: new Headers(), signal: new AbortController().signal } as Caller,
    ...{ key: 'once', path: '/', query: '', body: {}, content: undefined, recall: () => undefined },
    run() {
      runs += 1;
      return answer.promise;
    },
  };
  return { request, answer, runs: () => runs };
}

test('a request and its repeat run once, even if the repeat arrives while the answer is being stored', async () => {
  const { history } = await createBench();
  const idempotency = await Idempotency.open(history);
  const { request, answer, runs } = touchOnce();
  const first = idempotency.answer(request);
  await waitFor(() => expect(runs()).toBe(1));
  // One transaction contains two steps: the repeat looks for an earlier request, and then the answer of `first` is
  // stored. So the repeat finds no answer yet.
  const repeat = idempotency.answer(request);
  answer.resolve({ created: true });
  await expect(repeat).rejects.toMatchObject({ code: 'conflict', details: { under_way: true } });
  expect(await first).toEqual({ created: true });
  expect(await idempotency.answer(request)).toEqual({ created: true });
  expect(runs()).toBe(1);
});

test('a repeat that fails in the database does not let a later repeat run beside the first request', async () => {
  const { history } = await createBench();
  const idempotency = await Idempotency.open(history);
  const { request, answer, runs } = touchOnce();
  const first = idempotency.answer(request);
  await waitFor(() => expect(runs()).toBe(1));
  const rename = (from: string, to: string): Promise<unknown> =>
    history.write((transaction) => transaction.run(`ALTER TABLE ${from} RENAME TO ${to}`));
  await rename('idempotency', 'away');
  await expect(idempotency.answer(request)).rejects.toThrow('no such table');
  await rename('away', 'idempotency');
  await expect(idempotency.answer(request)).rejects.toMatchObject({ code: 'conflict' });
  answer.resolve({ created: true });
  expect(await first).toEqual({ created: true });
  expect(runs()).toBe(1);
});

test('a stream has each event once and in order while events are written, some of which are undone', async () => {
  const { history } = await createBench();
  const events = await Events.open(history, 3_600_000);
  const stop = new AbortController();
  const caller = { may: () => true, reachable: () => undefined, signal: stop.signal } as unknown as Caller;
  caller.headers = new Headers();
  const sent: string[] = [];
  const stream = await events.handlers.stream({}, caller);
  const reading = (async () => {
    for await (const event of stream as AsyncIterable<{ data: { data: { n: number } } }>)
      sent.push(String(event.data.data.n));
  })();
  const written: string[] = [];
  const write = (n: number) =>
    history
      .write(async (transaction) => {
        events.emit(transaction, 'machine.online', undefined, { n });
        await transaction.get('SELECT 1');
        if (n % 7 === 0) throw new Error('no');
        transaction.committed(() => void written.push(String(n)));
      })
      .catch(() => {});
  for (let n = 0; n < 400; n += 4) await Promise.all([write(n), write(n + 1), write(n + 2), write(n + 3)]);
  await waitFor(() => expect(sent.length).toBeGreaterThanOrEqual(written.length));
  stop.abort(new Error('over'));
  await expect(reading).rejects.toThrow('over');
  expect(sent).toEqual(written);
});

test('events stay in order, whatever the clock, and are found by their time', async () => {
  const { history } = await createBench();
  const events = await Events.open(history, Number.MAX_SAFE_INTEGER);
  // The clock was set back once, and many events have the same millisecond.
  const times = [5_000, 5_000, 4_000, ...Array.from({ length: 3_000 }, () => 6_000), 6_001, 9_000];
  await history.write((journal) => {
    for (const [n, at] of times.entries()) {
      const event = {
        id: `evt_${n}`,
        type: 'machine.online',
        timestamp: new Date(at).toISOString(),
        data: {},
      };
      journal.append({ kind: 'event', event, machine_id: null } as OutboxEntry);
    }
    events.emit(journal, 'machine.online', undefined, {});
  });
  const rows = await history.all('SELECT id, seq, created_at FROM events ORDER BY seq');
  expect(rows.slice(0, -1).map(({ id }) => id)).toEqual(times.map((_, n) => `evt_${n}`));
  for (const { seq, created_at } of rows)
    expect(Number(seq)).toBeGreaterThanOrEqual(Number(created_at) * 1_000);
  const [where, ...values] = rowsSince(new Date(6_001)) ?? [''];
  const since = await history.all(`SELECT created_at FROM events WHERE ${where} ORDER BY seq`, ...values);
  expect(since.slice(0, -1).map(({ created_at }) => created_at)).toEqual([6_001, 9_000]);
});

const idsOf = (rows: Row[]): string[] => rows.map((row) => String(row.id));

describe('pruning', () => {
  test('removes only rows that are older and meet the condition', async () => {
    const { history, note, committed } = await createBench();
    const gone: string[] = [];
    history.retain({
      table: 'notes',
      column: 'at',
      keepMs: 3_600_000,
      where: "text != 'open'",
      removed: (rows) => void gone.push(...idsOf(rows)),
    });
    await history.write((transaction) => {
      note(transaction, 'older', now() - 3_700_000);
      note(transaction, 'open', now() - 3_700_000, 'open');
      note(transaction, 'younger', now() - 3_500_000);
      note(transaction, 'new');
    });
    await history.prune();
    expect(committed()).toEqual(['open', 'younger', 'new']);
    expect(gone).toEqual(['older']);
    await history.prune();
    expect(gone).toEqual(['older']);
  });

  test('deletes an alert after its retention time since it was resolved, not since it was opened', async () => {
    const { history } = await createBench();
    const events = await Events.open(history, 3_600_000);
    const alerts = await AlertRecords.open({ state: { machines: new Map() }, history, events }, 3_600_000);
    const insert = `INSERT INTO alerts (id, rule_id, name, kind, subject, status, message, created_at, repeats, resolved_at)
      VALUES (?, ?, 'disk', 'metric', 'm', 'resolved', '', ?, 0, ?)`;
    await history.write((transaction) => {
      transaction.run(insert, 'ended now', 'long', now() - 7_200_000, now());
      transaction.run(insert, 'ended then', 'old', now() - 7_200_000, now() - 3_700_000);
    });
    await history.prune();
    expect([await alerts.has('rule_id', 'long'), await alerts.has('rule_id', 'old')]).toEqual([true, false]);
  });

  test('of rows that are ordered by time stops at the first rows that are not old enough', async () => {
    const { history, note, committed } = await createBench();
    history.retain({ table: 'notes', column: 'at', keepMs: 3_600_000, ordered: 'rowid' });
    await history.write((transaction) => {
      // These rows were written while the clock was ahead.
      for (let n = 0; n < 600; n += 1) note(transaction, `ahead${n}`, now() + 3_600_000);
      for (let n = 0; n < 700; n += 1) note(transaction, `old${n}`, n);
      for (let n = 0; n < 600; n += 1) note(transaction, `new${n}`);
      note(transaction, 'late', 0);
    });
    await history.prune();
    const kept = (name: string) => Array.from({ length: 600 }, (_, n) => `${name}${n}`);
    expect(committed()).toEqual([...kept('ahead'), ...kept('new'), 'late']);
  });

  test('removes all older rows in small steps, oldest first', async () => {
    const { history, note, committed } = await createBench();
    const steps: string[][] = [];
    history.retain({
      table: 'notes',
      column: 'at',
      keepMs: 1_000,
      removed: (rows) => void steps.push(idsOf(rows)),
    });
    await history.write((transaction) => {
      for (let n = 1_200; n > 0; n -= 1) note(transaction, `n${n}`, n);
      note(transaction, 'new');
    });
    const between = history.prune();
    // A write that is requested meanwhile does not wait for the removal of all old rows.
    await history.write((transaction) => note(transaction, 'meanwhile'));
    expect(committed().length).toBeGreaterThan(2);
    await between;
    expect(committed()).toEqual(['new', 'meanwhile']);
    expect(steps.length).toBeGreaterThan(2);
    expect(new Set(steps[0])).toEqual(
      new Set(Array.from({ length: steps[0]!.length }, (_, n) => `n${n + 1}`)),
    );
  });
});

test('a query that fails rejects without effect on others, and a closed history rejects every query', async () => {
  const history = openHistory(join(temporaryFolder('history'), 'history.db'), 'installation', quiet);
  const one = { sql: 'SELECT ? AS n', values: [1] };
  await expect(history.read([one, { sql: 'SELECT unknown', values: [] }])).rejects.toThrow('no such column');
  expect(await history.read([one, one])).toEqual([[{ n: 1 }], [{ n: 1 }]]);
  await history.close();
  await expect(history.read([one])).rejects.toThrow('history.db is closed');
});

test('a history that is closed waits for the list that is being read, and for no further ones', async () => {
  const { history, file } = await createBench();
  const sql =
    'WITH RECURSIVE c(n) AS (VALUES(1) UNION ALL SELECT n + 1 FROM c WHERE n < 300000) SELECT count(*) FROM c';
  const reads = Array.from({ length: 20 }, () => history.read([{ sql, values: [] }]));
  const ends = Promise.allSettled(reads);
  await reads[0];
  await history.close();
  expect((await ends).at(-1)?.status).toBe('rejected');
  expect(existsSync(`${file}-wal`)).toBe(false);
});

test('totals of lists stay exact through inserts, changes of status, replaced rows and deletions', async () => {
  const system = await startWebhookSystem();
  const { client, history } = system;
  const { machineId: machine_id } = await system.agent();
  const receiver = await startReceiver();
  const webhook = await client.webhooks.create({
    url: receiver.url,
    events: ['command.completed', 'command.failed'],
  });
  const cron = '0 0 1 1 *';
  const schedule = await client.schedules.create({ machine_id, name: 'yearly', cron, command: 'true' });
  for (const command of ['true', 'false']) await client.commands.create({ machine_id, command, wait: 5 });
  await client.schedules.run({ schedule_id: schedule.id });
  const delivered = async (): Promise<number> =>
    (await client.webhooks.deliveries({ webhook_id: webhook.id, status: 'delivered' })).total;
  await receiver.heard(3);
  await expect.poll(() => delivered()).toBe(3);
  expect((await client.commands.list({})).total).toBe(3);
  expect((await client.commands.list({ status: 'failed' })).total).toBe(1);
  expect((await client.commands.list({ status: 'failed', machine_id })).total).toBe(1);
  expect((await client.webhooks.deliveries({ webhook_id: webhook.id })).total).toBe(3);
  await history.write((transaction) => {
    transaction.run('INSERT OR REPLACE INTO schedule_runs SELECT * FROM schedule_runs');
    transaction.run("DELETE FROM events WHERE type = 'machine.online'");
    transaction.run("DELETE FROM commands WHERE status = 'failed'");
  });
  expect((await client.commands.list({})).total).toBe(2);
  expect((await client.commands.list({ status: 'failed' })).total).toBe(0);
});

describe('counts of rows', () => {
  const machines = ['mach_1', 'mach_2', null];
  const types = ['machine.online', 'machine.offline'];
  const first = Date.parse('2026-01-01T00:00:00Z');
  /**
   * Adds events 700 ms apart. The broker counts rows by periods of 15 minutes. In the middle of a period, the times
   * jump back once by 1,000 s.
   */
  async function addEvents(history: History, count: number): Promise<void> {
    await history.write((journal) => {
      for (let n = 0; n < count; n += 1) {
        const at = first + n * 700 - (n > count / 2 ? 1_000_000 : 0);
        const event = {
          id: newId('event'),
          type: types[n % 2],
          timestamp: new Date(at).toISOString(),
          data: {},
        };
        journal.append({ kind: 'event', event, machine_id: machines[n % 3] ?? null } as OutboxEntry);
      }
    });
  }

  /** Expects that with each of these filters the total of the list is the real number of rows. */
  async function expectExact(events: Events, history: History): Promise<void> {
    const caller = { may: () => true, reachable: () => undefined } as unknown as Caller;
    const rows = await history.all('SELECT created_at, type, machine_id FROM events');
    const times = [
      undefined,
      new Date(first + 1_300_000),
      new Date(first + 900_000),
      new Date(first + 5_000),
    ];
    for (const type of [undefined, 'machine.offline'] as const) {
      for (const machine_id of [undefined, 'mach_2'] as const) {
        for (const since of times) {
          for (const until of times) {
            const input = {
              type,
              machine_id,
              since,
              until,
              limit: 5,
              offset: 3,
              sort: '-created_at',
            } as const;
            const { items, total } = await events.handlers.list(input as never, caller);
            const right = rows.filter(
              (row) =>
                (!type || row.type === type) &&
                (!machine_id || row.machine_id === machine_id) &&
                (!since || Number(row.created_at) >= since.getTime()) &&
                (!until || Number(row.created_at) < until.getTime()),
            ).length;
            expect(total, JSON.stringify(input)).toBe(right);
            expect(items.length, JSON.stringify(input)).toBe(Math.max(0, Math.min(5, right - 3)));
          }
        }
      }
    }
  }

  const countedRows = async (history: History): Promise<number> =>
    Number(
      (
        await history.get(
          "SELECT count(*) AS n FROM events WHERE seq <= (SELECT last FROM counted WHERE name = 'events')",
        )
      )?.n,
    );

  test('give exact totals before rows are counted, afterwards, and when counted rows change or go', async () => {
    const { history } = await createBench();
    const events = await Events.open(history, Number.MAX_SAFE_INTEGER);
    await addEvents(history, 3_500);
    expect(await countedRows(history)).toBe(0);
    await expectExact(events, history);
    await history.countRows();
    expect(await countedRows(history)).toBe(3_000);
    await expectExact(events, history);
    await history.write((transaction) => {
      transaction.run("UPDATE events SET type = 'machine.offline' WHERE seq % 7 = 0");
      transaction.run('DELETE FROM events WHERE seq IN (SELECT seq FROM events ORDER BY seq LIMIT 300)');
      transaction.run('INSERT OR REPLACE INTO events SELECT * FROM events WHERE seq % 5 = 0');
    });
    await expectExact(events, history);
    await addEvents(history, 1_200);
    await history.countRows();
    await history.prune();
    await expectExact(events, history);
  });

  test('include rows whose numbers were used before', async () => {
    const { history } = await createBench();
    const events = await Events.open(history, Number.MAX_SAFE_INTEGER);
    await addEvents(history, 2_000);
    await history.countRows();
    await history.write((transaction) => {
      transaction.run('CREATE TABLE saved AS SELECT * FROM events ORDER BY seq DESC LIMIT 900');
      transaction.run('DELETE FROM events WHERE seq IN (SELECT seq FROM saved)');
      transaction.run('INSERT INTO events SELECT * FROM saved');
    });
    await expectExact(events, history);
  });
});

test.runIf(mayMount)('a change that does not fit on the disk is undone as a whole', async () => {
  const disk = temporaryFolder('small');
  execFileSync('mount', ['-t', 'tmpfs', '-o', 'size=4m', 'tmpfs', disk]);
  onTestFinished(() => void execFileSync('umount', ['-l', disk]));
  const history = openHistory(join(disk, 'history.db'), 'installation', quiet);
  onTestFinished(() => history.close());
  await history.migrate('notes', table);
  // SQLite writes a large transaction to the disk before its end. If that fails, it undoes all statements so far.
  const texts = { first: '', large: 'x'.repeat(6 * 1024 * 1024), last: '' };
  const written = history.write((transaction) => {
    for (const [id, text] of Object.entries(texts))
      transaction.run('INSERT INTO notes VALUES (?, 0, ?)', id, text);
  });
  await expect(written).rejects.toThrow('full');
  expect(await history.all('SELECT id FROM notes')).toEqual([]);
});
