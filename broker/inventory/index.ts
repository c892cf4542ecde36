// Inventories: facts about machines, and the packages, ports and containers on them. A machine collects its
// inventory when a request asks for it. The last collection is stored.

import type { Api, Caller, Handlers, Input } from '../../shared/api/route-table.ts';
import type { MachineId } from '../../shared/api/shared-schemas.ts';
import { now, sleep } from '../../shared/clock.ts';
import { fieldError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import { Semaphore } from '../../shared/semaphore.ts';
import type { OtherBrokers } from '../cluster/peers/owner-interfaces.ts';
import type { Events } from '../event-log.ts';
import { notFound } from '../find-or-not-found.ts';
import type { History } from '../history/history-database.ts';
import { pageOf } from '../list-pages-and-filters.ts';
import type { Presence } from '../presence/index.ts';
import type { MachineFacts } from '../presence/stored-facts-and-metrics.ts';
import type { Machine, State } from '../state/index.ts';
import { collectInventory } from './fetch-inventory.ts';
import { InventoryRecords, type Package } from './inventory-store.ts';
import { isBelow } from './package-versions/is-version-below.ts';

interface InventoryServices {
  state: State;
  history: History;
  events: Events;
  presence: Presence;
  machineFacts: MachineFacts;
  /** Calls to other brokers; undefined if this broker is the only one. */
  others: OtherBrokers | undefined;
}

type ListInput = Input<Api['inventory']['list']>;

/** Maximum number of machines that collect their inventories at the same time for all list requests together. */
const mostAtOnce = 16;
/** Maximum number of milliseconds that a list with `refresh` waits for the inventories of machines. */
const refreshMs = 120_000;

export class Inventories {
  readonly #services: InventoryServices;
  readonly #records: InventoryRecords;
  readonly #log: Logger;
  /**
   * Collections that have not ended, by machine. Several requests for the same machine share one collection.
   */
  readonly #collecting = new Map<string, Promise<void>>();
  readonly #turns = new Semaphore(mostAtOnce);

  private constructor(services: InventoryServices, records: InventoryRecords, log: Logger) {
    this.#services = services;
    this.#records = records;
    this.#log = log;
  }

  static async open(services: InventoryServices, log: Logger): Promise<Inventories> {
    const records = await InventoryRecords.open(services.history);
    services.events.within(({ type }, machineId) => {
      if (type !== 'machine.removed' || !machineId) return undefined;
      return (transaction) => records.remove(transaction, machineId);
    });
    return new Inventories(services, records, log);
  }

  readonly handlers: Handlers['inventory'] = {
    get: async ({ machine_id, refresh = false }, caller) => {
      const stored = refresh ? undefined : await this.#records.get(machine_id);
      if (stored) {
        // The machine's owner may no longer allow the inventory.
        this.#services.machineFacts.assertAllows(machine_id, ['inventory']);
        return stored;
      }
      await this.#collect(machine_id, caller);
      const collected = await this.#records.get(machine_id);
      if (collected) return collected;
      throw notFound('machine', machine_id);
    },
    list: async (input, caller) => {
      const { package: name, version_below: limit, offset, refresh } = input;
      if (limit !== undefined && name === undefined)
        throw fieldError('query', 'package', 'is missing; version_below needs it', 'invalid_request');
      if (refresh && offset === 0) await this.#refresh(this.#machines(input, caller), caller);
      const packages = name === undefined ? undefined : await this.#findPackages(name, limit);
      // The machines are listed again, because the rights of the key may have changed during a refresh.
      const machines = this.#machines(input, caller);
      const matching = packages ? machines.filter(({ id }) => packages.has(id)) : machines;
      const times = await this.#records.times();
      // Machines without a collection are the oldest.
      const field = (one: Machine, name: string) =>
        name === 'collected_at' ? (times.get(one.id) ?? 0) : one.name;
      const { items: page, total } = pageOf({}, matching, input, field);
      const visible = page.filter(({ id }) => this.#isAllowed(id)).map(({ id }) => id);
      const summaries = await this.#records.summaries(visible);
      const items = page.map(({ id, name: machine_name, tags }) => ({
        ...{ machine_id: id, machine_name, tags, ip: this.#services.machineFacts.of(id)?.ip ?? '' },
        ...(summaries.get(id) ?? { collected_at: null, facts: null, updates: null }),
        packages: packages?.get(id) ?? [],
      }));
      const without = machines.filter(({ id }) => !times.has(id) || !this.#isAllowed(id));
      return { items, total, without_inventory: without.length };
    },
  };

  /**
   * Makes a machine collect its inventory. Resolves when the new inventory is stored. The collection continues if the
   * request is cancelled, because other requests may wait for it.
   */
  #collect(machineId: MachineId, { request_id, key_id, key_name }: Caller): Promise<void> {
    const running = this.#collecting.get(machineId);
    if (running) return running;
    const asked = { request_id, caller: { key_id, key_name } };
    const collection = this.#collectNow(machineId, asked).finally(() => this.#collecting.delete(machineId));
    this.#collecting.set(machineId, collection);
    return collection;
  }

  async #collectNow(machineId: MachineId, asked: Parameters<typeof collectInventory>[1]): Promise<void> {
    const { presence, history, state } = this.#services;
    const collected = await collectInventory(presence.get(machineId).stub, asked);
    await history.write(async (transaction) => {
      // The machine may have been removed meanwhile.
      if (state.machines.has(machineId)) await this.#records.save(transaction, machineId, now(), collected);
    });
  }

  /** Returns the machines with all these tags that the key may use. */
  #machines({ tags = '' }: ListInput, caller: Caller): Machine[] {
    const wanted = tags.split(',').flatMap((tag) => tag.trim() || []);
    const all = [...this.#services.state.machines.values()];
    return all.filter(
      (machine) => caller.reaches(machine.id) && wanted.every((tag) => machine.tags.includes(tag)),
    );
  }

  /** Returns the packages of this name by machine: all of them, or those older than a version. */
  async #findPackages(name: string, limit: string | undefined): Promise<Map<string, Package[]>> {
    const found = await this.#records.packagesNamed(name);
    const matching = found.filter(
      (one) =>
        this.#isAllowed(one.machine_id) &&
        (limit === undefined ||
          (one.package_format !== undefined && isBelow(one.package_format, one.package.version, limit))),
    );
    const byMachine = Map.groupBy(matching, (one) => one.machine_id);
    return new Map([...byMachine].map(([id, some]) => [id, some.map((one) => one.package)]));
  }

  /**
   * False if the machine's owner no longer allows the inventory. In that case the stored inventory is not
   * sent either.
   */
  #isAllowed(machineId: string): boolean {
    const { capabilities = [] } = this.#services.machineFacts.of(machineId) ?? {};
    return capabilities.length === 0 || capabilities.includes('inventory');
  }

  /**
   * Makes the online machines collect their inventories again. Waits at most `refreshMs` milliseconds. If a machine
   * fails, its stored inventory remains.
   */
  async #refresh(machines: readonly Machine[], caller: Caller): Promise<void> {
    const ending = new AbortController();
    const signal = AbortSignal.any([ending.signal, caller.signal]);
    const collections = machines.flatMap(({ id }) => {
      const collect = this.#collectorOf(id, caller);
      if (!collect) return [];
      const collected = this.#turns.run(signal, collect).catch((err: unknown) => {
        this.#log.debug({ err, machine_id: id }, 'a machine did not send its inventory');
      });
      return [collected];
    });
    await Promise.race([Promise.all(collections), sleep(refreshMs, signal)]);
    // Stops the timer. After a timeout, this also cancels the collections that have not begun.
    ending.abort();
  }

  /**
   * Returns a function that makes a machine collect its inventory, by way of the broker that owns the machine. Returns
   * undefined if the machine is offline.
   */
  #collectorOf(id: MachineId, caller: Caller): (() => Promise<unknown>) | undefined {
    const { presence, others } = this.#services;
    const peer = others?.ownerElsewhere(id);
    if (others && peer)
      return () => others.get(peer, `/api/v1/machines/${id}/inventory?refresh=true`, caller);
    return presence.online(id) ? () => this.#collect(id, caller) : undefined;
  }
}
