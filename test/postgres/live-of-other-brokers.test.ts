// Live updates about machines and commands of another broker on the same database.
import { expect, onTestFinished, test } from 'vitest';
import { shared } from '../close-after-tests.ts';
import { soon } from '../commands-fixture.ts';
import { createServer, startTwo, withPostgres } from './postgres-fixture.ts';

const server = shared(() => createServer());

withPostgres('live updates', () => {
  test('name commands that start and end, and machines that go offline, at another broker', async () => {
    const { one, two } = await startTwo(await server());
    const { machineId: machine_id, close } = await one.agent({ name: 'a' });
    await soon(async () => (await two.client.machines.list()).total).toBe(1);
    const ending = new AbortController();
    onTestFinished(() => ending.abort());
    const url = `${two.url}/api/v1/live?topics=machines,commands`;
    const headers = { Authorization: `Bearer ${two.key}` };
    const { body } = await fetch(url, { headers, signal: ending.signal });
    let text = '';
    const reading = (async () => {
      for await (const chunk of body!.pipeThrough(new TextDecoderStream())) text += chunk;
    })().catch(() => {});
    await soon(() => text).toContain('event: ready');
    const { id } = await one.client.commands.create({ machine_id, command: 'true', wait: 20_000 });
    await soon(() => text.split('event: commands').slice(1).join()).toContain(id);
    text = '';
    await close();
    await soon(() => text.split('event: machines').slice(1).join()).toContain('"offline"');
    ending.abort();
    await reading;
    expect(text).not.toContain('event: error');
  });
});

withPostgres('the list of online machines', () => {
  test('omits a machine that went offline at another broker, also while the open work of another machine cannot be loaded', async () => {
    const { one, two, query } = await startTwo(await server());
    const [{ close }, other] = [await one.agent({ name: 'a' }), await one.agent({ name: 'b' })];
    await other.close();
    const online = async () =>
      (await two.client.machines.list({ status: 'online' })).items.map(({ name }) => name);
    await soon(online).toEqual(['a']);
    await query('ALTER TABLE sessions RENAME TO unreadable');
    await query(
      `UPDATE owners SET epoch = epoch + 1, changed = pg_current_xact_id(),
       broker_id = (SELECT id FROM brokers WHERE id <> owners.broker_id) WHERE machine_id = '${other.machineId}'`,
    );
    await soon(() => two.log.join('')).toContain('sessions');
    await close();
    await soon(online).toEqual([]);
    await query('ALTER TABLE unreadable RENAME TO sessions');
  });
});
