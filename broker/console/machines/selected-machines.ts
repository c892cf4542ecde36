// The machines that the user has selected to run a command on.
import { signal } from '@preact/signals';
import { client } from '../api-client.ts';

export interface Selected {
  id: string;
  name: string;
}

export const selected = signal<ReadonlyMap<string, Selected>>(new Map());
/**
 * Number of machines loaded so far while all matching machines are being selected; undefined at other times.
 */
export const selecting = signal<number | undefined>(undefined);

export function toggle({ id, name }: Selected): void {
  const next = new Map(selected.value);
  if (!next.delete(id)) next.set(id, { id, name });
  selected.value = next;
}

export function selectAll(machines: readonly Selected[]): void {
  selected.value = new Map([
    ...selected.value,
    ...machines.map(({ id, name }) => [id, { id, name }] as const),
  ]);
}

/** Selects these machines instead of those that were selected before. */
export function selectOnly(ids: readonly string[]): void {
  const before = selected.value;
  selected.value = new Map(ids.map((id) => [id, before.get(id) ?? { id, name: '' }]));
}

type Filter = Pick<NonNullable<Parameters<typeof client.machines.list>[0]>, 'search' | 'tags' | 'status'>;

/** Number of machines in one request, the maximum that the broker allows. */
const pageSize = 100;

/** Selects every machine that matches, including those that are not loaded. */
export async function selectMatching({ search, tags, status }: Filter): Promise<void> {
  const filter = { ...(search && { search }), ...(tags && { tags }), ...(status && { status }) };
  const found: Selected[] = [];
  selecting.value = 0;
  try {
    for await (const machine of client.machines.list({ ...filter, sort: 'name', limit: pageSize })) {
      found.push(machine);
      if (found.length % pageSize === 0) selecting.value = found.length;
    }
    selectAll(found);
  } finally {
    selecting.value = undefined;
  }
}

export function clearSelection(): void {
  selected.value = new Map();
}
