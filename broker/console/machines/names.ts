// Names of machines by id, for lists whose items name only the id.
import { signal } from '@preact/signals';
import { client } from '../client.ts';

export type MachineNames = (id: string) => string;

const names = signal<ReadonlyMap<string, string>>(new Map());
const asked = new Set<string>();

/** Records names that are known from elsewhere. */
export function learnNames(machines: readonly { id: string; name: string }[]): void {
  names.value = new Map([...names.value, ...machines.map(({ id, name }) => [id, name] as const)]);
}

/** The name of a machine; its id while the name is not here, and for removed machines. */
export const nameOf: MachineNames = (id) => {
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
};
