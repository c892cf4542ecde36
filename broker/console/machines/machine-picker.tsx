// A field that finds a machine by a part of its name.
import { useId, useState } from 'preact/hooks';
import type { client } from '../api-client.ts';
import { Field } from '../parts/form.tsx';
import { State } from '../parts/small-components.tsx';
import { place, setQuery } from '../router.ts';
import { Chips } from './machine-chips.tsx';
import { learnNames, nameOf } from './names.tsx';
import { useCurrent, useMachinesByName } from './search-machines-by-name.ts';

type Found = Awaited<ReturnType<typeof client.machines.list>>['items'];

interface MachinePickerProps {
  label: string;
  choose: (id: string) => void;
}

export function MachinePicker({ label, choose }: MachinePickerProps) {
  const [text, setText] = useState('');
  const [open, setOpen] = useState(false);
  const found = useMachinesByName(text, open);
  const listId = useId();
  const take = (machine: Found[number] | undefined): void => {
    if (!machine || !open) return;
    learnNames([machine]);
    choose(machine.id);
    setText('');
    setOpen(false);
  };
  const { at, setAt, onKey } = useCurrent(found, take);
  return (
    <Field label={label}>
      {(id) => (
        <div class="picker">
          <input
            id={id}
            type="text"
            role="combobox"
            list={undefined}
            aria-expanded={open}
            aria-controls={listId}
            aria-activedescendant={open && found[at] ? `${listId}-${at}` : undefined}
            placeholder="Part of a machine’s name"
            autoComplete="off"
            value={text}
            onInput={({ currentTarget }) => {
              setText(currentTarget.value);
              setAt(0);
              setOpen(true);
            }}
            onFocus={() => setOpen(true)}
            onBlur={() => setOpen(false)}
            onKeyDown={(event) => (event.key === 'Escape' ? setOpen(false) : onKey(event))}
          />
          <div id={listId} role="listbox" aria-label={label} hidden={!open || found.length === 0}>
            {found.map((machine, index) => (
              <div
                key={machine.id}
                id={`${listId}-${index}`}
                role="option"
                tabIndex={-1}
                aria-selected={index === at}
                onMouseDown={(event) => {
                  event.preventDefault();
                  take(machine);
                }}
              >
                <span class="cut">{machine.name}</span>
                <State of={machine.status} />
              </div>
            ))}
          </div>
        </div>
      )}
    </Field>
  );
}

/** Limits a list to one machine, whose id is in the URL of the page. */
export function MachineFilter() {
  const machine = place.value.query.get('machine') ?? '';
  const choose = (id: string): void => setQuery({ machine: id });
  if (machine !== '')
    return <Chips label="Only this machine" machines={[machine]} remove={() => choose('')} />;
  return <MachinePicker label="Machine" choose={choose} />;
}

interface MachineFieldProps {
  /** Text before the name of the chosen machine, such as "Runs on". */
  before: string;
  /** Id of the chosen machine; '' if there is none. */
  machine: string;
  choose: (id: string) => void;
}

/** The chosen machine, and a field to choose another one. */
export function MachineField({ before, machine, choose }: MachineFieldProps) {
  return (
    <div class="field">
      {machine && (
        <p>
          {before} <strong>{nameOf(machine)}</strong>
        </p>
      )}
      <MachinePicker label={machine ? 'Another machine' : 'Machine'} choose={choose} />
    </div>
  );
}
