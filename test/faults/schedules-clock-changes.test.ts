// Schedules while the wall clock is set forward or back, with a running broker or with one that is down.
import { expect, test } from 'vitest';
import { monotonic, now } from '../../shared/clock.ts';
import { minutes, systemAt, today } from '../schedules-fixture.ts';

const minute = 60_000;
const hour = 60 * minute;
const year = 8766 * hour;

/**
 * Starts a system whose clock moves in steps of at most 15 s. A larger step would count as a change of the clock, whose
 * skipped times are handled only after a minute.
 */
const startedSystem = () => systemAt('12:00:30', today, 15_000);

test('a clock set two hours forward causes no burst: the skipped times are missed, or caught up with catch_up', async () => {
  const { clock, at, make, until, fates, counted } = await startedSystem();
  const each = await make('each', '* * * * *');
  const last = await make('last', '* * * * *', { catch_up: 'last' });
  const all = await make('all', '* * * * *', { catch_up: 'all' });
  await until('12:02:30');
  clock.set(at('14:02:30'));
  await until('14:04:30');
  const before = ['12:01', '12:02'].map((time) => `${time} cron completed`);
  const passed = minutes('12:03:00', 120).map((time) => `${time} cron missed`);
  const after = ['14:03', '14:04'].map((time) => `${time} cron completed`);
  expect(await fates(each.id)).toEqual([...before, ...passed, ...after]);
  expect(await fates(last.id)).toEqual([...before, ...passed, ...after]);
  expect(await fates(all.id)).toEqual([
    ...before,
    ...passed.slice(0, -1),
    '14:02 catch_up completed',
    ...after,
  ]);
  expect(['each', 'last', 'all'].map(counted)).toEqual([4, 4, 5]);
});

test('after a clock is set two hours back no due time runs again, and all others run', async () => {
  const { clock, at, make, until, fates, counted, system } = await startedSystem();
  const { id } = await make('each', '* * * * *');
  await until('12:02:30');
  clock.set(at('10:58:30'));
  await until('11:00:30');
  clock.set(at('11:59:30'));
  await until('12:00:31');
  const { next_run } = await system.client.schedules.get({ schedule_id: id });
  expect(next_run).toBe(`${today}T12:03:00.000Z`);
  await until('12:04:30');
  const passed = minutes('11:01:00', 59).map((time) => `${time} cron missed`);
  const ran = ['12:00', '12:01', '12:02', '12:03', '12:04'].map((time) => `${time} cron completed`);
  expect(await fates(id)).toEqual(['10:59 cron completed', '11:00 cron completed', ...passed, ...ran]);
  expect(counted('each')).toBe(7);
});

test('schedules run as soon as a clock is corrected that was hours ahead when the broker started', async () => {
  const { clock, at, away, make, down, up, until, fates, counted } = await startedSystem();
  const none = await make('none', '* * * * *');
  const last = await make('last', '* * * * *', { catch_up: 'last' });
  await down();
  clock.set(at('21:00:30'));
  await up();
  await until('21:02:30');
  const made = await make('made', '* * * * *');
  const offline = await make('offline', '* * * * *', { machine_id: away });
  await until('21:03:30');
  expect(await fates(offline.id)).toContain('21:03 cron failed');
  clock.set(at('12:05:30'));
  await until('12:06:30');
  expect((await fates(offline.id)).at(-1)).toBe('12:06 cron failed');
  const ahead = ['21:01', '21:02', '21:03'].map((time) => `${time} cron completed`);
  const passed = minutes('12:01:00', 5).map((time) => `${time} cron missed`);
  const right = '12:06 cron completed';
  expect(await fates(none.id)).toEqual([...passed, right, ...ahead]);
  expect(await fates(last.id)).toEqual([...passed, right, '21:00 catch_up completed', ...ahead]);
  expect(await fates(made.id)).toEqual([right, ahead.at(-1)]);
  // A restarted broker handles no due time twice: it finds the times that are already handled in the stored runs.
  await down();
  clock.set(at('12:08:30'));
  await up();
  await until('12:08:59');
  await until('12:09:01', 1);
  const down2 = ['12:07', '12:08'].map((time) => `${time} cron missed`);
  const next = '12:09 cron completed';
  expect(await fates(none.id)).toEqual([...passed, right, ...down2, next, ...ahead]);
  expect(await fates(made.id)).toEqual([right, ...down2, next, ahead.at(-1)]);
  expect(['none', 'last', 'made'].map(counted)).toEqual([5, 7, 3]);
});

test('a time that was missed only because the clock was ahead is handled after a restart, too', async () => {
  const { clock, at, make, down, up, until, fates } = await startedSystem();
  const { id } = await make('late', '5 * * * *');
  clock.set(at('14:00:30'));
  await until('14:02:30');
  expect(await fates(id)).toEqual(['12:05 cron missed', '13:05 cron missed']);
  clock.set(at('12:03:30'));
  await until('12:04:30');
  expect(await fates(id)).toEqual([]);
  await down();
  clock.set(at('12:10:30'));
  await up();
  await expect.poll(() => fates(id)).toEqual(['12:05 cron missed']);
});

/** Returns a function that chooses random elements. The same seed gives the same choices (mulberry32). */
function seeded(seed: number): <T>(list: readonly T[]) => T {
  let state = seed;
  const random = (): number => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
  return (list) => list[Math.floor(random() * list.length)]!;
}

const kinds = (['none', 'last', 'all'] as const).flatMap((catch_up) =>
  (['skip', 'allow'] as const).map((overlap) => ({ catch_up, overlap, name: `${catch_up}-${overlap}` })),
);
/** Statuses of a run whose command has run. */
const ended = ['completed', 'failed'];
const seeds = (process.env.SEEDS ?? '1').split(',').map(Number);
const episodes = Number(process.env.EPISODES ?? 4);

/** A system with a schedule of each kind. `right` is the time that the clock would have if it had never been set. */
async function systemOfKinds() {
  const bench = await startedSystem();
  const made: { id: string; name: string }[] = [];
  for (const kind of kinds) {
    // Half of the schedules have a command that fails. Their runs count as well.
    const command = `${bench.counting(kind.name)}; ${kind.overlap === 'skip'}`;
    const { id } = await bench.make(kind.name, '* * * * *', {
      ...{ ...kind, command, catch_up_window: 3 * minute },
    });
    made.push({ id, name: kind.name });
  }
  const start = { wall: now(), own: monotonic() };
  return {
    ...{ bench, start: start.wall },
    right: (): number => Math.round(start.wall + monotonic() - start.own),
    /** Returns the status of each due time, by schedule. */
    fates: () =>
      Promise.all(
        made.map(async ({ id, name }) => {
          const all = await bench.runs(id);
          const times = new Map(all.map((one) => [Date.parse(one.scheduled_for ?? ''), one.status]));
          expect(times.size).toBe(all.length);
          return { name, times };
        }),
      ),
  };
}

test.each(seeds)(
  'each due time after the clock was corrected runs once, whatever the clock was set to before (seed %i)',
  async (seed) => {
    const { bench, start, right, fates } = await systemOfKinds();
    const { clock, pass, down, up, counted } = bench;
    const pick = seeded(seed);
    const wrong: { from: number; to: number }[] = [];
    for (let episode = 0; episode < episodes; episode += 1) {
      await pass(pick([minute, 100_000]));
      const ahead = pick([5_000, 40_000, 10 * minute, hour, 9 * hour, 20 * year]);
      const lasts = pick([8_000, 50_000, 3 * minute]);
      // No restart while the clock is 20 years ahead: the certificate of the restarted broker would become valid only
      // in 20 years, and agents would refuse it.
      const restarts = ahead < year ? pick(['', 'while ahead', 'while set right', '']) : '';
      const about = `seed ${seed}, episode ${episode}: ${ahead} ms ahead for ${lasts} ms, restarts ${restarts}`;
      const [before, from] = [await fates(), right()];
      if (restarts === 'while ahead') await down();
      clock.set(now() + ahead);
      if (restarts === 'while ahead') await up();
      await pass(lasts);
      if (lasts < minute && !restarts) expect([about, await fates()]).toEqual([about, before]);
      if (restarts === 'while set right') await down();
      clock.set(right());
      if (restarts === 'while set right') await up();
      // The broker notices a change of the clock within a second.
      wrong.push({ from, to: right() + 1_000 });
      await pass(5_000);
      for (const { times } of await fates()) {
        const later = [...times].filter(([at, status]) => at > now() && !ended.includes(status));
        expect([about, later]).toEqual([about, []]);
      }
    }
    await pass(2 * minute);
    for (const { name, times } of await fates()) {
      for (let at = Math.ceil(start / minute) * minute; at < right() - 1_000; at += minute) {
        const fate = times.get(at) ?? '';
        const isRight = !wrong.some(({ from, to }) => at > from && at <= to);
        expect([name, new Date(at), fate, isRight ? ended.includes(fate) : fate !== '']).toEqual([
          ...[name, new Date(at), fate, true],
        ]);
      }
      const ran = [...times.values()].filter((status) => ended.includes(status));
      expect([name, counted(name)]).toEqual([name, ran.length]);
    }
  },
  120_000,
);
