// Finds machines, schedules, saved commands, alert rules, channels and maintenance windows by id or by name.
import { StartError } from '../../shared/errors.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { when } from './print.ts';

interface Named {
  id: string;
  name: string;
}

type List<T> = Promise<{ items: T[]; has_more: boolean }> & AsyncIterable<T>;
type Describe<T> = (client: Farhand, found: T[]) => Promise<(one: T) => string> | ((one: T) => string);

interface Kind {
  /** Finds an item by its id or its unique name, and returns its id. Throws StartError if none or several are found. */
  find(client: Farhand, text: string): Promise<string>;
  /** Returns names of items, for the completion of a name that begins with `search`. */
  names(client: Farhand, search: string): Promise<string[]>;
}

/** `what`: noun for the kind in error messages. `describe`: returns texts that distinguish items of the same name. */
function kind<T extends Named>(
  what: string,
  prefix: string,
  list: (client: Farhand, search: string) => List<T>,
  describe: Describe<T> = () => () => '',
): Kind {
  // An id is `prefix`, an underscore and 22 characters. The 22 characters are checked too, because a machine may have
  // the name mach_web.
  const idForm = new RegExp(`^${prefix}_[0-9A-Za-z]{22}$`);
  return {
    names: async (client, search) => (await list(client, search)).items.map(({ name }) => name),
    async find(client, text) {
      if (idForm.test(text)) return text;
      const all = await Array.fromAsync(list(client, text.slice(0, 200)));
      const [one, ...others] = all.filter(({ name }) => name === text);
      if (!one) throw await notFound(what, text, list(client, ''));
      if (others.length === 0) return one.id;
      const textOf = await describe(client, [one, ...others]);
      const each = [one, ...others].map((item) => item.id + textOf(item)).join(', ');
      throw new StartError(`several ${what}s are named ${text}; use an id: ${each}`, 1);
    },
  };
}

async function notFound(what: string, text: string, list: List<Named>): Promise<StartError> {
  const { items, has_more } = await list;
  if (what === 'machine' && items.length === 0)
    return new StartError(
      `no machine is named ${text}: no machine has joined yet, or this key has access to none; to let a machine join, run farhand join-tokens create`,
      1,
    );
  const names = items.slice(0, 10).map(({ name }) => name);
  const more = has_more || items.length > 10 ? '…' : '';
  return new StartError(
    `no ${what} is named ${text}${names.length > 0 ? `; names: ${names.join(', ')}${more}` : ''}`,
    1,
  );
}

const page = { limit: 100, sort: 'name' } as const;
export const machine = kind(
  'machine',
  'mach',
  (client, search) => client.machines.list({ ...page, ...(search && { search }) }),
  () =>
    ({ status, last_seen }) =>
      ` (${status}, last seen ${when(last_seen)})`,
);
const schedule = kind(
  'schedule',
  'sched',
  (client) => client.schedules.list(page),
  async (client, found) => {
    const nameOf = await machineNames(
      client,
      found.map(({ machine_id }) => machine_id),
    );
    return ({ machine_id, tags }) => ` (on ${tags?.join(',') ?? nameOf(machine_id)})`;
  },
);
const saved = kind('saved command', 'saved', (client) => client.savedCommands.list(page));
const channel = kind('alert channel', 'chan', (client) => client.alertChannels.list(page));

/** Kinds of objects, by the argument or flag whose value is the name or id of such an object. */
export const kinds: Readonly<Record<string, Kind>> = {
  ...{ machine, machines: machine, schedule, 'saved-command': saved, savedCommand: saved },
  ...{ channel, channelIds: channel },
  rule: kind('alert rule', 'rule', (client) => client.alertRules.list(page)),
  window: kind('maintenance window', 'win', (client) => client.maintenanceWindows.list(page)),
};

export const findMachine = machine.find;
export const findSavedCommand = saved.find;

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
