// The chosen machines as chips. A button on each chip deselects its machine.
import { Button } from '../parts/button.tsx';
import { Icon } from '../parts/icon.tsx';
import { close, machines as machinesIcon } from '../parts/icons.ts';
import { nameOf } from './names.tsx';

const mostChips = 40;

interface ChipsProps {
  label: string;
  /** Ids of the machines. */
  machines: readonly string[];
  remove: (id: string) => void;
}

export function Chips({ label, machines, remove }: ChipsProps) {
  if (machines.length === 0) return null;
  return (
    <ul class="chips" aria-label={label}>
      {machines.slice(0, mostChips).map((id) => (
        <li key={id} class="chip">
          <Icon of={machinesIcon} size={13} />
          <span class="cut">{nameOf(id)}</span>
          <Button class="quiet" aria-label={`Deselect ${nameOf(id)}`} press={() => remove(id)}>
            <Icon of={close} size={13} />
          </Button>
        </li>
      ))}
      {machines.length > mostChips && (
        <li class="chip">and {(machines.length - mostChips).toLocaleString()} more</li>
      )}
    </ul>
  );
}
