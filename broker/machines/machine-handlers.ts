// The REST handlers of machines. Their replies contain the declared name and tags of a machine, the facts that it
// reported, and whether it is connected now.

import type { Api, Handlers, Reply } from '../../shared/api/route-table.ts';
import { iso, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import type { Packages } from '../agent-packages/index.ts';
import type { Peer } from '../cluster/peers/owner-interfaces.ts';
import type { Events } from '../event-log.ts';
import { found } from '../find-or-not-found.ts';
import type { Machine, State, StateTransaction } from '../state/index.ts';
import { MachineLists } from './machine-lists.ts';
import { detailOf, extraFields, itemOf, liveOf, type MachineSources, statusOf } from './machine-to-json.ts';

type Item = Reply<Api['machines']['list']>['items'][number];

interface MachineServices extends MachineSources {
  state: State;
  events: Events;
  packages: Pick<Packages, 'catalog'>;
  /** Returns the running broker that owns a machine; undefined with a single broker. */
  brokerOf(machineId: string): Peer | undefined;
}

const hour = 3_600_000;

export function machineHandlers(services: MachineServices): Handlers['machines'] {
  return { ...readHandlers(services), ...changeHandlers(services) };
}

function readHandlers(
  services: MachineServices,
): Pick<Handlers['machines'], 'list' | 'statuses' | 'get' | 'status' | 'metrics'> {
  const { state, machineFacts } = services;
  const lists = new MachineLists(services);
  return {
    async list(input, caller) {
      const { include, ...selection } = input;
      const page = lists.page(selection, caller.reachable());
      if (include) await machineFacts.readOthers(page.items.map(({ id }) => id));
      const extras = extraFields(services, include);
      const itemWith = (one: Machine): Item => ({ ...itemOf(services, one), ...extras(one) });
      return { items: page.items.map(itemWith), total: page.total };
    },
    statuses(input, caller) {
      const { items, total } = lists.page(input, caller.reachable());
      const withHour = (one: Machine) => ({
        ...liveOf(services, one),
        hour: machineFacts.lastHour(one.id),
      });
      return { items: items.map(withHour), total };
    },
    get({ machine_id, include }) {
      const detail = detailOf(services, found(state.machines, 'machine', machine_id), include !== undefined);
      const owner = services.brokerOf(machine_id);
      return owner ? { ...detail, broker: { id: owner.brokerId, url: owner.url } } : detail;
    },
    status: ({ machine_id }) => statusOf(services, found(state.machines, 'machine', machine_id)),
    async metrics({ machine_id, since, until, step = 300 }) {
      const { id } = found(state.machines, 'machine', machine_id);
      machineFacts.assertAllows(id, ['metrics']);
      const to = until?.getTime() ?? now();
      const from = since?.getTime() ?? to - 48 * hour;
      const points = await machineFacts.metrics(id, from, to, step * 1000);
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
    async update({ machine_id, name, tags, agent_pin, agent_hold }, caller) {
      const machine = await state.change((transaction) => {
        const before = found(transaction.before.machines, 'machine', machine_id);
        const rights = caller.during(transaction);
        if (tags && rights.reachable()) {
          const text =
            'tags decide which machines a key may use: to change tags, use a key that is not limited to some machines';
          throw new AppError('forbidden', text);
        }
        if (tags && !rights.may('admin')) assertNothingDependsOn(before.tags, tags, transaction);
        const renamed = { ...before, name: name ?? before.name, tags: tags ?? before.tags };
        const changed = withPolicy(renamed, agent_pin, agent_hold);
        transaction.put('machines', changed);
        caller.commit(transaction);
        return changed;
      });
      return detailOf(services, machine, agent_pin !== undefined || agent_hold !== undefined);
    },
    async remove({ machine_id }, caller) {
      await state.change((transaction) => {
        const machine = found(transaction.before.machines, 'machine', machine_id);
        transaction.remove('machines', machine.id);
        const its = transaction.all('schedules').filter((schedule) => schedule.machine_id === machine.id);
        for (const { id } of its) transaction.remove('schedules', id);
        caller.commit(transaction);
        const last_seen = iso(machineFacts.of(machine.id)?.last_seen);
        events.emit(transaction, 'machine.removed', machine, { last_seen });
      });
      presence.remove(machine_id);
      machineFacts.remove(machine_id);
      return { deleted: true };
    },
  };
}

/**
 * Throws forbidden if a change of tags may change which machines a key may use or a schedule runs on. Keys with the
 * scope admin skip this check.
 */
function assertNothingDependsOn(
  before: readonly string[],
  after: readonly string[],
  transaction: StateTransaction,
): void {
  const required_scope = 'admin';
  if (transaction.all('keys').some((key) => key.tags !== null && key.tags.length > 0)) {
    const text = 'tags decide which machines some keys may use: changing tags needs the scope admin';
    throw new AppError('forbidden', text, { required_scope });
  }
  const changed = [
    ...before.filter((tag) => !after.includes(tag)),
    ...after.filter((tag) => !before.includes(tag)),
  ];
  const scheduled = changed.find((tag) =>
    transaction.all('schedules').some(({ tags }) => tags?.includes(tag)),
  );
  if (scheduled === undefined) return;
  const text = `a schedule chooses its machines by the tag ${scheduled}: adding or removing this tag needs the scope admin`;
  throw new AppError('forbidden', text, { required_scope });
}

/** Sets the pin and the hold of a machine, which limit its upgrades. Undefined leaves a value as it is. */
function withPolicy(
  { agent_pin, agent_hold, ...machine }: Machine,
  pin: string | null | undefined,
  hold: boolean | undefined,
): Machine {
  const newPin = pin === undefined ? agent_pin : (pin ?? undefined);
  const isHeld = hold ?? agent_hold === true;
  return {
    ...machine,
    ...(newPin !== undefined && { agent_pin: newPin }),
    ...(isHeld && { agent_hold: true as const }),
  };
}
