// Starts a broker and an agent with a clock that the test sets. The commands of schedules count their runs.
import { existsSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, onTestFinished, vi } from 'vitest';
import { now } from '../shared/clock.ts';
import type { Farhand } from '../shared/sdk/index.ts';
import { leapingClock } from './commands-fixture.ts';
import { joinScripted } from './scripted-agent.ts';
import { startFarhand, type TestSystem, temporaryFolder } from './start-farhand.ts';

export type Run = Awaited<ReturnType<Farhand['schedules']['history']>>['items'][number];

/** The real date, because a restarted broker checks its certificates. */
export const today = new Date().toISOString().slice(0, 10);

/** After the clock was set, schedules run again within this number of milliseconds. */
const settleMs = 90_000;

/**
 * A system with one machine and a clock that the test sets. The clock moves in steps of at most `stepMs` with a
 * heartbeat in each, because a link without heartbeats ends after 45 s.
 */
export async function systemAt(start: string, day = today, stepMs = 30_000) {
  const at = (time: string): number => Date.parse(`${day}T${time}Z`);
  // Makes the random delays fixed. Agents then wait for almost five seconds after their broker has stopped.
  vi.spyOn(Math, 'random').mockReturnValue(0.9);
  onTestFinished(() => void vi.restoreAllMocks());
  const clock = leapingClock();
  const folder = temporaryFolder('counters');
  let system = await startFarhand();
  const agent = await system.agent();
  const { machineId: machine_id } = agent;
  // The first command starts the agent's spawner. If the clock leaped meanwhile, that start would count as hung.
  await system.client.commands.create({ machine_id, command: 'true' });
  const identity = await joinScripted(system);
  const away = identity.machineId;
  // Sets the clock only after the certificates were made, because they need the real time. After such a change no
  // schedule runs for a minute, so the clock begins `settleMs` before `start`.
  clock.set(at(start) - settleMs);

  const self = {
    ...{ clock, agent, machine_id, away, identity, at },
    get system(): TestSystem {
      return system;
    },
    /** Returns a command that counts its runs in the file `name`. */
    counting: (name: string): string => `echo ran >> ${folder}/${name}`,
    /** Creates a schedule whose command counts its runs in the file `name`. */
    make: (name: string, cron: string, more: object = {}) =>
      system.client.schedules.create({
        machine_id,
        name,
        cron,
        command: self.counting(name),
        ...more,
      }),
    /** Returns how often the command for the file `name` has run. */
    counted(name: string): number {
      const file = join(folder, name);
      return existsSync(file) ? readFileSync(file, 'utf8').split('\n').length - 1 : 0;
    },
    /**
     * Moves the clock to a time, slowly enough that the link stays. After each step it waits until at most `held`
     * commands are queued or running.
     */
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
        await expect.poll(busy, { interval: 5 }).toBeLessThanOrEqual(held);
      }
    },
    async down(): Promise<void> {
      const gone = agent.linked(false);
      await system.broker.close();
      await gone;
    },
    /**
     * Starts the broker again. Resolves when the agent is linked. The clock leaps over the delays between the attempts
     * of the agent to link. The attempts themselves take real time.
     */
    async up(flags: string[] = []): Promise<void> {
      let linked = false;
      const back = agent.linked(true).then(() => {
        linked = true;
      });
      system = await startFarhand({ dataDir: system.dataDir, flags: ['--grpc', system.grpc, ...flags] });
      for (let heard = 0; !linked; ) {
        const received = (): boolean => linked || agent.logged.length > heard;
        await expect.poll(received, { interval: 5 }).toBe(true);
        const waits = agent.logged.slice(heard).map((line) => JSON.parse(line).retry_ms ?? 0);
        heard += waits.length;
        for (let ms = Math.max(...waits); ms > 0 && !linked; ms -= 500) {
          clock.leap(Math.min(ms, 500));
          await system.client.schedules.list();
        }
      }
      await back;
    },
    /** Waits until no run of the schedule is in progress. Resolves with all runs, oldest first. */
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
    /** Resolves with the due times, triggers and statuses of a schedule's runs as text. */
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

/** Returns `n` successive minutes in the form that `fates` uses. */
export function minutes(from: string, n: number): string[] {
  return Array.from({ length: n }, (_, k) =>
    new Date(Date.parse(`${today}T${from}Z`) + k * 60_000).toISOString().slice(11, 16),
  );
}
