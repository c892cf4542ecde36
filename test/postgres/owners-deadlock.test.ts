// Statements about the owners of many machines at once do not deadlock with each other.
import { expect, onTestFinished, test, vi } from 'vitest';
import type { History } from '../../broker/history/history-database.ts';
import { Presence } from '../../broker/presence/index.ts';
import { soon } from '../commands-fixture.ts';
import { scriptedMachine } from '../scripted-agent.ts';
import { startFarhand } from '../start-farhand.ts';
import { clientOf } from '../start-postgres.ts';
import { createServer, databaseOf, withPostgres } from './postgres-fixture.ts';

withPostgres('links that end at the same time', () => {
  test('do not deadlock with a change about their machines', async () => {
    const { createDatabase, query } = await createServer();
    const url = await createDatabase();
    const database = databaseOf(url);
    const histories: History[] = [];
    const adding = vi.spyOn(Presence.prototype, 'add');
    onTestFinished(() => adding.mockRestore());
    const system = await startFarhand({
      flags: ['--database-url', url, '--peer-listen', '127.0.0.1:0'],
      tuning: { onStores: ({ history }) => histories.push(history) },
    });
    const agents = [await scriptedMachine(system), await scriptedMachine(system)];
    const [first, second] = agents.map(({ identity }) => identity.machineId) as [string, string];
    const waiting = async () =>
      (await query(`SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'`, database)).length;
    const other = await clientOf(url);
    await other.query('BEGIN');
    await other.query('SELECT 1 FROM owners WHERE machine_id = $1 FOR UPDATE', [first]);
    for (const presence of new Set(adding.mock.contexts as Presence[])) presence.drain(0);
    await soon(() => waiting()).toBe(1);
    const change = histories[0]?.write((transaction) => {
      transaction.about(second);
      transaction.about(first);
    });
    // Both statements have reached the database after this many queries.
    for (let n = 0; n < 20; n += 1) await query('SELECT 1', database);
    await other.query('COMMIT');
    await other.end();
    await change;
    await soon(() => query('SELECT machine_id FROM owners WHERE link_id IS NOT NULL', database)).toEqual([]);
    expect(await query(`SELECT deadlocks::int FROM pg_stat_database WHERE datname = '${database}'`)).toEqual([
      { deadlocks: 0 },
    ]);
  });
});
