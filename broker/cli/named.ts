// Machines and schedules by id or by name, everywhere alike.
import { StartError } from '../../shared/errors.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { when } from './output.ts';
import { every } from './verb.ts';

interface Named {
  id: string;
  name: string;
}

/** The id of a machine that is given by id or by a name that only one has. */
export async function machineNamed(client: Farhand, text: string): Promise<string> {
  if (isId('mach', text)) return text;
  const alike = await every((page) => client.machines.list({ search: text.slice(0, 200), ...page }));
  const found = alike.filter(({ name }) => name === text);
  if (found.length === 0) {
    const { items, has_more } = await client.machines.list({ limit: 10, sort: 'name' });
    throw new StartError(withColon(alike, text) ?? none('machine', text, items, has_more), 1);
  }
  return onlyOf('machine', found, async ({ status, last_seen }) => `${status}, seen ${when(last_seen)}`);
}

/** The same of a schedule. */
export async function scheduleNamed(client: Farhand, text: string): Promise<string> {
  if (isId('sched', text)) return text;
  const all = await every((page) => client.schedules.list({ sort: 'name', ...page }));
  const found = all.filter(({ name }) => name === text);
  if (found.length === 0) throw new StartError(none('schedule', text, all.slice(0, 10), all.length > 10), 1);
  return onlyOf('schedule', found, async ({ machine_id }) => {
    return `on ${(await namesOf(client, [machine_id]))(machine_id)}`;
  });
}

async function onlyOf<T extends Named>(
  what: string,
  found: T[],
  describe: (one: T) => Promise<string>,
): Promise<string> {
  const [only, another] = found;
  if (only && !another) return only.id;
  const each = await Promise.all(found.map(async (one) => `${one.id} (${await describe(one)})`));
  throw new StartError(`several ${what}s are called ${only?.name}; say which: ${each.join(', ')}`, 1);
}

/** A machine may be called mach_web as well. */
const isId = (prefix: 'mach' | 'sched', text: string): boolean =>
  new RegExp(`^${prefix}_[0-9A-Za-z]{22}$`).test(text);

/** In machine:path a name ends at its first colon. */
function withColon(alike: Named[], text: string): string | undefined {
  const meant = alike.filter(({ name }) => name.startsWith(`${text}:`));
  if (meant.length === 0) return undefined;
  const ids = meant.map(({ id, name }) => `${id} (${name})`).join(', ');
  return `there is no machine ${text}; where a name has a colon say the id: ${ids}`;
}

function none(what: string, text: string, some: Named[], more: boolean): string {
  const names = some.map(({ name }) => name).join(', ');
  return `there is no ${what} ${text}${names && `; there is: ${names}${more ? '…' : ''}`}`;
}

/** The name of each machine with one of these ids; an id that the key may not look up stays as it is. */
export async function namesOf(
  client: Farhand,
  ids: readonly (string | null)[],
): Promise<(id: string | null) => string> {
  const [only, another] = new Set(ids);
  const all =
    only && another === undefined
      ? client.machines.get({ machine_id: only }).then((one) => [one])
      : every<Named>((page) => client.machines.list(page));
  const names = new Map((await all.catch(() => [])).map(({ id, name }) => [id, name]));
  return (id) => (id === null ? '-' : (names.get(id) ?? id));
}
