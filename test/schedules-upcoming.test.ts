// Upcoming runs of all schedules, ordered by time.
import { expect, test } from 'vitest';
import { refusalIn } from './all-routes.ts';
import { startFarhand, startWithAgent } from './start-farhand.ts';

const year = new Date().getUTCFullYear() + 1;

test('runs of all schedules are listed in order, with the offset of their zone, up to the limit', async () => {
  const { system, machine_id } = await startWithAgent({ tags: 'web' });
  const { machineId: other } = await system.agent();
  const make = (name: string, cron: string, more = {}) =>
    system.client.schedules.create({ name, machine_id, command: 'true', cron, ...more });
  const daily = await make('daily', '30 2 * * *', { timezone: 'Europe/Berlin' });
  await make('hourly', '0 * * * *', { machine_id: other });
  await make('off', '* * * * *', { enabled: false });
  const list = (query: object, client = system.client) => client.schedules.upcoming(query);
  const from = `${year}-06-01T00:00:00Z`;
  const day = await list({ from, until: `${year}-06-01T03:00:00Z` });
  expect(day.runs.map(({ name, at }) => [name, at.slice(11, 16)])).toEqual([
    ['hourly', '00:00'],
    ['daily', '00:30'],
    ['hourly', '01:00'],
    ['hourly', '02:00'],
  ]);
  expect(day.more).toBe(false);
  expect(await list({ from, limit: 2 })).toMatchObject({
    runs: [{ name: 'hourly' }, { name: 'daily' }],
    more: true,
  });
  const { runs } = await list({
    from: `${year}-10-20T00:00:00Z`,
    until: `${year}-11-05T00:00:00Z`,
    schedule_id: daily.id,
  });
  expect(new Set(runs.map(({ utc_offset }) => utc_offset))).toEqual(new Set([120, 60]));
  const { client } = await system.keyed(['schedules:read'], { tags: ['web'] });
  expect(new Set((await list({ from }, client)).runs.map(({ name }) => name))).toEqual(new Set(['daily']));
  expect((await list({ until: '2001-01-01T00:00:00Z' })).runs).toEqual([]);
});

test('upcoming runs are refused to a key without schedules:read, and for limits out of range', async () => {
  const system = await startFarhand();
  const { key } = await system.keyed(['machines:read']);
  const outcome = async (query: string, by = system.key) =>
    refusalIn(await system.call('GET', `/schedules/upcoming${query}`, { key: by }));
  expect(await outcome('', key)).toBe('403 forbidden');
  expect(await outcome('?limit=1001')).toBe('400 invalid_request');
  expect(await outcome('?from=tomorrow')).toBe('400 invalid_request');
  expect(await outcome('?schedule_id=sched_x')).toBe('404 schedule_not_found');
});
