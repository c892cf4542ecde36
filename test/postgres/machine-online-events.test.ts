// The events machine.online and machine.offline while the database does not accept them yet.
import { onTestFinished, test } from 'vitest';
import { leapingClock, soon } from '../commands-fixture.ts';
import { joinScripted, linkScripted } from '../scripted-agent.ts';
import { clientOf } from '../start-postgres.ts';
import { createServer, startOn, withPostgres } from './postgres-fixture.ts';

withPostgres('a machine that goes offline while machine.online is being written', () => {
  test('still gets machine.offline', async () => {
    const clock = leapingClock();
    const server = await createServer();
    const system = await startOn(server);
    const { client } = system;
    const blocker = await clientOf(system.databaseUrl);
    onTestFinished(() => blocker.end());
    const identity = await joinScripted(system);
    const { machineId: machine_id } = identity;
    await blocker.query('BEGIN; LOCK TABLE announced IN ACCESS EXCLUSIVE MODE');
    const { control } = await linkScripted(system.grpc, identity);
    clock.leap(2_000);
    const waiting = "SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'announced'::regclass";
    await soon(() => server.query(waiting, system.database)).toHaveLength(1);
    control.cancel();
    await soon(async () => (await client.machines.get({ machine_id })).status).toBe('offline');
    clock.leap(2_000);
    await blocker.query('ROLLBACK');
    const types = async () =>
      (await client.events.list({ sort: 'created_at' })).items.map(({ type }) => type);
    await soon(types).toEqual(['machine.registered', 'machine.online', 'machine.offline']);
  });
});
