// Machines and schedules by id or by name, everywhere alike.
import { StartError } from '../../shared/errors.ts';
import type { Farhand } from '../../shared/sdk/index.ts';
import { when } from './output.ts';
import { every } from './verb.ts';

/** The id of a machine that is told by id or by a name that only one has. */
export async function machineNamed(client: Farhand, text: string): Promise<string> {
  if (isId('mach', text)) return text;
  const alike = await every((page) => client.machines.list({ search: text.slice(0, 200), ...page }));
  const found = alike.filter(({ name }) => name === text);
  const [only, another] = found;
  if (only === undefined) throw new StartError(withColon(alike, text) ?? (await noneNamed(client, text)), 1);
  if (another) {
    const each = found.map(({ id, status, last_seen }) => `${id} (${status}, seen ${when(last_seen)})`);
    throw new StartError(`several machines are called ${text}; say which: ${each.join(', ')}`, 1);
  }
  return only.id;
}

/** A machine may be called mach_web as well. */
const isId = (prefix: 'mach' | 'sched', text: string): boolean =>
  new RegExp(`^${prefix}_[0-9A-Za-z]{22}$`).test(text);

/** In machine:path a name ends at its first colon. */
function withColon(alike: { id: string; name: string }[], text: string): string | undefined {
  const meant = alike.filter(({ name }) => name.startsWith(`${text}:`));
  if (meant.length === 0) return undefined;
  const ids = meant.map(({ id, name }) => `${id} (${name})`).join(', ');
  return `there is no machine ${text}; where a name has a colon say the id: ${ids}`;
}

async function noneNamed(client: Farhand, text: string): Promise<string> {
  const { items, has_more } = await client.machines.list({ limit: 10, sort: 'name' });
  return none('machine', text, items, has_more);
}

function none(what: string, text: string, some: { name: string }[], more: boolean): string {
  const names = some.map(({ name }) => name).join(', ');
  return `there is no ${what} ${text}${names && `; there is: ${names}${more ? '…' : ''}`}`;
}

/** The id of a schedule that is told by id or by a name that only one has. */
export async function scheduleNamed(client: Farhand, text: string): Promise<string> {
  if (isId('sched', text)) return text;
  const all = await every((page) => client.schedules.list({ sort: 'name', ...page }));
  const found = all.filter(({ name }) => name === text);
  const [only, another] = found;
  if (only === undefined) throw new StartError(none('schedule', text, all.slice(0, 10), all.length > 10), 1);
  if (another) {
    const nameOf = await namesOf(
      client,
      found.map(({ machine_id }) => machine_id),
    );
    const each = found.map(({ id, machine_id }) => `${id} (on ${nameOf(machine_id)})`);
    throw new StartError(`several schedules are called ${text}; say which: ${each.join(', ')}`, 1);
  }
  return only.id;
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
      : every<{ id: string; name: string }>((page) => client.machines.list(page));
  const names = new Map((await all.catch(() => [])).map(({ id, name }) => [id, name]));
  return (id) => (id === null ? '-' : (names.get(id) ?? id));
}
