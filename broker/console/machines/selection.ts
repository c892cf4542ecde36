// The machines that a person has selected to run a command on.
import { signal } from '@preact/signals';

export interface Selected {
  id: string;
  name: string;
}

export const selected = signal<ReadonlyMap<string, Selected>>(new Map());

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

export function clearSelection(): void {
  selected.value = new Map();
}
