// Fields in which the user chooses the machines of an action, one by one or by tags.
import type { ComponentChildren } from 'preact';
import { useEffect, useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { may } from '../login-state.ts';
import { TextField } from '../parts/form.tsx';
import { Choice } from '../parts/small-components.tsx';
import { useTyped } from '../parts/use-data.ts';
import { Chips } from './machine-chips.tsx';
import { MachinePicker } from './machine-picker.tsx';
import { selected, toggle } from './selected-machines.ts';

export interface Targets {
  by: 'machines' | 'tags';
  tags: string;
}

interface TargetFieldsProps {
  draft: Targets;
  set: (changes: Partial<Targets>) => void;
  /** The hint below the field for tags: which machines the tags select, and at what time they are selected. */
  hint: string;
  /** A field for one machine. It replaces the list of selected machines and the field that adds a machine. */
  children?: ComponentChildren;
}

/** A card in which the user chooses machines one by one, or by tags. */
export function TargetFields({ draft: { by, tags }, set, hint, children }: TargetFieldsProps) {
  return (
    <section class="card">
      <div class="card-head spread">
        <h2>Where</h2>
        <Choice
          label="Where"
          options={[
            ['machines', children ? 'Machine' : 'Machines'],
            ['tags', 'Tags'],
          ]}
          value={by}
          choose={(chosen) => set({ by: chosen })}
        />
      </div>
      <div class="card-body">
        {by === 'machines' ? (
          (children ?? <Targets />)
        ) : (
          <>
            <TextField
              label="Tags"
              value={tags}
              change={(text) => set({ tags: text })}
              placeholder="web, eu"
              hint={hint}
            />
            <Tagged tags={tags} />
          </>
        )}
      </div>
    </section>
  );
}

/** The number of machines that have the tags now. */
function Tagged({ tags }: { tags: string }) {
  const [total, setTotal] = useState<number | undefined>(undefined);
  useEffect(() => setTotal(undefined), [tags]);
  const count = (signal: AbortSignal) => client.machines.list({ tags, limit: 1 }, { signal });
  useTyped([tags], tags.trim() !== '' && may('machines:read') ? count : undefined, (found) =>
    setTotal(found.total),
  );
  if (total === undefined) return null;
  return (
    <p class={total === 0 ? 'warn-text' : 'muted'} role="status">
      {total === 1 ? '1 machine has' : `${total.toLocaleString()} machines have`} {tags} now.
    </p>
  );
}

function Targets() {
  return (
    <>
      <Chips label="Selected machines" machines={[...selected.value]} remove={toggle} />
      <MachinePicker label="Add a machine" choose={(id) => !selected.value.has(id) && toggle(id)} />
    </>
  );
}
