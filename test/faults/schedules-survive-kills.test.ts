// Schedules under kill -9 and under load. Each due time runs once or has a row with the reason, and many schedules that
// are due in the same second start in time.
import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { withSocket } from '../../broker/cli/call-or-start-local-broker.ts';
import { now, sleep } from '../../shared/clock.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { leapingClock, nextCall, reporting, soon } from '../commands-fixture.ts';
import { type ScriptedAgent, scriptedMachine } from '../scripted-agent.ts';
import { startFarhand, temporaryFolder } from '../start-farhand.ts';
import { startBrokerProgram } from './broker-program.ts';

// For a longer run by hand: KILLS=50 npx vitest run test/faults/schedules-survive-kills.test.ts
const kills = Number(process.env.KILLS ?? 3);
const crowd = Number(process.env.SCHEDULES ?? 200);
const machines = Number(process.env.MACHINES ?? 4);

type Run = Awaited<ReturnType<Farhand['schedules']['history']>>['items'][number];

async function allRuns(client: Farhand, schedule_id: string): Promise<Run[]> {
  const all: Run[] = [];
  for (;;) {
    const page = await client.schedules.history({
      schedule_id,
      limit: 100,
      offset: all.length,
      sort: 'started_at',
    });
    all.push(...page.items);
    if (!page.has_more)
      return all.toSorted((a, b) => ((a.scheduled_for ?? '') < (b.scheduled_for ?? '') ? -1 : 1));
  }
}

/** Starts a broker and agents as separate processes. */
async function programs(agents = 1) {
  const broker = await startBrokerProgram();
  for (let n = 0; n < agents; n += 1) await broker.agent(undefined, ['--tags', 'fleet']);
  return {
    client: broker.client,
    machine_id: await broker.machineId(),
    broker,
    async killBroker(): Promise<void> {
      await broker.kill();
      await broker.start();
    },
  };
}

/** Waits until all commands have ended. The agents may take long to reconnect. */
function allEnded(client: Farhand): Promise<void> {
  const open = async (): Promise<number> => {
    const [queued, running] = [{ status: 'queued' }, { status: 'running' }] as const;
    return (await client.commands.list(queued)).total + (await client.commands.list(running)).total;
  };
  return expect.poll(open, { timeout: 60_000, interval: 100 }).toBe(0);
}

/** Counts how often each line occurs in a file. */
function countsIn(file: string): Map<string, number> {
  const counts = new Map<string, number>();
  for (const id of readFileSync(file, 'utf8').trim().split('\n')) counts.set(id, (counts.get(id) ?? 0) + 1);
  return counts;
}

test(`kill -9 of the broker ${kills} times around the second: each due time has one row, and ran once, or is missed or skipped`, async () => {
  const { client, machine_id, killBroker } = await programs();
  const ran = join(temporaryFolder('ran'), 'ran');
  // Each command writes its own id to the file.
  const command = `echo $FARHAND_COMMAND_ID >> ${ran}`;
  const params = { machine_id, command, cron: '* * * * * *', overlap: 'allow' } as const;
  const made = [
    await client.schedules.create({ ...params, name: 'none' }),
    await client.schedules.create({ ...params, name: 'last', catch_up: 'last' }),
    await client.schedules.create({ ...params, name: 'all', catch_up: 'all' }),
  ];
  await soon(() => existsSync(ran)).toBe(true);
  for (let n = 0; n < kills; n += 1) {
    // Kills the broker between 30 ms before and 60 ms after the second at which the schedules are due.
    const offset = -30 + ((n * 37) % 90);
    await sleep(1000 - (Date.now() % 1000) + offset + (offset < 0 ? 1000 : 0));
    await killBroker();
  }
  const until = new Date().toISOString();
  for (const { id: schedule_id } of made) await client.schedules.update({ schedule_id, enabled: false });
  await allEnded(client);
  const counts = countsIn(ran);
  for (const { id, name } of made) {
    const last = async () => Date.parse((await allRuns(client, id)).at(-1)?.scheduled_for ?? '');
    await expect.poll(last).toBeGreaterThanOrEqual(Date.parse(until) - 1000);
    const runs = await allRuns(client, id);
    const times = runs.map(({ scheduled_for }) => Date.parse(scheduled_for ?? ''));
    const first = times[0] ?? 0;
    expect([name, times]).toEqual([name, times.map((_, index) => first + index * 1000)]);
    for (const { status, command_id, scheduled_for, reason } of runs) {
      const count = command_id === null ? 0 : (counts.get(command_id) ?? 0);
      // Due times whose run has not begun when the schedule is disabled are skipped. Most of them belong to the
      // schedule `all`.
      const isDisabled = reason?.includes('was changed or disabled');
      const expected = count === 1 ? 'completed' : isDisabled ? 'skipped' : 'missed';
      expect([name, scheduled_for, reason, status, count]).toEqual([
        ...[name, scheduled_for, reason],
        ...[expected, count === 1 ? 1 : 0],
      ]);
    }
    expect(runs.some(({ status }) => status === 'completed')).toBe(true);
  }
}, 400_000);

test('a broker that ends between a change of a schedule and the rows of the times it skips: each due time has one row', async () => {
  const { client, machine_id, broker } = await programs();
  const params = { name: 'changed', command: 'true', cron: '* * * * * *', overlap: 'allow' } as const;
  const made = [
    await client.schedules.create({ ...params, machine_id }),
    await client.schedules.create({ ...params, tags: ['fleet'] }),
  ].map(({ id }) => ({ id, changedAt: [] as number[] }));
  const rows = async (id: string) =>
    (await allRuns(client, id)).map(({ scheduled_for }) => Date.parse(scheduled_for ?? ''));
  for (const { id } of made) await expect.poll(async () => (await rows(id)).length).toBeGreaterThan(0);
  await broker.kill();
  // A broker without agents makes the changes, but writes no rows of schedules: as if it were killed after each change.
  for (const changes of [{ cron: '*/2 * * * * *' }, { timezone: 'Asia/Tokyo' }, { enabled: false }]) {
    // Due times pass, which the next change skips.
    await sleep(3_000);
    await withSocket(broker.dataDir, async (local) => {
      for (const { id, changedAt } of made) {
        const { updated_at } = await local.schedules.update({ schedule_id: id, ...changes });
        changedAt.push(Date.parse(updated_at));
      }
    });
  }
  await sleep(1_000);
  await broker.start();
  for (let starts = 0; starts < 2; starts += 1) {
    for (const { id, changedAt } of made) {
      const [first = 0] = await rows(id);
      const [other = 0, , until = 0] = changedAt;
      const expected: number[] = [];
      for (let at = first; at <= until; at += 1000) if (at <= other || at % 2000 === 0) expected.push(at);
      await expect.poll(() => rows(id), { timeout: 20_000 }).toEqual(expected);
      const statuses = (await allRuns(client, id)).map(({ status }) => status);
      expect(statuses.slice(-3)).toEqual(['skipped', 'skipped', 'skipped']);
      expect(await client.schedules.get({ schedule_id: id })).not.toHaveProperty('replaced');
    }
    await broker.kill();
    await broker.start();
  }
}, 120_000);

test(`kill -9 of the broker ${kills} times while a changed path settles: each change runs its command once`, async () => {
  const { client, machine_id, killBroker } = await programs();
  const folder = temporaryFolder('watched');
  const [watched, ran] = [join(folder, 'watched'), join(folder, 'ran')];
  const { id: schedule_id } = await client.schedules.create({
    ...{ machine_id, name: 'watch', command: `cat ${watched} >> ${ran}; echo >> ${ran}` },
    on_change: { path: watched, settle: 1000 },
  });
  const lines = () => (existsSync(ran) ? readFileSync(ran, 'utf8').trim().split('\n') : []);
  // The agent watches the path only some time after the schedule was created. Earlier changes do not count.
  await expect
    .poll(() => writeFileSync(watched, `${now()}`) ?? lines().length, { interval: 3_000, timeout: 60_000 })
    .toBeGreaterThan(0);
  await expect.poll(async () => (await client.commands.list({ status: 'running' })).total).toBe(0);
  const before = lines().length;
  for (let n = 0; n < kills; n += 1) {
    writeFileSync(watched, `change ${n}`);
    // Kills the broker between 50 ms before and 100 ms after the run is started.
    await sleep(950 + ((n * 53) % 150));
    await killBroker();
    await expect.poll(() => lines().at(-1), { timeout: 60_000 }).toBe(`change ${n}`);
  }
  expect(lines().slice(before)).toEqual(Array.from({ length: kills }, (_, n) => `change ${n}`));
  const statuses = async () => new Set((await allRuns(client, schedule_id)).map(({ status }) => status));
  await expect.poll(statuses, { timeout: 30_000 }).toEqual(new Set(['completed']));
}, 400_000);

test(`kill -9 of the broker ${kills} times while a schedule with tags fires: each machine has one row for each time`, async () => {
  const { client, killBroker } = await programs(3);
  const ids = (await client.machines.list()).items.map(({ id }) => id);
  const ran = join(temporaryFolder('ran'), 'ran');
  const command = `echo $FARHAND_COMMAND_ID >> ${ran}`;
  const params = { tags: ['fleet'], command, cron: '* * * * * *', name: 'tagged' };
  const { id: schedule_id } = await client.schedules.create({ ...params, overlap: 'allow' });
  await soon(() => existsSync(ran)).toBe(true);
  for (let n = 0; n < kills; n += 1) {
    // Kills the broker in the first 40 ms of a second, while the commands are created.
    await sleep(1000 - (Date.now() % 1000) + ((n * 13) % 40));
    await killBroker();
    await client.schedules.run({ schedule_id }).catch(() => {});
  }
  await client.schedules.update({ schedule_id, enabled: false });
  await allEnded(client);
  const counts = countsIn(ran);
  expect(new Set(counts.values())).toEqual(new Set([1]));
  const due = (await allRuns(client, schedule_id)).filter(({ scheduled_for }) => scheduled_for !== null);
  for (const machine of ids) {
    const rows = due.filter(({ machine_id }) => machine_id === machine);
    const times = rows.map(({ scheduled_for }) => Date.parse(scheduled_for ?? ''));
    const first = times[0] ?? 0;
    expect([machine, times]).toEqual([machine, times.map((_, index) => first + index * 1000)]);
    for (const { status, command_id, scheduled_for } of rows) {
      const count = counts.get(command_id ?? '') ?? 0;
      expect([scheduled_for, status]).toEqual([scheduled_for, count === 1 ? 'completed' : 'missed']);
    }
  }
  const ends = ids.map((id) => due.findLast(({ machine_id }) => machine_id === id)?.scheduled_for);
  expect(ends.every((end) => Math.abs(Date.parse(end ?? '') - Date.parse(ends[0] ?? '')) <= 1000)).toBe(true);
}, 400_000);

/** Makes a scripted agent end each command at once. */
async function obey(agent: ScriptedAgent): Promise<void> {
  for (;;) {
    const { call_id } = await nextCall(agent, 'StartProcess');
    const report = reporting(agent, call_id);
    report.started();
    report.exited(0);
    report.end();
  }
}

/**
 * Starts a measurement. The returned function ends it, and returns the most CPU milliseconds of one turn of the event
 * loop.
 */
function longestTurn(): () => number {
  let longest = 0;
  let before = process.threadCpuUsage();
  const timer = setInterval(() => {
    const { user, system } = process.threadCpuUsage(before);
    before = process.threadCpuUsage();
    longest = Math.max(longest, (user + system) / 1000);
  }, 5);
  return () => {
    clearInterval(timer);
    return Math.round(longest);
  };
}

test(`${crowd} schedules that are due in one second on ${machines} machines all start within 5 s, and do not block the loop`, async () => {
  const clock = leapingClock();
  const system = await startFarhand();
  const agents = await Promise.all(Array.from({ length: machines }, () => scriptedMachine(system)));
  for (const agent of agents) obey(agent).catch(() => {});
  // Late enough that all schedules are created before this time.
  const due = new Date(Math.ceil((now() + 30_000) / 1000) * 1000);
  const cron = `${due.getUTCSeconds()} ${due.getUTCMinutes()} ${due.getUTCHours()} * * *`;
  for (let made = 0; made < crowd; made += 50) {
    const some = Array.from({ length: Math.min(50, crowd - made) }, (_, index) => {
      const machine_id = agents[(made + index) % machines]?.identity.machineId ?? '';
      return system.client.schedules.create({ machine_id, name: 'x', command: 'true', cron });
    });
    await Promise.all(some);
  }
  const { total } = await system.client.schedules.list();
  clock.leap(due.getTime() - now() - 100);
  expect(now()).toBeLessThan(due.getTime());
  const turn = longestTurn();
  const ended = async (): Promise<number> =>
    (await system.client.commands.list({ status: 'completed', limit: 1 })).total;
  await expect.poll(ended, { interval: 200 }).toBe(total);
  const longest = turn();
  const { items } = await system.client.commands.list({ sort: '-created_at', limit: 1 });
  // How long after the due time the last command was stored.
  const took = Date.parse(items[0]?.created_at ?? '') - due.getTime();
  console.info(
    `${total} schedules: the last command was made after ${took} ms; a loop turn took up to ${longest} ms of CPU`,
  );
  expect(took).toBeLessThan(5_000);
  // About 20 ms on an idle machine. Schedules that start one after another would take seconds.
  expect(longest).toBeLessThan(200);
});

/** Starts a broker whose state has many copies of one schedule. */
async function systemWith(cron: string, more: (one: object) => object[]) {
  const first = await startFarhand();
  const agent = await scriptedMachine(first);
  const machine_id = agent.identity.machineId;
  await first.client.schedules.create({ machine_id, name: 'x', command: 'true', cron });
  await first.broker.close();
  const file = join(first.dataDir, 'state.json');
  const state = JSON.parse(readFileSync(file, 'utf8'));
  state.schedules.push(...more(state.schedules[0]));
  writeFileSync(file, JSON.stringify(state));
  return { first, open: () => startFarhand({ dataDir: first.dataDir, flags: ['--accept-state'] }) };
}

test('many missed times delay no schedule that is due now, and take a bounded number of rows', async () => {
  const yesterday = new Date(Date.now() - 86_400_000).toISOString();
  const params = { cron: '* * * * *', since: yesterday };
  const { open } = await systemWith('* * * * * *', (one) =>
    Array.from({ length: 60 }, (_, n) => ({ ...one, ...params, id: `sched_${n}` })),
  );
  const { client } = await open();
  const up = Date.now();
  const { items } = await client.schedules.list({ limit: 100 });
  const seconds = items.find(({ cron }) => cron === '* * * * * *')?.id ?? '';
  const fired = async (): Promise<boolean> =>
    (await client.schedules.history({ schedule_id: seconds, limit: 100 })).items.some(
      ({ status, scheduled_for }) => status !== 'missed' && Date.parse(scheduled_for ?? '') >= up,
    );
  await expect.poll(fired, { timeout: 10_000 }).toBe(true);
  // All missed times of a schedule are handled when its newest row is for one of the last two minutes before the start.
  const behind = items.filter(({ id }) => id !== seconds);
  const rows = async () => {
    const query = { limit: 1, status: 'missed' } as const;
    return Promise.all(behind.map(({ id }) => client.schedules.history({ schedule_id: id, ...query })));
  };
  const newest = Math.floor(up / 60_000 - 1) * 60_000;
  await expect
    .poll(
      async () => (await rows()).every((page) => Date.parse(page.items[0]?.scheduled_for ?? '') >= newest),
      { interval: 200 },
    )
    .toBe(true);
  const pages = await rows();
  const total = pages.reduce((sum, page) => sum + page.total, 0);
  expect(total).toBeLessThan(21_000);
  expect(total).toBeGreaterThan(19_000);
  const shared = pages.filter((page) => page.items[0]?.reason?.includes('more than 200 due times'));
  expect(shared.length).toBeGreaterThan(30);
});

test.each([
  ['a day', (n: number) => `${n % 60} ${n % 24} * * *`],
  ['a Sunday that is February 29', (n: number) => `${n % 60} ${n % 24} 29 2 */7`],
])('10,000 schedules of %s are taken up in less than four seconds of work', async (_, cronOf) => {
  const { open } = await systemWith('*/7 3 29 2 *', (one) =>
    Array.from({ length: 10_000 }, (_, n) => ({
      ...one,
      ...{ id: `sched_${n}`, cron: cronOf(n), timezone: 'America/New_York' },
    })),
  );
  const before = process.cpuUsage();
  const again = await open();
  const { user, system } = process.cpuUsage(before);
  expect((user + system) / 1e6).toBeLessThan(4);
  const { items, total } = await again.client.schedules.list({ sort: 'next_run', limit: 1 });
  expect(total).toBe(10_001);
  expect(Date.parse(items[0]?.next_run ?? '')).toBeGreaterThan(Date.now());
});
