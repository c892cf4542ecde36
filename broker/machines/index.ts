// The REST handlers of machines: their declared names and tags, reported facts,
// and which of them are connected now.

import { includedIn } from '../../shared/api/machines.ts';
import type { Api, Handlers, Reply } from '../../shared/api/route-table.ts';
import { iso, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import type { Events } from '../events.ts';
import type { Presence } from '../presence/index.ts';
import type { Facts, MachineFacts } from '../presence/machine-facts.ts';
import type { Declared, Machine, State } from '../state/state.ts';
import { MachineLists } from './machine-lists.ts';

type Item = Reply<Api['machines']['list']>['items'][number];
type Detail = Reply<Api['machines']['get']>;
type Status = Reply<Api['machines']['status']>;

interface MachineServices {
  state: State;
  events: Events;
  presence: Presence;
  machineFacts: MachineFacts;
}

const hour = 3_600_000;

export function machineHandlers(services: MachineServices): Handlers['machines'] {
  return { ...readHandlers(services), ...changeHandlers(services) };
}

function readHandlers(
  services: MachineServices,
): Pick<Handlers['machines'], 'list' | 'get' | 'status' | 'metrics'> {
  const { state, machineFacts } = services;
  const lists = new MachineLists(services);
  return {
    list(input, caller) {
      const { include, ...selection } = input;
      const page = lists.page(selection, caller.reachable());
      const itemWith = (one: Machine): Item => ({
        ...itemOf(services, one),
        ...included(services, one.id, include),
      });
      return { items: page.items.map(itemWith), total: page.total };
    },
    get: ({ machine_id }) => detailOf(services, find(machine_id, state)),
    status: ({ machine_id }) => statusOf(services, find(machine_id, state)),
    metrics({ machine_id, since, until, step = 300 }) {
      const { id } = find(machine_id, state);
      const to = until?.getTime() ?? now();
      const from = since?.getTime() ?? to - 48 * hour;
      const points = machineFacts.metrics(id, from, to, step * 1000);
      return {
        since: iso(from),
        until: iso(to),
        step,
        points: points.map((point) => ({ ...point, at: iso(point.at) })),
      };
    },
  };
}

function changeHandlers(services: MachineServices): Pick<Handlers['machines'], 'update' | 'remove'> {
  const { state, events, presence, machineFacts } = services;
  return {
    async update({ machine_id, name, tags }, caller) {
      const machine = await state.change((draft) => {
        const before = find(machine_id, draft.before);
        const rights = caller.during(draft);
        if (tags && rights.reachable()) {
          const text = 'tags decide what keys may use: a key limited to some machines cannot change them';
          throw new AppError('forbidden', text);
        }
        const limitedByTag = draft.all('keys').some((key) => key.tags !== null && key.tags.length > 0);
        if (tags && limitedByTag && !rights.may('admin')) {
          const text = 'tags decide what some keys may use: changing them needs the scope admin';
          throw new AppError('forbidden', text, { required_scope: 'admin' });
        }
        const changed = { ...before, name: name ?? before.name, tags: tags ?? before.tags };
        draft.put('machines', changed);
        caller.commit(draft);
        return changed;
      });
      return detailOf(services, machine);
    },
    async remove({ machine_id }, caller) {
      await state.change((draft) => {
        const machine = find(machine_id, draft.before);
        draft.remove('machines', machine.id);
        const its = draft.all('schedules').filter((schedule) => schedule.machine_id === machine.id);
        for (const { id } of its) draft.remove('schedules', id);
        caller.commit(draft);
        const last_seen = iso(machineFacts.of(machine.id)?.last_seen);
        events.emit(draft, 'machine.removed', machine, { last_seen });
      });
      presence.remove(machine_id);
      return { deleted: true };
    },
  };
}

function find(id: string, { machines }: Pick<Declared, 'machines'>): Machine {
  const machine = machines.get(id);
  if (!machine) throw new AppError('machine_not_found', `no machine has the id ${id}`, { machine_id: id });
  return machine;
}

function itemOf({ presence, machineFacts }: MachineServices, machine: Machine): Item {
  const { id, name, tags, created_at } = machine;
  const { os = '', arch = '', hostname = '', last_seen } = machineFacts.of(id) ?? {};
  const status = presence.online(id) ? 'online' : 'offline';
  const seen = last_seen === undefined ? created_at : iso(last_seen);
  return { id, name, status, os, arch, hostname, tags, created_at, last_seen: seen };
}

/** The offset of a machine's clock from the broker's; empty unless the machine's owner allows metrics. */
function clockOf(facts: Facts | undefined): { clock_offset_ms?: number } {
  const offset = facts?.capabilities.includes('metrics') ? facts.report?.clock_offset_ms : undefined;
  return offset === undefined ? {} : { clock_offset_ms: offset };
}

/** The extra fields that the parameter `include` of a list selects. */
function included({ machineFacts }: MachineServices, id: string, text: string | undefined): Partial<Item> {
  const [fields, facts] = [includedIn(text), machineFacts.of(id)];
  return {
    ...(fields.includes('agent_version') && { agent_version: facts?.agent_version ?? '' }),
    ...(fields.includes('clock_offset_ms') && clockOf(facts)),
  };
}

function detailOf(services: MachineServices, machine: Machine): Detail {
  const { ip = '', agent_version = '', capabilities = [] } = services.machineFacts.of(machine.id) ?? {};
  return { ...itemOf(services, machine), ip, agent_version, capabilities };
}

function statusOf({ presence, machineFacts }: MachineServices, { id: machine_id }: Machine): Status {
  const facts = machineFacts.of(machine_id);
  const connected = presence.online(machine_id);
  if (connected) machineFacts.assertAllows(machine_id, ['metrics']);
  const report = facts?.report;
  if (!report) {
    const text = 'this machine has never sent metrics: start its agent';
    throw new AppError('machine_offline', text, { machine_id });
  }
  const { memory, disk, load_average, network } = report;
  return {
    connected,
    uptime: report.uptime_s,
    last_ping: iso(facts.last_seen),
    cpu: { usage: report.cpu_usage, cores: report.cpu_cores },
    memory,
    disk,
    load_average,
    disks: report.disks.map(({ space, ...of }) => ({ ...of, ...(space ?? { total: 0, used: 0, free: 0 }) })),
    network,
    agent: { rss: report.agent_rss, uptime: report.agent_uptime_s },
    recorded_at: iso(report.recorded_at_ms),
    ...clockOf(facts),
    stale_ms: machineFacts.silence(machine_id),
  };
}
