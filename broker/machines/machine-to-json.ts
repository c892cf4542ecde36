// Converts machines and the values that they have reported to the JSON of the REST API.
import { includedIn } from '../../shared/api/machines.ts';
import type { Api, Reply } from '../../shared/api/route-table.ts';
import { iso } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { upgradeStateOf } from '../agent-packages/can-machine-upgrade.ts';
import type { Packages } from '../agent-packages/index.ts';
import type { Presence } from '../presence/index.ts';
import type { Report } from '../presence/metrics-report.ts';
import type { Facts, MachineFacts } from '../presence/stored-facts-and-metrics.ts';
import type { Machine } from '../state/index.ts';

type Item = Reply<Api['machines']['list']>['items'][number];
type Detail = Reply<Api['machines']['get']>;
type Status = Reply<Api['machines']['status']>;
export type LiveMachine = Omit<Reply<Api['machines']['statuses']>['items'][number], 'hour'>;

export interface MachineSources {
  presence: Presence;
  machineFacts: MachineFacts;
}
type Catalogs = { packages: Pick<Packages, 'catalog'> };

export function itemOf({ presence, machineFacts }: MachineSources, machine: Machine): Item {
  const { id, name, tags, created_at } = machine;
  const facts = machineFacts.of(id);
  const { os = '', arch = '', hostname = '' } = facts ?? {};
  const status = presence.linkedAnywhere(id) ? 'online' : 'offline';
  const last_seen = facts ? iso(facts.last_seen) : created_at;
  return { id, name, status, os, arch, hostname, tags, created_at, last_seen };
}

/**
 * Returns the machine's clock minus the broker's clock, in milliseconds. Returns no field if the machine's owner does
 * not allow metrics.
 */
function clockOf(facts: Facts | undefined): { clock_offset_ms?: number } {
  const offset = facts?.capabilities.includes('metrics') ? facts.report?.clock_offset_ms : undefined;
  return offset === undefined ? {} : { clock_offset_ms: offset };
}

/**
 * Returns a function that creates the extra fields of a machine. `text` is the request's parameter `include`, which
 * selects the fields.
 */
export function extraFields(
  { machineFacts, packages }: MachineSources & Catalogs,
  text: string | undefined,
): (machine: Machine) => Partial<Item> {
  const fields = includedIn(text);
  // The packages are read from the disk once for the whole list, not for each machine.
  const catalog = fields.includes('upgrade') ? packages.catalog() : undefined;
  return (machine) => {
    const facts = machineFacts.of(machine.id);
    return {
      ...(catalog && { upgrade: upgradeStateOf(machine, facts, catalog) }),
      ...(fields.includes('agent_version') && { agent_version: facts?.agent_version ?? '' }),
      ...(fields.includes('clock_offset_ms') && clockOf(facts)),
    };
  };
}

export function detailOf(
  services: MachineSources & Catalogs,
  machine: Machine,
  withUpgrade: boolean,
): Detail {
  const facts = services.machineFacts.of(machine.id);
  const { ip = '', agent_version = '', capabilities = [] } = facts ?? {};
  const detail = { ...itemOf(services, machine), ip, agent_version, capabilities };
  if (!withUpgrade) return detail;
  return { ...detail, upgrade: upgradeStateOf(machine, facts, services.packages.catalog()) };
}

export function statusOf({ presence, machineFacts }: MachineSources, { id: machine_id }: Machine): Status {
  const facts = machineFacts.of(machine_id);
  machineFacts.assertAllows(machine_id, ['metrics']);
  const report = facts?.report;
  if (!report) {
    const text =
      'this machine has never sent metrics; start its agent, and check that its --allow contains metrics';
    throw new AppError('machine_offline', text, { machine_id });
  }
  return {
    connected: presence.online(machine_id),
    last_ping: iso(facts.last_seen),
    ...valuesOf(report),
    disks: report.disks.map(({ space, ...of }) => ({ ...of, ...(space ?? { total: 0, used: 0, free: 0 }) })),
    network: report.network,
    agent: { rss: report.agent_rss, uptime: report.agent_uptime_s },
    ...clockOf(facts),
    stale_ms: machineFacts.silence(machine_id),
  };
}

/** Converts the part of a report that is in the results of both statusOf() and liveOf(). */
function valuesOf({ uptime_s, cpu_usage, cpu_cores, memory, disk, load_average, recorded_at_ms }: Report) {
  const cpu = { usage: cpu_usage, cores: cpu_cores };
  return { uptime: uptime_s, cpu, memory, disk, load_average, recorded_at: iso(recorded_at_ms) };
}

/** Converts a machine with its last report, for lists of statuses and live updates. */
export function liveOf(services: MachineSources, machine: Machine): LiveMachine {
  const { machineFacts } = services;
  const report = machineFacts.allowedReport(machine.id);
  return {
    ...itemOf(services, machine),
    agent_version: machineFacts.of(machine.id)?.agent_version ?? '',
    latest: report ? valuesOf(report) : null,
    stale_ms: machineFacts.silence(machine.id),
  };
}
