// The machines chosen for a command, as chips. A button on each chip deselects the machine.
import { Icon } from '../parts/icon.tsx';
import { close, machines as machinesIcon } from '../parts/icons.ts';
import { nameOf } from './names.tsx';
import type { Selected } from './selected-machines.ts';

const mostChips = 40;

interface ChipsProps {
  label: string;
  machines: readonly Selected[];
  remove: (machine: Selected) => void;
}

export function Chips({ label, machines, remove }: ChipsProps) {
  if (machines.length === 0) return null;
  return (
    <ul class="chips" aria-label={label}>
      {machines.slice(0, mostChips).map((machine) => (
        <li key={machine.id} class="chip">
          <Icon of={machinesIcon} size={13} />
          <span class="cut">{machine.name || nameOf(machine.id)}</span>
          <button
            type="button"
            class="quiet"
            aria-label={`Leave out ${machine.name || nameOf(machine.id)}`}
            onClick={() => remove(machine)}
          >
            <Icon of={close} size={13} />
          </button>
        </li>
      ))}
      {machines.length > mostChips && (
        <li class="chip">and {(machines.length - mostChips).toLocaleString()} more</li>
      )}
    </ul>
  );
}
