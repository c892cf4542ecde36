// What happens to reads, events and due times while the database does not answer, or refuses to write.
import { expect, onTestFinished, test } from 'vitest';
import { Events } from '../../broker/event-log.ts';
import { History } from '../../broker/history/history-database.ts';
import { PostgresDatabase } from '../../broker/history/postgres-database.ts';
import { shared } from '../close-after-tests.ts';
import { nextCall, reporting, soon } from '../commands-fixture.ts';
import { scriptedMachine } from '../scripted-agent.ts';
import { quiet } from '../start-farhand.ts';
import { startProxy } from '../tcp-proxy.ts';
import { createServer, databaseOf, startOn, withPostgres } from './postgres-fixture.ts';

const server = shared(() => createServer());

/** A history on a database behind a proxy. */
async function throughProxy() {
  const { createDatabase, port, query } = await server();
  const proxy = await startProxy(`127.0.0.1:${port}`);
  onTestFinished(() => proxy.close());
  const name = databaseOf(await createDatabase());
  const database_url = `postgres://farhand@${proxy.address}/${name}?sslmode=disable`;
  const history = new History(await PostgresDatabase.open({ database_url }, quiet), quiet);
  let closed: Promise<void> | undefined;
  const close = (): Promise<void> => {
    closed ??= history.close();
    return closed;
  };
  onTestFinished(close);
  return { proxy, history, close, query: (sql: string) => query(sql, name) };
}

withPostgres('without an answer of the database', () => {
  test('a read that hangs delays no stop', async () => {
    const { proxy, history, close } = await throughProxy();
    await history.all('SELECT 1 AS one');
    proxy.holdAnswers();
    const hanging = expect(history.all('SELECT 2 AS two')).rejects.toThrow();
    const began = performance.now();
    await close();
    expect(performance.now() - began).toBeLessThan(8_000);
    await hanging;
  });

  test('an event whose commit is found later reaches its listeners', async () => {
    const { proxy, history, query } = await throughProxy();
    const events = await Events.open(history, 1e9);
    const heard: string[] = [];
    events.listen(['machine.removed'], ({ id }) => heard.push(id));
    proxy.holdAnswers();
    const written = history.write((transaction) =>
      events.emit(transaction, 'machine.removed', { id: 'mach_1', name: 'a' }, {}),
    );
    await soon(() => query('SELECT type FROM events')).toEqual([{ type: 'machine.removed' }]);
    proxy.cut();
    await written;
    expect(heard).toHaveLength(1);
  });
});

withPostgres('with a full disk of the database', () => {
  test('no due time of a schedule is lost', async () => {
    const own = await server();
    const { client, agent, database, log } = await startOn(own);
    const { machineId: machine_id } = await agent();
    const cron = '* * * * * *';
    const { id: schedule_id } = await client.schedules.create({
      machine_id,
      name: 's',
      cron,
      command: 'true',
    });
    const times = async (): Promise<number[]> => {
      const { items } = await client.schedules.history({ schedule_id, limit: 100 });
      return items.map(({ scheduled_for }) => Date.parse(scheduled_for ?? '')).sort((a, b) => a - b);
    };
    await soon(async () => (await times()).length).toBeGreaterThan(1);
    await own.query(
      `CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END $$;
      CREATE TRIGGER full_disk BEFORE INSERT ON schedule_runs FOR EACH ROW EXECUTE FUNCTION full_disk()`,
      database,
    );
    const full = Date.now();
    await soon(() => log.join('')).toContain('a schedule could not be run');
    await own.query('DROP TRIGGER full_disk ON schedule_runs', database);
    await expect
      .poll(async () => {
        const all = await times();
        const last = all.at(-1) ?? 0;
        return last > full + 8_000 && all.length === (last - (all[0] ?? 0)) / 1000 + 1;
      })
      .toBe(true);
  });
});

withPostgres('a NUL character', () => {
  test('in an id is refused like any wrong id', async () => {
    const { call } = await startOn(await server());
    for (const path of [
      '/commands/cmd_%00',
      '/commands?batch_id=%00',
      '/alerts?rule_id=%00',
      '/sessions/%00',
    ])
      expect([path, (await call('GET', path)).status]).toEqual([path, 422]);
  });

  test('in the reason of an agent does not keep a command from ending', async () => {
    const system = await startOn(await server());
    const agent = await scriptedMachine(system);
    const { machineId: machine_id } = agent.identity;
    const begin = async () => {
      const { id: command_id } = await system.client.commands.async({ machine_id, command: 'true' });
      const { call_id } = await nextCall(agent, 'StartProcess');
      const ended = async () => (await system.client.commands.get({ command_id })).reason;
      return { call_id, ended };
    };
    const unstarted = await begin();
    reporting(agent, unstarted.call_id).send({
      exit: { outcome: 'PROCESS_OUTCOME_NOT_STARTED', reason: 'no\0directory' },
    });
    const refused = await begin();
    const answer = agent.answer(refused.call_id);
    answer.write({ error: { code: 'permission_denied', message: 'not\0allowed', details: '{}' } });
    answer.end();
    await soon(unstarted.ended).toBe('no\ufffddirectory');
    await soon(refused.ended).toBe('permission_denied: not\ufffdallowed');
  });
});
