// Filtered and sorted lists of machines. Making a list of 10,000 machines takes 10 ms, so each list is cached and
// serves all of its pages.
import { machines as routes } from '../../shared/api/machines.ts';
import type { Page } from '../../shared/api/route-table.ts';
import type { MachineId } from '../../shared/api/shared-schemas.ts';
import { monotonic } from '../../shared/clock.ts';
import { selectFrom } from '../list-pages-and-filters.ts';
import type { Presence } from '../presence/index.ts';
import { percentOf } from '../presence/metrics-report.ts';
import type { MachineFacts } from '../presence/stored-facts-and-metrics.ts';
import type { Machine, State } from '../state/index.ts';

interface ListServices {
  state: State;
  presence: Presence;
  machineFacts: MachineFacts;
}

interface Selection {
  sort: string;
  tags?: string | undefined;
  search?: string | undefined;
  since?: Date | undefined;
  until?: Date | undefined;
}

interface List {
  machines: Machine[];
  /**
   * Result of #versionsOf() when the list was made. Once #versionsOf() returns another result, the list is outdated.
   */
  versions: string;
  /** Monotonic time until which the list is reused, even if machines report new values meanwhile. */
  until: number;
}

/**
 * Maximum number of cached lists for each set of machines. Each combination of filters and sort field needs a list of
 * its own.
 */
const mostLists = 16;
/**
 * Limits the CPU time for lists that are sorted by reported values. If making such a list took 1 ms, the list is then
 * reused for 10 ms.
 */
const reuseFactor = 10;

export class MachineLists {
  readonly #services: ListServices;
  /**
   * Cached lists, by the object that contains their machines: the map of all machines, or the array of one key's
   * machines. A change of the machines creates a new object, which has no cached lists.
   */
  readonly #lists = new WeakMap<object, Map<string, List>>();

  constructor(services: ListServices) {
    this.#services = services;
  }

  /** Returns one page. `allowed` has the machines that the key may use; undefined means all. */
  page(
    { limit, offset, ...selection }: Selection & { limit: number; offset: number },
    allowed: readonly MachineId[] | undefined,
  ): Page<Machine> {
    const machines = this.#select(selection, allowed);
    return { items: machines.slice(offset, offset + limit), total: machines.length };
  }

  #select(selection: Selection, allowed: readonly MachineId[] | undefined): Machine[] {
    const { machines } = this.#services.state;
    const from = allowed ?? machines;
    const lists = this.#lists.get(from) ?? new Map<string, List>();
    this.#lists.set(from, lists);
    const name = JSON.stringify(selection);
    const versions = this.#versionsOf(selection);
    const known = lists.get(name);
    const began = monotonic();
    if (known?.versions === versions && began < known.until) return known.machines;
    const all = allowed ? allowed.flatMap((id) => machines.get(id) ?? []) : [...machines.values()];
    const selected = this.#filterAndSort(all, selection);
    const made = { machines: selected, versions, until: usedUntil(selection, began) };
    lists.delete(name);
    lists.set(name, made);
    // A map iterates over its keys in insertion order, so the first keys are the oldest.
    for (const oldest of [...lists.keys()].slice(0, -mostLists)) lists.delete(oldest);
    return made.machines;
  }

  #filterAndSort(all: Machine[], selection: Selection): Machine[] {
    const wanted = (selection.tags ?? '').split(',').flatMap((tag) => tag.trim() || []);
    const part = (selection.search ?? '').toLowerCase();
    const matching = all.filter(
      ({ name, tags }) => wanted.every((tag) => tags.includes(tag)) && name.toLowerCase().includes(part),
    );
    return selectFrom(routes.list, matching, selection, (machine, name) => this.#field(machine, name));
  }

  #field(machine: Machine, name: string): unknown {
    if (name in machine) return Reflect.get(machine, name);
    if (name === 'status') return this.#services.presence.linkedAnywhere(machine.id) ? 'online' : 'offline';
    if (['cpu', 'memory', 'disk'].includes(name)) return this.#percentUsed(machine.id, name);
    const facts = this.#services.machineFacts.of(machine.id);
    if (name === 'last_seen') return facts?.last_seen ?? Date.parse(machine.created_at);
    return Reflect.get(facts ?? {}, name) ?? '';
  }

  /** Returns undefined if there is no report. */
  #percentUsed(id: MachineId, name: string): number | undefined {
    const report = this.#services.machineFacts.allowedReport(id);
    if (!report) return undefined;
    if (name === 'cpu') return report.cpu_usage;
    return percentOf(name === 'memory' ? report.memory : report.disk);
  }

  /**
   * Returns a text that changes when a machine gets another status, hostname, os or arch. Fields that the selection
   * does not use are ignored.
   */
  #versionsOf(selection: Selection): string {
    const { presence, machineFacts } = this.#services;
    const used = [...Object.keys(selection), selection.sort.replace('-', '')];
    return [
      used.includes('status') && presence.version,
      ['hostname', 'os', 'arch'].some((name) => used.includes(name)) && machineFacts.version,
    ].join();
  }
}

/**
 * Returns the monotonic time until which a list is reused. `began` is the monotonic time at which the broker began to
 * make it.
 */
function usedUntil({ sort }: Selection, began: number): number {
  if (!['last_seen', 'cpu', 'memory', 'disk'].includes(sort.replace('-', '')))
    return Number.POSITIVE_INFINITY;
  return began + (monotonic() - began) * (reuseFactor + 1);
}
