// Starts a broker whose clock the test moves, with alert rules, and with machines that report what the test chooses.
import { expect } from 'vitest';
import type { Tuning } from '../broker/start/index.ts';
import type { Farhand } from '../shared/sdk/index.ts';
import { leapingClock } from './commands-fixture.ts';
import { joinScripted, linkScripted, type ScriptedAgent } from './scripted-agent.ts';
import { startFarhand, type TestSystem } from './start-farhand.ts';
import type { Receiver } from './webhook-receivers.ts';

export type Rule = Awaited<ReturnType<Farhand['alertRules']['create']>>;
export type Alert = Awaited<ReturnType<Farhand['alerts']['get']>>;
type NewRule = Parameters<Farhand['alertRules']['create']>[0];

/** Delays of notifications, short enough for a test in real time. */
export const soon = { quietMs: 50, longestMs: 2_000, startMs: 0, downMs: 120_000 };

const GB = 1_000_000_000;
const space = (percent: number) => ({ total: 100 * GB, used: percent * GB, free: (100 - percent) * GB });

/** A report with these values. */
function metricsOf(
  { cpu = 1, memory = 1, disk = 1, disks = {}, reserved, load = 0.1 }: Values,
  recorded_at_ms: number,
) {
  const available = reserved === undefined ? {} : { available: (100 - disk - reserved) * GB };
  return {
    ...{ recorded_at_ms, cpu_cores: 4, cpu_usage: cpu, load_average: [load, 0, 0] },
    ...{ memory: space(memory), disk: { ...space(disk), ...available } },
    disks: Object.entries({ '/': ['ext4', disk] as const, ...disks }).map(([mount, [filesystem, used]]) => ({
      ...{ mount, filesystem, space: space(used) },
    })),
  };
}
interface Values {
  cpu?: number;
  memory?: number;
  disk?: number;
  /** Further file systems by mount point: type, and percent in use. */
  disks?: Record<string, readonly [filesystem: string, used: number]>;
  /** Percent of the disk that only root may use. */
  reserved?: number;
  load?: number;
}

export interface AlertMachine {
  id: string;
  agent: ScriptedAgent;
  send(values: Values): void;
  /** Sends a report. Resolves once the broker has compared it with all rules. */
  report(values: Values): Promise<void>;
  /** Ends the link, as when the machine is switched off. */
  leave(): Promise<void>;
  /** Links the machine again, to the broker of this client, and reports its last values again. */
  back(client?: Farhand): Promise<void>;
}

export async function startAlertSystem(
  options: { dataDir?: string; flags?: string[]; tuning?: Tuning } = {},
) {
  const clock = leapingClock();
  const flags = ['--webhook-allow', '127.0.0.0/8', '--webhook-retry', '50ms', ...(options.flags ?? [])];
  const tuning = { ...options.tuning, alerts: { ...soon, ...options.tuning?.alerts } };
  const system = await startFarhand({ ...options, flags, tuning });
  const { client } = system;
  return {
    ...system,
    clock,
    ...looksInto(client),
    rule: (rule: NewRule): Promise<Rule> => client.alertRules.create(rule),
    machine: (name?: string, hello = {}): Promise<AlertMachine> => machineOf(system, name, hello),
  };
}
export type AlertSystem = Awaited<ReturnType<typeof startAlertSystem>>;

export function looksInto(client: Farhand) {
  /** All alerts, oldest first. */
  const alerts = async (): Promise<Alert[]> =>
    (await client.alerts.list({ sort: 'created_at', limit: 100 })).items;
  return {
    alerts,
    statuses: async (): Promise<string[]> => (await alerts()).map(({ status }) => status),
    /** The types of all events about alerts, without the prefix `alert.`, oldest first. */
    async steps(): Promise<string[]> {
      const { items } = await client.events.list({ sort: 'created_at', limit: 100 });
      return items.flatMap(({ type }) =>
        type.startsWith('alert.') && type !== 'alert.notified' ? [type.slice('alert.'.length)] : [],
      );
    },
  };
}

/** Links a scripted machine. Each link sends the current content of `hello`. */
export async function machineOf(
  system: Pick<TestSystem, 'grpc' | 'client' | 'joinToken'>,
  name = 'web-1',
  hello: object = {},
): Promise<AlertMachine> {
  const identity = await joinScripted(system, name);
  const { machineId: machine_id } = identity;
  let recorded = 1_000;
  let last: Values = {};
  const link = (): Promise<ScriptedAgent> =>
    linkScripted(system.grpc, identity, {
      ...{ metrics: metricsOf(last, recorded), agent_version: '99.0.0' },
      ...hello,
    });
  const status = async (client = system.client): Promise<string> =>
    (await client.machines.get({ machine_id })).status;
  const machine: AlertMachine = {
    id: machine_id,
    agent: await link(),
    send(values) {
      recorded += 1_000;
      last = values;
      machine.agent.send({ heartbeat: { metrics: metricsOf(values, recorded) } });
    },
    async report(values) {
      machine.send(values);
      const seen = async (): Promise<number> =>
        Date.parse((await system.client.machines.status({ machine_id })).recorded_at);
      await expect.poll(seen, { interval: 5 }).toBe(recorded);
    },
    async leave() {
      machine.agent.control.cancel();
      machine.agent.close();
      await expect.poll(() => status(), { interval: 5 }).toBe('offline');
    },
    async back(client) {
      machine.agent = await link();
      await expect.poll(() => status(client), { interval: 5 }).toBe('online');
    },
  };
  return machine;
}

/** Number of steps of each type, such as `opened`. The outer key is the id of an alert or the name of its rule. */
export type StepCounts = Record<string, Record<string, number>>;

function countSteps(found: { of: string; step: string }[]): StepCounts {
  const counts: StepCounts = {};
  for (const { of, step } of found) {
    counts[of] ??= {};
    counts[of][step] = (counts[of][step] ?? 0) + 1;
  }
  return counts;
}

/** Counts the recorded events about alerts. */
export async function recordedSteps(client: Farhand, by: 'name' | 'alert_id'): Promise<StepCounts> {
  const found = [];
  for await (const { type, data } of client.events.list({ sort: 'created_at' }))
    if (type.startsWith('alert.') && type !== 'alert.notified')
      found.push({ of: String(data[by]), step: type.slice('alert.'.length) });
  return countSteps(found);
}

/** Counts the steps in the notifications that a webhook got. A notification that was delivered twice counts once. */
export function notifiedSteps({ got }: Receiver, by: 'name' | 'alert_id'): StepCounts {
  const bodies = got.map(({ body }) => JSON.parse(body.toString()));
  const unique = [...new Map(bodies.map((one) => [one.id, one])).values()];
  return countSteps(
    unique.flatMap(({ data }) =>
      data.alerts.map((alert: Record<string, string>) => ({
        of: String(alert[by]),
        step: String(alert.step),
      })),
    ),
  );
}
