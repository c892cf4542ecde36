// The machines that the user has selected for a command or an upgrade.
import { signal } from '@preact/signals';
import { client } from '../api-client.ts';
import { learnNames } from './names.tsx';

/** Ids of the selected machines. */
export const selected = signal<ReadonlySet<string>>(new Set());
/**
 * Number of machines loaded so far while all matching machines are being selected; undefined at other times.
 */
export const selecting = signal<number | undefined>(undefined);

export function toggle(id: string): void {
  const next = new Set(selected.value);
  if (!next.delete(id)) next.add(id);
  selected.value = next;
}

/** Selects these machines instead of those that were selected before. */
export function selectOnly(ids: readonly string[]): void {
  selected.value = new Set(ids);
}

type Filter = Pick<NonNullable<Parameters<typeof client.machines.list>[0]>, 'search' | 'tags' | 'status'>;

/** Number of machines in one request, the maximum that the broker allows. */
const pageSize = 100;

/** Selects every machine that matches, including those that are not loaded. */
export async function selectMatching({ search, tags, status }: Filter): Promise<void> {
  const filter = { ...(search && { search }), ...(tags && { tags }), ...(status && { status }) };
  const found: { id: string; name: string }[] = [];
  selecting.value = 0;
  try {
    for await (const machine of client.machines.list({ ...filter, sort: 'name', limit: pageSize })) {
      found.push(machine);
      if (found.length % pageSize === 0) selecting.value = found.length;
    }
    learnNames(found);
    selectOnly([...selected.value, ...found.map(({ id }) => id)]);
  } finally {
    selecting.value = undefined;
  }
}

export function clearSelection(): void {
  selected.value = new Set();
}
