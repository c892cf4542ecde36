// The form of an API key: what it may do, on which machines, and until when.
import { useState } from 'preact/hooks';
import type { Scope } from '../../../shared/api/route.ts';
import { client } from '../client.ts';
import { Chips } from '../machines/chips.tsx';
import { MachinePicker } from '../machines/machine-picker.tsx';
import { nameOf } from '../machines/names.ts';
import { Dialog } from '../parts/basics.tsx';
import { CheckField, Form, SelectField, TextField } from '../parts/form.tsx';
import { now } from '../time.ts';
import { allScopes, scopeTexts } from './scopes.ts';

export type Key = Awaited<ReturnType<typeof client.keys.list>>['items'][number];

const dayMs = 86_400_000;
const expiries = [
  ['', 'never'],
  ['1', 'in a day'],
  ['30', 'in 30 days'],
  ['365', 'in a year'],
] as const;

interface KeyFormProps {
  /** The key to change; without one a key is created. */
  apiKey?: Key;
  close: () => void;
  saved: (created?: { name: string; key: string }) => void;
}

export function KeyForm({ apiKey, close, saved }: KeyFormProps) {
  const [name, setName] = useState(apiKey?.name ?? '');
  const [tags, setTags] = useState(apiKey?.tags?.join(', ') ?? '');
  const [machines, setMachines] = useState<readonly string[]>(apiKey?.machine_ids ?? []);
  const [days, setDays] = useState(apiKey ? 'same' : '');
  const [scopes, setScopes] = useState<ReadonlySet<Scope>>(new Set(apiKey?.scopes ?? ['machines:read']));
  const flip = (scope: Scope, on: boolean): void => {
    const next = new Set(scopes);
    if (on) next.add(scope);
    else next.delete(scope);
    setScopes(next);
  };
  const save = async (): Promise<void> => {
    const limits = tags.split(',').flatMap((tag) => tag.trim() || []);
    const rights = { name, scopes: allScopes.filter((scope) => scopes.has(scope)) };
    const expires_at = days && days !== 'same' ? new Date(now() + Number(days) * dayMs).toISOString() : null;
    if (apiKey) {
      await client.keys.update({
        key_id: apiKey.id,
        ...rights,
        tags: limits.length > 0 ? limits : null,
        machine_ids: machines.length > 0 ? [...machines] : null,
        ...(days !== 'same' && { expires_at }),
      });
      return saved();
    }
    const made = await client.keys.create({
      ...rights,
      ...(limits.length > 0 && { tags: limits }),
      ...(machines.length > 0 && { machine_ids: [...machines] }),
      ...(expires_at !== null && { expires_at }),
    });
    saved({ name: made.name, key: made.key });
  };
  return (
    <Dialog title={apiKey ? `Change ${apiKey.name}` : 'New API key'} onClose={close}>
      <Form
        submit={apiKey ? 'Save' : 'Create'}
        cancel={close}
        run={save}
        disabled={!name || scopes.size === 0}
      >
        <TextField label="Name" value={name} change={setName} placeholder="deploy" required autoFocus />
        <fieldset class="field scopes">
          <legend>It may</legend>
          {allScopes.map((scope) => (
            <CheckField
              key={scope}
              label={scopeTexts[scope]}
              value={scopes.has(scope)}
              change={(on) => flip(scope, on)}
            />
          ))}
        </fieldset>
        <TextField
          label="Only machines tagged"
          value={tags}
          change={setTags}
          placeholder="web, db"
          hint="Any of these tags. Without tags and machines: every machine"
        />
        <Chips
          label="Machines of the key"
          machines={machines.map((id) => ({ id, name: nameOf(id) }))}
          remove={({ id }) => setMachines(machines.filter((one) => one !== id))}
        />
        <MachinePicker
          label="And these machines"
          choose={({ id }) => setMachines([...new Set([...machines, id])])}
        />
        <SelectField
          label="Expires"
          value={days}
          change={setDays}
          options={apiKey ? [['same', 'as before'], ...expiries] : expiries}
        />
      </Form>
    </Dialog>
  );
}
