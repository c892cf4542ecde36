// Measures the CPU time of a broker for alert rules: the difference between rounds with and without rules.
//
//   npx node scripts/bench/alert-rules.ts                              10,000 machines, 50 rules over all machines
//   npx node scripts/bench/alert-rules.ts --machines 1000 --rules 10 --rounds 20
//
// In each round every machine sends one report, as a real fleet does in 15 s. No report opens an alert.
import { mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { parseArgs } from 'node:util';
import { AlertRecords } from '../../broker/alerts/alert-records.ts';
import { Monitor } from '../../broker/alerts/evaluate-rules.ts';
import { Windows } from '../../broker/alerts/maintenance-windows.ts';
import { Events } from '../../broker/event-log.ts';
import { openHistory } from '../../broker/history/open-sqlite-file.ts';
import { type Link, Presence } from '../../broker/presence/index.ts';
import { MachineFacts } from '../../broker/presence/stored-facts-and-metrics.ts';
import { ScheduleRecords } from '../../broker/schedules/run-records.ts';
import { type AlertRule, type Machine, openState, type State } from '../../broker/state/index.ts';
import type { Metrics__Output } from '../../proto/types/farhand/agent/v1/Metrics.ts';
import { createLogger } from '../../shared/logger.ts';
import { bench, median } from './start-and-measure-programs.ts';

const { values } = parseArgs({
  options: {
    machines: { type: 'string', default: '10000' },
    rules: { type: 'string', default: '50' },
    rounds: { type: 'string', default: '8' },
  },
});
const [machines, rules, rounds] = [values.machines, values.rules, values.rounds].map(Number) as [
  number,
  number,
  number,
];
const reportSeconds = 15;
/** Kinds of rules about measured values. Only such rules are compared with each report. */
const kinds = ['cpu', 'memory', 'disk', 'load'] as const;

const idOf = (n: number): string => `mach_${String(n).padStart(20, '0')}`;

function reportOf(n: number, round: number): Metrics__Output {
  const space = (used: number) => ({ total: 1e11, used, free: 1e11 - used, available: 1e11 - used });
  return {
    ...{ recorded_at_ms: Date.now(), uptime_s: 1e6, cpu_usage: (n * 7 + round) % 80, cpu_cores: 4 },
    ...{ memory: space(4e10 + n), disk: space(5e10 + round), load_average: [0.5, 0.4, 0.3] },
    disks: [{ mount: '/', filesystem: 'ext4', space: space(5e10) }],
    network: [{ name: 'eth0', received_bytes: 1e9, sent_bytes: 1e9 }],
    ...{ agent_rss: 6e7, agent_uptime_s: 1e5 },
  };
}

function ruleOf(n: number): AlertRule {
  const at = new Date().toISOString();
  return {
    ...{ id: `rule_${n}`, name: `rule ${n}`, kind: kinds[n % kinds.length], above: 90, recover: 81 },
    ...{ for: 300_000, before: null, machine_ids: null, tags: null, repeat_every: null, channel_ids: null },
    ...{ enabled: true, created_at: at, updated_at: at },
  } as AlertRule;
}

async function fill(state: State, presence: Presence, facts: MachineFacts): Promise<void> {
  await state.change((transaction) => {
    for (let n = 0; n < machines; n += 1) {
      const machine = {
        id: idOf(n),
        name: `web-${n}`,
        tags: [`t${n % 50}`],
        public_key: '',
        join_token_id: '',
      };
      transaction.put('machines', { ...machine, created_at: '2026-01-01T00:00:00Z' } as unknown as Machine);
    }
  });
  const host = { hostname: 'web', os: 'linux', arch: 'x64', agent_version: '99.0.0', ip: '10.0.0.1' };
  const hellos = Array.from({ length: machines }, (_, n) =>
    facts.hello(idOf(n), { ...host, capabilities: ['metrics'] }, reportOf(n, 0)),
  );
  await Promise.all(hellos);
  for (let n = 0; n < machines; n += 1)
    presence.add({ id: `link_${n}`, machineId: idOf(n), close() {} } as unknown as Link);
}

/** Returns the CPU seconds of one round of reports, the median of all rounds. */
async function roundsOf(facts: MachineFacts): Promise<number> {
  const times: number[] = [];
  for (let round = 0; round < rounds; round += 1) {
    const reports = Array.from({ length: machines }, (_, n) => reportOf(n, round));
    const before = process.cpuUsage();
    for (const [n, report] of reports.entries()) facts.heard(idOf(n), report);
    const { user, system } = process.cpuUsage(before);
    times.push((user + system) / 1e6);
    await new Promise((resolve) => setImmediate(resolve));
  }
  return median(times);
}

await bench(async (folder) => {
  const log = createLogger('bench', 'warn');
  mkdirSync(folder, { recursive: true });
  const state = await openState(folder);
  const history = openHistory(join(folder, 'history.db'), state.installId, log);
  const events = await Events.open(history, 86_400_000);
  const machineFacts = await MachineFacts.open(history);
  const presence = new Presence();
  const records = await AlertRecords.open({ state, history, events }, 86_400_000);
  const scheduleRuns = await ScheduleRecords.open({ state, history, events }, 86_400_000);
  await fill(state, presence, machineFacts);
  const services = {
    state,
    presence,
    machineFacts,
    scheduleRuns,
    certificates: async () => [],
    cluster: undefined,
  };
  const monitor = new Monitor(services, records, new Windows(state), log);
  await monitor.start();
  await roundsOf(machineFacts);
  const without = await roundsOf(machineFacts);
  await state.change((transaction) => {
    for (let n = 0; n < rules; n += 1) transaction.put('alert_rules', ruleOf(n));
  });
  await roundsOf(machineFacts);
  const withRules = await roundsOf(machineFacts);
  const share = (seconds: number): string => `${((100 * seconds) / reportSeconds).toFixed(2)} % of a core`;
  console.log(`${machines} machines, a report every ${reportSeconds} s, medians of ${rounds} rounds`);
  console.log(`reports without rules: ${share(without)}`);
  console.log(`reports with ${rules} rules: ${share(withRules)}`);
  console.log(`evaluation: ${share(withRules - without)}`);
  monitor.stop();
  await machineFacts.close();
  await history.close();
  await state.close();
});
