// Saved commands: their TypeScript types, the right to change them, and a description of allowed values.
import type { client } from '../api-client.ts';
import { may, me } from '../login-state.ts';

export type SavedCommand = Awaited<ReturnType<typeof client.savedCommands.get>>;
export type Parameter = SavedCommand['parameters'][number];

/** True if the key may create, change and delete saved commands: it has commands:execute and may use all machines. */
export const mayChangeSaved = (): boolean =>
  may('commands:execute') && me.value?.machine_ids === null && me.value.tags === null;

export function allowedText({ type, values, pattern, min, max }: Parameter): string {
  const end = pattern === null ? '' : ` that matches ${pattern}`;
  if (type === 'enum') return `One of ${values?.join(', ')}`;
  if (type === 'boolean') return 'true or false';
  if (type === 'integer')
    return `A whole number from ${min ?? 0}${max === null ? '' : ` to ${max.toLocaleString()}`}`;
  return type === 'path' ? `An absolute path${end}` : `A text${end}`;
}
