// Machines: what is declared of them, what they told, and whether they are linked now.
import type { Api, Handlers, Reply } from '../../shared/api/index.ts';
import { includedIn, machines as routes } from '../../shared/api/machines.ts';
import { iso, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import type { Events } from '../events.ts';
import type { Presence } from '../link/presence.ts';
import { pageOf } from '../paging.ts';
import type { Declared, Machine, State } from '../state/index.ts';
import type { Facts, Vitals } from './vitals.ts';

type Item = Reply<Api['machines']['list']>['items'][number];
type Detail = Reply<Api['machines']['get']>;

const hour = 3_600_000;

/** How far a machine's clock is from ours, where its owner allows reports. */
function clockOf(facts: Facts | undefined): { clock_offset_ms?: number } {
  const offset = facts?.capabilities.includes('metrics') ? facts.report?.clock_offset_ms : undefined;
  return offset === undefined ? {} : { clock_offset_ms: offset };
}

export function machineHandlers(rooms: {
  state: State;
  events: Events;
  presence: Presence;
  vitals: Vitals;
}): Handlers['machines'] {
  const { state, events, presence, vitals } = rooms;

  function item(machine: Machine): Item {
    const facts = vitals.of(machine.id);
    return {
      id: machine.id,
      name: machine.name,
      status: presence.online(machine.id) ? 'online' : 'offline',
      os: facts?.os ?? '',
      arch: facts?.arch ?? '',
      hostname: facts?.hostname ?? '',
      tags: machine.tags,
      created_at: machine.created_at,
      last_seen: facts ? iso(facts.last_seen) : machine.created_at,
    };
  }

  /** What a list's `include` asks for. */
  function included(id: string, text: string | undefined): Partial<Item> {
    const [fields, facts] = [includedIn(text), vitals.of(id)];
    return {
      ...(fields.includes('agent_version') && { agent_version: facts?.agent_version ?? '' }),
      ...(fields.includes('clock_offset_ms') && clockOf(facts)),
    };
  }

  function detail(machine: Machine): Detail {
    const facts = vitals.of(machine.id);
    return {
      ...item(machine),
      ip: facts?.ip ?? '',
      agent_version: facts?.agent_version ?? '',
      capabilities: facts?.capabilities ?? [],
    };
  }

  function find(id: string, { machines }: Pick<Declared, 'machines'> = state): Machine {
    const machine = machines.get(id);
    if (!machine) throw new AppError('machine_not_found', 'no such machine', { machine_id: id });
    return machine;
  }

  return {
    list(input, caller) {
      const wanted =
        input.tags
          ?.split(',')
          .map((tag) => tag.trim())
          .filter(Boolean) ?? [];
      const search = input.search?.toLowerCase();
      const matching = [...state.machines.values()].filter(
        (machine) =>
          caller.reaches(machine.id) &&
          wanted.every((tag) => machine.tags.includes(tag)) &&
          (search === undefined || machine.name.toLowerCase().includes(search)),
      );
      // Only what is asked for: of 10,000 machines all items take 10 ms.
      const page = pageOf(routes.list, matching, input, (machine, name) =>
        Reflect.get(name in machine ? machine : item(machine), name),
      );
      const items = page.items.map((one) => ({ ...item(one), ...included(one.id, input.include) }));
      return { items, total: page.total };
    },
    get: (input) => detail(find(input.machine_id)),
    status(input) {
      const machine = find(input.machine_id);
      const facts = vitals.of(machine.id);
      if (presence.online(machine.id) && !facts?.capabilities.includes('metrics')) {
        const details = { machine_id: machine.id, capability: 'metrics' };
        throw new AppError('permission_denied', 'the owner of this machine does not allow metrics', details);
      }
      const report = facts?.report;
      if (!facts || !report) {
        throw new AppError('machine_offline', 'this machine has never reported: start its agent', {
          machine_id: machine.id,
        });
      }
      return {
        connected: presence.online(machine.id),
        uptime: report.uptime_s,
        last_ping: iso(facts.last_seen),
        cpu: { usage: report.cpu_usage, cores: report.cpu_cores },
        memory: report.memory,
        disk: report.disk,
        load_average: report.load_average,
        disks: report.disks.map(({ mount, filesystem, space }) => ({
          mount,
          filesystem,
          ...(space ?? { total: 0, used: 0, free: 0 }),
        })),
        network: report.network,
        agent: { rss: report.agent_rss, uptime: report.agent_uptime_s },
        recorded_at: iso(report.recorded_at_ms),
        ...clockOf(facts),
        stale_ms: vitals.silence(machine.id),
      };
    },
    metrics(input) {
      const machine = find(input.machine_id);
      const until = input.until?.getTime() ?? now();
      const since = input.since?.getTime() ?? until - 48 * hour;
      const step = input.step ?? 300;
      const points = vitals.metrics(machine.id, since, until, step * 1000);
      return {
        since: iso(since),
        until: iso(until),
        step,
        points: points.map((p) => ({ ...p, at: iso(p.at) })),
      };
    },
    async update(input, caller) {
      const machine = await state.change((draft) => {
        const before = find(input.machine_id, draft.before);
        const rights = caller.during(draft);
        if (input.tags && rights.reachable()) {
          throw new AppError(
            'forbidden',
            'tags decide what keys reach: a key limited to some machines changes none',
          );
        }
        const limitedByTag = draft.all('keys').some((key) => key.tags !== null && key.tags.length > 0);
        if (input.tags && limitedByTag && !rights.may('admin')) {
          throw new AppError('forbidden', 'tags decide what some keys reach: only admin may change them', {
            required_scope: 'admin',
          });
        }
        const machine = { ...before, name: input.name ?? before.name, tags: input.tags ?? before.tags };
        draft.put('machines', machine);
        caller.commit(draft);
        return machine;
      });
      return detail(machine);
    },
    async remove(input, caller) {
      await state.change((draft) => {
        const machine = find(input.machine_id, draft.before);
        draft.remove('machines', machine.id);
        const run = draft.all('schedules').filter(({ machine_id }) => machine_id === machine.id);
        for (const { id } of run) draft.remove('schedules', id);
        caller.commit(draft);
        events.emit(draft, 'machine.removed', machine, { last_seen: iso(vitals.of(machine.id)?.last_seen) });
      });
      presence.remove(input.machine_id);
      return { deleted: true };
    },
  };
}
