// Starts a broker and an agent whose clock the test sets, with schedules that count their runs.
import { existsSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, onTestFinished, vi } from 'vitest';
import { now } from '../shared/clock.ts';
import type { Farhand } from '../shared/sdk/index.ts';
import { leapingClock } from './commands-fixture.ts';
import { joinScripted } from './scripted-agent.ts';
import { startFarhand, type TestSystem, temporaryFolder } from './start-farhand.ts';

export type Run = Awaited<ReturnType<Farhand['schedules']['history']>>['items'][number];

/** Brokers that start anew look at their certificates: near the real day. */
export const today = new Date().toISOString().slice(0, 10);

/** After a jump of the clock, until schedules run again. */
const settleMs = 90_000;

/**
 * A system with one machine at a time of the tests' own. The clock moves on in steps of `stepMs`: a link hears a
 * heartbeat each time, and is over after 45 s without one.
 */
export async function systemAt(start: string, day = today, stepMs = 30_000) {
  const at = (time: string): number => Date.parse(`${day}T${time}Z`);
  // A broker that goes sends its agents away for almost five seconds then.
  vi.spyOn(Math, 'random').mockReturnValue(0.9);
  onTestFinished(() => void vi.restoreAllMocks());
  const clock = leapingClock();
  const folder = temporaryFolder('counters');
  let system = await startFarhand();
  const agent = await system.agent();
  const { machineId: machine_id } = agent;
  const identity = await joinScripted(system);
  const away = identity.machineId;
  // Only now: certificates go by the real time. After a clock that is set forward no schedule runs for a minute.
  clock.set(at(start) - settleMs);

  const self = {
    ...{ clock, agent, machine_id, away, identity, at },
    get system(): TestSystem {
      return system;
    },
    /** A command that counts its runs in a file of this name. */
    counting: (name: string): string => `echo ran >> ${folder}/${name}`,
    /** A schedule with such a command. */
    make: (name: string, cron: string, more: object = {}) =>
      system.client.schedules.create({
        machine_id,
        name,
        cron,
        command: self.counting(name),
        ...more,
      }),
    /** How often its command ran. */
    counted(name: string): number {
      const file = join(folder, name);
      return existsSync(file) ? readFileSync(file, 'utf8').split('\n').length - 1 : 0;
    },
    /** Moves on, so slowly that the link lives and every run is over before the next; `held` ones aside. */
    until: (time: string, held = 0): Promise<void> => self.pass(at(time) - now(), held),
    async pass(ms: number, held = 0): Promise<void> {
      for (const end = now() + ms; now() < end; ) {
        clock.leap(Math.min(stepMs, end - now()));
        const open = (status: 'running' | 'queued') => system.client.commands.list({ status, limit: 1 });
        const busy = async (): Promise<number> => {
          await system.client.files.stat({ machine_id, path: '/' });
          const [running, queued] = await Promise.all([open('running'), open('queued')]);
          return running.total + queued.total;
        };
        await expect.poll(busy, { interval: 5, timeout: 10_000 }).toBeLessThanOrEqual(held);
      }
    },
    async down(): Promise<void> {
      const gone = agent.linked(false);
      await system.broker.close();
      await gone;
    },
    /** The broker is back, and after some seconds the machine too. Those are leapt over; a dial takes its real time. */
    async up(flags: string[] = []): Promise<void> {
      let linked = false;
      const back = agent.linked(true).then(() => {
        linked = true;
      });
      system = await startFarhand({ dataDir: system.dataDir, flags: ['--grpc', system.grpc, ...flags] });
      for (let heard = 0; !linked; ) {
        const received = (): boolean => linked || agent.logged.length > heard;
        await expect.poll(received, { interval: 5, timeout: 15_000 }).toBe(true);
        const waits = agent.logged.slice(heard).map((line) => JSON.parse(line).retry_ms ?? 0);
        heard += waits.length;
        for (let ms = Math.max(...waits); ms > 0 && !linked; ms -= 500) {
          clock.leap(Math.min(ms, 500));
          await system.client.schedules.list();
        }
      }
      await back;
    },
    /** Every run, oldest first, once none is under way. */
    async runs(schedule_id: string): Promise<Run[]> {
      const all: Run[] = [];
      for (let more = true; more; ) {
        const page = await system.client.schedules.history({
          ...{ schedule_id, limit: 100, offset: all.length, sort: 'started_at' },
        });
        all.push(...page.items);
        more = page.has_more;
        if (!all.some(({ status }) => status === 'running')) continue;
        all.length = 0;
        more = true;
      }
      return all.toSorted((a, b) => ((a.scheduled_for ?? '') < (b.scheduled_for ?? '') ? -1 : 1));
    },
    /** The times of a schedule, each with what became of it. */
    async fates(schedule_id: string): Promise<string[]> {
      const all = await self.runs(schedule_id);
      const times = all.map(({ scheduled_for }) => scheduled_for);
      expect(new Set(times).size).toBe(times.length);
      return all.map((one) => `${one.scheduled_for?.slice(11, 16)} ${one.trigger} ${one.status}`);
    },
  };
  await self.pass(settleMs);
  return self;
}

/** `n` minutes from a time on, as fates show them. */
export function minutes(from: string, n: number): string[] {
  return Array.from({ length: n }, (_, k) =>
    new Date(Date.parse(`${today}T${from}Z`) + k * 60_000).toISOString().slice(11, 16),
  );
}
