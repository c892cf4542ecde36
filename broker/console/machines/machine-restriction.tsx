// The form fields that limit a key, an alert rule or a maintenance window to certain machines. The user chooses these
// machines by tag or one by one.
import { TextField } from '../parts/form.tsx';
import { Chips } from './machine-chips.tsx';
import { MachinePicker } from './machine-picker.tsx';
import { nameOf } from './names.tsx';

/** The tags and machines that the user has entered as the limits of something, for example of an API key. */
export interface Limits {
  /** Tags, separated by commas. */
  tags: string;
  machines: readonly string[];
}

/** The limits as requests and answers contain them. If both fields are null, there is no limit. */
interface Limited {
  tags: string[] | null;
  machine_ids: string[] | null;
}

/** Splits a text into tags at its commas. */
export const tagsOf = (text: string): string[] => text.split(',').flatMap((tag) => tag.trim() || []);

export const fromLimited = (limited: Limited | undefined): Limits => ({
  tags: limited?.tags?.join(', ') ?? '',
  machines: limited?.machine_ids ?? [],
});

const orNull = (items: string[]): string[] | null => (items.length > 0 ? items : null);

export const toLimited = ({ tags, machines }: Limits): Limited => ({
  tags: orNull(tagsOf(tags)),
  machine_ids: orNull([...machines]),
});

/** Describes the limits in words, for lists. */
export function limitsText({ tags, machine_ids }: Limited): string {
  if (machine_ids === null && tags === null) return 'all';
  const [first = ''] = machine_ids ?? [];
  const named = machine_ids?.length === 1 ? nameOf(first) : `${machine_ids?.length} machines`;
  return [...(machine_ids ? [named] : []), ...(tags ? [`tagged ${tags.join(' or ')}`] : [])].join(', ');
}

interface LimitsFieldsProps {
  value: Limits;
  change: (limits: Limits) => void;
}

export function LimitsFields({ value: { tags, machines }, change }: LimitsFieldsProps) {
  const set = (chosen: readonly string[]): void => change({ tags, machines: chosen });
  return (
    <>
      <TextField
        label="Only machines tagged"
        value={tags}
        change={(text) => change({ tags: text, machines })}
        placeholder="web, db"
        hint="One of these tags is enough. If you enter no tags and choose no machines, every machine is included"
      />
      <Chips
        label="Chosen machines"
        machines={machines}
        remove={(id) => set(machines.filter((one) => one !== id))}
      />
      <MachinePicker label="And these machines" choose={(id) => set([...new Set([...machines, id])])} />
    </>
  );
}
