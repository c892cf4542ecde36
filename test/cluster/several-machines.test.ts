// Requests about machines of several brokers on one PostgreSQL database: copies between machines, and batches.
import { existsSync, mkdirSync, readFileSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { shared } from '../close-after-tests.ts';
import { gate, soon } from '../commands-fixture.ts';
import { createServer, startTwo, withPostgres } from '../postgres/postgres-fixture.ts';
import { temporaryFolder } from '../start-farhand.ts';

/** Two brokers with a machine each. `near` is the machine of the broker `one`. */
async function startWithMachines() {
  const { one, two, query } = await startTwo(await createServer());
  const { machineId: near } = await one.agent({ name: 'near' });
  const farAgent = await two.agent({ name: 'far' });
  const { machineId: far } = farAgent;
  for (const { call } of [one, two])
    for (const machine of [near, far])
      await soon(async () => (await call('GET', `/machines/${machine}/files/stat?path=/etc`)).status).toBe(
        200,
      );
  return { one, two, near, far, farAgent, query };
}

const system = shared(startWithMachines);

withPostgres('a copy between machines of two brokers', () => {
  test('is refused for the same reasons as on one broker: an existing file, a missing source, a key for one machine', async () => {
    const { one, near, far } = await system();
    const folder = temporaryFolder('copy');
    writeFileSync(join(folder, 'a'), 'a');
    writeFileSync(join(folder, 'b'), 'b');
    const copy = (source: string, destination: string, key?: string) =>
      one.call('POST', `/machines/${near}/files/copy`, {
        ...(key && { key }),
        body: {
          source: join(folder, source),
          destination: join(folder, destination),
          destination_machine_id: far,
        },
      });
    expect(await copy('a', 'b')).toMatchObject({ status: 409, body: { error: { code: 'already_exists' } } });
    expect(await copy('none', 'c')).toMatchObject({
      status: 404,
      body: { error: { code: 'file_not_found' } },
    });
    const { key } = await one.keyed(['files:read', 'files:write'], { machine_ids: [near] });
    expect((await copy('a', 'c', key)).status).toBe(403);
    expect([readFileSync(join(folder, 'b'), 'utf8'), existsSync(join(folder, 'c'))]).toEqual(['b', false]);
  });

  test('copies files and folders both ways, whichever broker is asked', async () => {
    const { one, two, near, far } = await system();
    const folder = temporaryFolder('copy');
    mkdirSync(join(folder, 'tree', 'sub'), { recursive: true });
    const bytes = Buffer.alloc(5_000_000, 'farhand ');
    writeFileSync(join(folder, 'tree', 'sub', 'large'), bytes, { mode: 0o640 });
    writeFileSync(join(folder, 'tree', 'empty'), '');
    for (const [n, { client }] of [one, two].entries()) {
      for (const [machine_id, destination_machine_id] of [
        [near, far],
        [far, near],
      ] as const) {
        const copy = (source: string, destination: string) =>
          client.files.copy({ machine_id, destination_machine_id, source, destination });
        const to = join(folder, `${n}-${machine_id}`);
        expect(await copy(join(folder, 'tree'), to)).toMatchObject({ type: 'directory', files_copied: 2 });
        expect(readFileSync(join(to, 'sub', 'large')).equals(bytes)).toBe(true);
        const file = `${to}-file`;
        expect(await copy(join(folder, 'tree/sub/large'), file)).toMatchObject({
          bytes_copied: bytes.length,
        });
        expect(readFileSync(file).equals(bytes)).toBe(true);
        expect(statSync(file).mode & 0o777).toBe(0o640);
      }
    }
    const { items } = await one.client.events.list({ type: 'file.uploaded', limit: 100 });
    expect(items).toHaveLength(8);
  });
});

withPostgres('a batch on machines of two brokers', () => {
  const asked = async () => {
    const { one, two, near, far } = await system();
    return { one, two, near, far, machine_ids: [near, far] };
  };

  test('ends on both machines with its output, whichever broker is asked', async () => {
    const { one, two, near, far, machine_ids } = await asked();
    for (const { client } of [one, two]) {
      const batch = await client.batches.create({ machine_ids, command: 'echo $((6*7))', wait: 20_000 });
      expect(batch).toMatchObject({ status: 'completed', counts: { completed: 2 } });
      expect(batch.results.map(({ machine_id, stdout }) => [machine_id, stdout])).toEqual([
        [near, '42\n'],
        [far, '42\n'],
      ]);
    }
  });

  test('is followed at either broker, with the output while it runs', async () => {
    const { one, two, near, far, machine_ids } = await asked();
    const { wait, open } = gate();
    const { id } = await one.client.batches.create({
      machine_ids,
      command: `echo begun; ${wait}; echo over`,
      wait: 0,
    });
    const following = [one, two].map(async ({ client }) => {
      const output: Record<string, string> = { [near]: '', [far]: '' };
      const names: string[] = [];
      for await (const { event, data } of await client.batches.stream({ batch_id: id })) {
        names.push(event);
        if ('machine_id' in data && 'data' in data) output[data.machine_id] += data.data;
      }
      return { output, names };
    });
    for (const { client } of [one, two])
      await soon(async () =>
        (await client.batches.get({ batch_id: id })).results.map(({ stdout }) => stdout),
      ).toEqual(['begun\n', 'begun\n']);
    open();
    open();
    const whole = 'begun\nover\n';
    for (const { output, names } of await Promise.all(following)) {
      expect(output).toEqual({ [near]: whole, [far]: whole });
      expect(names.filter((name) => name !== 'output').sort()).toEqual(['end', 'exit', 'exit']);
    }
  });

  test('runs at most `concurrency` commands at once, and none after more than `max_failures` failures', async () => {
    const { one, two, near, far } = await asked();
    const more = await Promise.all([
      one.agent({ name: 'c' }),
      two.agent({ name: 'd' }),
      two.agent({ name: 'e' }),
    ]);
    const machine_ids = [near, far, ...more.map(({ machineId }) => machineId)];
    const folder = temporaryFolder('running');
    const counted = `mkdir ${folder}/$$; ls ${folder} | grep -vc over >>${folder}/over; sleep 0.2; rmdir ${folder}/$$`;
    const limited = await one.client.batches.create({
      machine_ids,
      command: counted,
      concurrency: 2,
      wait: 30_000,
    });
    expect(limited).toMatchObject({ status: 'completed', counts: { completed: 5 } });
    const counts = readFileSync(join(folder, 'over'), 'utf8').trim().split('\n').map(Number);
    expect([counts.length, Math.max(...counts)]).toEqual([5, 2]);
    const failing = await two.client.batches.create({
      ...{ machine_ids, command: 'exit 3', concurrency: 1, max_failures: 1, wait: 30_000 },
    });
    expect(failing.results.map(({ status, reason }) => `${status} ${reason}`).sort()).toEqual([
      ...Array.from({ length: 3 }, () => 'expired max_failures'),
      'failed null',
      'failed null',
    ]);
  }, 60_000);

  test('is cancelled at either broker, and its commands end on both', async () => {
    const { one, two, machine_ids } = await asked();
    for (const { client } of [two, one]) {
      const { id } = await one.client.batches.create({ machine_ids, command: 'sleep 60', wait: 0 });
      await soon(async () => (await one.client.batches.get({ batch_id: id })).counts.running).toBe(2);
      expect(await client.batches.cancel({ batch_id: id })).toMatchObject({
        status: 'cancelled',
        counts: { cancelled: 2 },
      });
    }
  });

  test('leaves no secrets of its commands in the database once all of them have ended', async () => {
    const { two, machine_ids, query } = { ...(await asked()), ...(await system()) };
    const env = { TOKEN: 'a-secret-of-a-batch' };
    const { id } = await two.client.batches.create({ machine_ids, command: 'true', env, wait: 20_000 });
    await soon(() => query(`SELECT spec FROM batches WHERE id = '${id}'`)).toEqual([{ spec: null }]);
  });
});

withPostgres('a schedule with tags on machines of two brokers', () => {
  test('runs on both machines at its times and by hand, whichever broker is asked', async () => {
    const { one, two, near, far } = await system();
    const { client } = one;
    for (const machine_id of [near, far]) await client.machines.update({ machine_id, tags: ['both'] });
    const made = await client.schedules.create({
      ...{ tags: ['both'], name: 'both', command: 'true', cron: '* * * * * *' },
    });
    const schedule_id = made.id;
    for (const machine_id of [near, far])
      await soon(
        async () => (await client.schedules.history({ schedule_id, machine_id, status: 'completed' })).total,
      ).toBeGreaterThan(1);
    await client.schedules.update({ schedule_id, enabled: false });
    for (const broker of [one, two]) {
      const { batch_id } = await broker.client.schedules.run({ schedule_id });
      const runs = { schedule_id, batch_id: batch_id ?? '', status: 'completed' } as const;
      await soon(async () => (await broker.client.schedules.history(runs)).total).toBe(2);
    }
  });

  test('with on_change the owner of each machine watches it, also after a change of owner', async () => {
    const { one, two, near, far, farAgent, query } = await startWithMachines();
    const { client } = one;
    const folder = temporaryFolder('watched');
    const settle = 1000;
    const body = { name: 'x', machine_id: far, command: 'true' };
    const secret = { path: join(farAgent.dataDir, 'identity.json') };
    const refused = await one.call('POST', '/schedules', { body: { ...body, on_change: secret } });
    expect([refused.status, refused.body.error.code]).toEqual([403, 'permission_denied']);
    for (const machine_id of [near, far]) await client.machines.update({ machine_id, tags: ['both'] });
    const { id: schedule_id } = await client.schedules.create({
      ...{ tags: ['both'], name: 'both', command: 'true', on_change: { path: folder, settle } },
    });
    const watched = () => query('SELECT machine_id FROM schedule_marks WHERE seen IS NOT NULL');
    await soon(async () => (await watched()).length).toBe(2);
    const completed = async (machine_id: string) =>
      (await client.schedules.history({ schedule_id, machine_id, status: 'completed' })).total;
    writeFileSync(join(folder, 'a'), '');
    for (const machine of [near, far]) await soon(() => completed(machine)).toBe(1);
    await farAgent.close();
    writeFileSync(join(folder, 'a'), '2');
    await soon(() => completed(near)).toBe(2);
    await one.agent({ dataDir: farAgent.dataDir });
    await soon(() => completed(far)).toBe(2);
    writeFileSync(join(folder, 'a'), '33');
    for (const machine of [near, far]) await soon(() => completed(machine)).toBe(3);
    expect((await two.client.schedules.history({ schedule_id })).total).toBe(6);
  });
});
