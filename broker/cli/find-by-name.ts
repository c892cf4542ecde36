// Finds machines, schedules, saved commands, alert rules, channels and maintenance windows by id or by name.
import { StartError } from '../../shared/errors.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { when } from './print.ts';

type Prefix = 'mach' | 'sched' | 'saved' | 'rule' | 'chan' | 'win';

interface Named {
  id: string;
  name: string;
}

/**
 * Takes the id or the unique name of a machine, and returns the id. Throws StartError if no machine has this name, or
 * if several have it.
 */
export async function findMachine(client: Farhand, text: string): Promise<string> {
  if (isId('mach', text)) return text;
  const all = await Array.fromAsync(client.machines.list({ search: text.slice(0, 200), limit: 100 }));
  const found = all.filter(({ name }) => name === text);
  if (found[0] && !found[1]) return found[0].id;
  if (found[0])
    throw ambiguous('machine', found, ({ status, last_seen }) => `${status}, last seen ${when(last_seen)}`);
  const { items, has_more } = await client.machines.list({ limit: 10, sort: 'name' });
  if (items.length === 0)
    throw new StartError(
      `no machine is named ${text}: no machine has joined yet, or this key has access to none; to let a machine join, run farhand join-tokens create`,
      1,
    );
  throw notFound('machine', text, items, has_more);
}

/**
 * Takes the id or the unique name of a schedule, and returns the id. Throws StartError if no schedule has this name, or
 * if several have it.
 */
export async function findSchedule(client: Farhand, text: string): Promise<string> {
  if (isId('sched', text)) return text;
  const all = await Array.fromAsync(client.schedules.list({ sort: 'name', limit: 100 }));
  const found = all.filter(({ name }) => name === text);
  if (found[0] && !found[1]) return found[0].id;
  if (!found[0]) throw notFound('schedule', text, all.slice(0, 10), all.length > 10);
  const nameOf = await machineNames(
    client,
    found.map(({ machine_id }) => machine_id),
  );
  throw ambiguous('schedule', found, ({ machine_id, tags }) => `on ${tags?.join(',') ?? nameOf(machine_id)}`);
}

type Find = (client: Farhand, text: string) => Promise<string>;
type NamedList = (input: { sort: 'name'; limit: number }) => AsyncIterable<Named>;

/**
 * Returns a function that takes the id or the unique name of an item, and returns the id. That function throws
 * StartError if no item has this name, or if several have it.
 */
const finder =
  (what: string, prefix: Prefix, listOf: (client: Farhand) => NamedList): Find =>
  async (client, text) => {
    if (isId(prefix, text)) return text;
    const all = await Array.fromAsync(listOf(client)({ sort: 'name', limit: 100 }));
    const found = all.filter(({ name }) => name === text);
    if (found[0] && !found[1]) return found[0].id;
    if (found[0]) throw new StartError(`several ${what}s are named ${text}; use an id: ${idsOf(found)}`, 1);
    throw notFound(what, text, all.slice(0, 10), all.length > 10);
  };

const idsOf = (items: Named[]): string => items.map(({ id }) => id).join(', ');

export const findSavedCommand = finder('saved command', 'saved', (client) => client.savedCommands.list);
export const findAlertRule = finder('alert rule', 'rule', (client) => client.alertRules.list);
export const findAlertChannel = finder('alert channel', 'chan', (client) => client.alertChannels.list);
export const findWindow = finder('maintenance window', 'win', (client) => client.maintenanceWindows.list);

function ambiguous<T extends Named>(what: string, found: T[], describe: (one: T) => string): StartError {
  const each = found.map((one) => `${one.id} (${describe(one)})`);
  return new StartError(`several ${what}s are named ${found[0]?.name}; use an id: ${each.join(', ')}`, 1);
}

/** True if a text is an id. The length is checked too, because a machine may be named mach_web. */
const isId = (prefix: Prefix, text: string): boolean => new RegExp(`^${prefix}_[0-9A-Za-z]{22}$`).test(text);

function notFound(what: string, text: string, some: Named[], more: boolean): StartError {
  const names = some.map(({ name }) => name).join(', ');
  return new StartError(`no ${what} is named ${text}${names && `; names: ${names}${more ? '…' : ''}`}`, 1);
}

/**
 * Returns a function that converts machine ids to names. It returns the id itself if the key may not look up
 * the machine.
 */
export async function machineNames(
  client: Farhand,
  ids: readonly (string | null)[],
): Promise<(id: string | null) => string> {
  const [only, another] = new Set(ids);
  const all =
    only && another === undefined
      ? client.machines.get({ machine_id: only }).then((one) => [one])
      : Array.fromAsync<Named>(client.machines.list({ limit: 100 }));
  const names = new Map((await all.catch(() => [])).map(({ id, name }) => [id, name]));
  return (id) => (id === null ? '-' : (names.get(id) ?? id));
}
