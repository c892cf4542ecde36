// The output of commands when several brokers share a database. Each broker has the files of the commands that ended at
// it. The others forward requests to it, and count only their own files.
import { existsSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import type { History } from '../../broker/history/history-database.ts';
import { Farhand } from '../../shared/sdk/index.ts';
import { shared } from '../close-after-tests.ts';
import { nextCall, reporting, soon } from '../commands-fixture.ts';
import { linkScripted, scriptedMachine } from '../scripted-agent.ts';
import { startFarhand } from '../start-farhand.ts';
import { startProxy } from '../tcp-proxy.ts';
import { copyOf, createServer, startTwo, withPostgres } from './postgres-fixture.ts';

const server = shared(() => createServer());
const lines = (count: number): string =>
  `${Array.from({ length: count }, (_, n) => `line ${n + 1}`).join('\n')}\n`;
/** Prints 2.9 MB. The database stores only the last MiB. */
const long = { command: "seq -f 'line %.0f' 1 250000", text: lines(250_000) };

/** Two brokers, and an agent that is linked to the first one and can move to the second one. */
async function startWithAgent(flags: readonly string[] = []) {
  const histories: History[] = [];
  const { one, two, ...rest } = await startTwo(await server(), flags, {
    onStores: ({ history }) => void histories.push(history),
  });
  const proxy = await startProxy(one.grpc);
  const agent = await one.agent({ through: proxy.address });
  const { machineId: machine_id } = agent;
  const run = async (system: typeof one, command: string): Promise<string> =>
    (await system.client.commands.create({ machine_id, command, wait: 30_000 })).id;
  return {
    ...{ one, two, ...rest, run, histories },
    /** Moves the agent to the second broker. */
    async move() {
      proxy.aim(two.grpc);
      proxy.cut();
      await agent.linked(true);
      await soon(async () =>
        two.client.commands.create({ machine_id, command: 'true', wait: 5_000 }),
      ).toMatchObject({
        status: 'completed',
      });
    },
  };
}

withPostgres('output of a command that ended at another broker', () => {
  test('is answered with 503 while that broker is away, except for the last MiB, and in full when it is back', async () => {
    const { one, two, run, move, flags } = await startWithAgent();
    const id = await run(one, long.command);
    await move();
    await one.broker.close();
    const start = long.text.length - 1024 * 1024;
    const outputAt = (path: string) => two.call('GET', `/commands/${id}${path}`);
    for (const path of ['/output', '/output?offset=0', '/stream'])
      expect(await outputAt(path)).toMatchObject({
        status: 503,
        body: {
          error: {
            ...{ code: 'unavailable', details: { stream: 'stdout', start } },
            message: expect.stringContaining(`start that broker, or read on from byte ${start}`),
          },
        },
      });
    expect((await outputAt(`/output?offset=${start}`)).body).toBe(long.text.slice(start));
    expect((await outputAt('/output?stream=stderr')).body).toBe('');
    const { text } = await two
      .call('GET', `/commands/${id}/stream`, {
        headers: { 'Last-Event-ID': `${start}.0` },
      })
      .then(({ body }) => ({ text: String(body) }));
    expect(text).toContain('event: exit');
    await startFarhand({ dataDir: one.dataDir, flags });
    await expect.poll(async () => (await outputAt('/output')).status, { timeout: 20_000 }).toBe(200);
    expect((await outputAt('/output')).body).toBe(long.text);
  }, 60_000);

  test('is read from the files of that broker, over REST and as a stream', async () => {
    const { one, two, run, move } = await startWithAgent();
    const first = await run(one, long.command);
    await move();
    const second = await run(two, long.command);
    for (const id of [first, second])
      for (const { call, url, key } of [one, two]) {
        expect((await call('GET', `/commands/${id}/output`)).body).toBe(long.text);
        expect((await call('GET', `/commands/${id}/output?offset=5`)).body).toBe(long.text.slice(5));
        const client = new Farhand({ baseUrl: url, apiKey: key, retries: 0 });
        let text = '';
        for await (const { event, data } of await client.commands.stream({ command_id: id }))
          if (event === 'output' && 'data' in data) text += data.data;
        expect(text).toBe(long.text);
        expect((await call('GET', `/commands/${id}`)).body.data).toMatchObject({ status: 'completed' });
      }
  }, 60_000);

  test('counts against --keep-output of the broker that has the files, and against no other', async () => {
    const { one, two, run, move } = await startWithAgent(['--keep-output', '4MiB']);
    const old = await run(one, long.command);
    await move();
    const stored = (system: typeof one) => readdirSync(join(system.dataDir, 'output'));
    await run(two, long.command);
    // Each broker has one output of 2.9 MB, which is below its limit of 4 MiB. Outputs of the other broker do not
    // count.
    expect(stored(one)).toEqual([old]);
    const last = await run(two, long.command);
    await soon(() => stored(two)).toEqual([last]);
    expect(stored(one)).toEqual([old]);
    expect((await two.call('GET', `/commands/${old}/output`)).body).toBe(long.text);
  }, 60_000);

  test('is found by the broker that had it before others joined', async () => {
    const url = await (await server()).createDatabase();
    const alone = await startFarhand({ flags: ['--database-url', url] });
    const { machineId: machine_id } = await alone.agent();
    const { id } = await alone.client.commands.create({ machine_id, command: long.command, wait: 30_000 });
    await alone.broker.close();
    const shared = ['--database-url', url, '--peer-listen', '127.0.0.1:0'];
    const two = await startFarhand({ flags: shared, dataDir: copyOf(alone.dataDir) });
    expect(existsSync(join(two.dataDir, 'output'))).toBe(false);
    await startFarhand({ flags: shared, dataDir: alone.dataDir });
    await soon(async () => (await two.call('GET', `/commands/${id}/output`)).body).toBe(long.text);
  }, 60_000);

  test('is removed after --keep-history by the broker that has it, or a day later by another one', async () => {
    const { one, two, run, move, query, histories } = await startWithAgent(['--keep-history', '1h']);
    const id = await run(one, long.command);
    await move();
    const age = (hours: number) =>
      query(
        `UPDATE commands SET created_at = created_at - ${hours * 3_600_000}, finished_at = finished_at - ${hours * 3_600_000}
         WHERE id = '${id}'`,
      );
    const count = async () => (await query(`SELECT 1 FROM commands WHERE id = '${id}'`)).length;
    await age(2);
    await histories[1]?.prune();
    expect(await count()).toBe(1);
    await histories[0]?.prune();
    expect(await count()).toBe(0);
    await soon(() => readdirSync(join(one.dataDir, 'output'))).toEqual([]);
    // Normally the broker that has the output removes the command. If it has not done so for a day, another broker
    // does.
    const other = await run(two, long.command);
    await query(
      `UPDATE commands SET output_directory = 'gone', created_at = 0, finished_at = 0 WHERE id = '${other}'`,
    );
    await histories[1]?.prune();
    expect(await query(`SELECT 1 FROM commands WHERE id = '${other}'`)).toEqual([]);
  }, 60_000);
});

withPostgres('output of a command whose machine has moved to another broker', () => {
  test('is read from the present owner, although the former one had files of it', async () => {
    const { one, two, query } = await startTwo(await server());
    const agent = await scriptedMachine(one);
    const { machineId: machine_id } = agent.identity;
    const { id: command_id } = await one.client.commands.async({ machine_id, command: 'long' });
    const { call_id } = await nextCall(agent, 'StartProcess');
    const first = reporting(agent, call_id);
    const bytes = 'x'.repeat(100_000);
    first.stdout(0, bytes);
    await soon(async () => (await one.client.commands.get({ command_id })).stdout_bytes).toBe(100_000);
    first.started();
    await soon(() => query('SELECT 1 FROM commands WHERE kept_bytes > 0')).toHaveLength(1);
    const moved = await linkScripted(two.grpc, agent.identity);
    const again = reporting(moved, (await nextCall(moved, 'FollowProcess')).call_id);
    again.stdout(0, `${bytes}y`);
    await soon(async () => (await two.client.commands.get({ command_id })).stdout_bytes).toBe(100_001);
    await soon(async () => (await one.call('GET', `/commands/${command_id}/output`)).body).toBe(`${bytes}y`);
  });
});
