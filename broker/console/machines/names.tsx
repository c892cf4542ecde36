// Names of machines by id, for lists whose items contain only the id.
import { signal } from '@preact/signals';
import { client } from '../api-client.ts';
import { to } from '../router.ts';

const names = signal<ReadonlyMap<string, string>>(new Map());
const asked = new Set<string>();

/** Stores machine names that arrived with other data, so that nameOf() need not request them. */
export function learnNames(machines: readonly { id: string; name: string }[]): void {
  names.value = new Map([...names.value, ...machines.map(({ id, name }) => [id, name] as const)]);
}

/**
 * Returns the name of a machine. Returns its id if the name is not loaded yet, or if the machine was removed.
 */
export function nameOf(id: string): string {
  const known = names.value.get(id);
  if (known !== undefined) return known;
  if (!asked.has(id)) {
    asked.add(id);
    client.machines.get({ machine_id: id }).then(
      (machine) => learnNames([machine]),
      () => {},
    );
  }
  return id;
}

/** A link to the page of a machine. */
export function MachineLink({ id }: { id: string }) {
  return (
    <a class="machine-link" href={to('/machines', id)}>
      {nameOf(id)}
    </a>
  );
}
