// The form of an API key: what it may do, on which machines, and until when.
import { useState } from 'preact/hooks';
import type { Scope } from '../../../shared/api/route.ts';
import { client } from '../api-client.ts';
import { MachinePicker } from '../machines/machine-picker.tsx';
import { nameOf } from '../machines/names.ts';
import { Chips } from '../machines/selected-machine-chips.tsx';
import { CheckField, Form, SelectField, TextField } from '../parts/form.tsx';
import { Dialog } from '../parts/small-components.tsx';
import { now } from '../time.ts';
import { allScopes, scopeTexts } from './scopes.ts';

export type Key = Awaited<ReturnType<typeof client.keys.list>>['items'][number];

const dayMs = 86_400_000;
/** The choice that does not change the expiry of a key. */
const asBefore = 'same';
const expiries = [
  ['', 'never'],
  ['1', 'in a day'],
  ['30', 'in 30 days'],
  ['365', 'in a year'],
] as const;

interface KeyFormProps {
  /** The key to change. If it is undefined, a key is created. */
  apiKey?: Key;
  close: () => void;
  saved: (created?: { name: string; key: string }) => void;
}

interface Draft {
  name: string;
  scopes: ReadonlySet<Scope>;
  /** Tags, separated by commas. */
  tags: string;
  machines: readonly string[];
  /** Days until the key expires; empty for no expiry. */
  days: string;
}

/** Creates or changes a key. Resolves with the secret if the key is new. */
async function save(
  draft: Draft,
  id: string | undefined,
): Promise<{ name: string; key: string } | undefined> {
  const { name, scopes, days, machines } = draft;
  const tags = draft.tags.split(',').flatMap((tag) => tag.trim() || []);
  const rights = { name, scopes: allScopes.filter((scope) => scopes.has(scope)) };
  const expires_at = days && days !== asBefore ? new Date(now() + Number(days) * dayMs).toISOString() : null;
  if (id === undefined)
    return client.keys.create({
      ...rights,
      ...(tags.length > 0 && { tags }),
      ...(machines.length > 0 && { machine_ids: [...machines] }),
      ...(expires_at !== null && { expires_at }),
    });
  await client.keys.update({
    key_id: id,
    ...rights,
    tags: tags.length > 0 ? tags : null,
    machine_ids: machines.length > 0 ? [...machines] : null,
    ...(days !== asBefore && { expires_at }),
  });
  return undefined;
}

export function KeyForm({ apiKey, close, saved }: KeyFormProps) {
  const [draft, setDraft] = useState<Draft>({
    name: apiKey?.name ?? '',
    scopes: new Set(apiKey?.scopes ?? ['machines:read']),
    tags: apiKey?.tags?.join(', ') ?? '',
    machines: apiKey?.machine_ids ?? [],
    days: apiKey ? asBefore : '',
  });
  const set = (changes: Partial<Draft>): void => setDraft((before) => ({ ...before, ...changes }));
  const { name, scopes, days } = draft;
  return (
    <Dialog title={apiKey ? `Change ${apiKey.name}` : 'New API key'} onClose={close}>
      <Form
        submit={apiKey ? 'Save' : 'Create'}
        cancel={close}
        run={async () => saved(await save(draft, apiKey?.id))}
        disabled={!name || scopes.size === 0}
      >
        <TextField
          label="Name"
          value={name}
          change={(text) => set({ name: text })}
          placeholder="deploy"
          required
          autoFocus
        />
        <Scopes scopes={scopes} change={(chosen) => set({ scopes: chosen })} />
        <Limits draft={draft} set={set} />
        <SelectField
          label="Expires"
          value={days}
          change={(text) => set({ days: text })}
          options={apiKey ? [[asBefore, 'as before'], ...expiries] : expiries}
        />
      </Form>
    </Dialog>
  );
}

interface ScopesProps {
  scopes: ReadonlySet<Scope>;
  change: (scopes: ReadonlySet<Scope>) => void;
}

function Scopes({ scopes, change }: ScopesProps) {
  const flip = (scope: Scope, on: boolean): void => {
    const next = new Set(scopes);
    if (on) next.add(scope);
    else next.delete(scope);
    change(next);
  };
  return (
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
  );
}

function Limits({
  draft: { tags, machines },
  set,
}: {
  draft: Draft;
  set: (changes: Partial<Draft>) => void;
}) {
  return (
    <>
      <TextField
        label="Only machines tagged"
        value={tags}
        change={(text) => set({ tags: text })}
        placeholder="web, db"
        hint="Any of these tags. Without tags and machines: every machine"
      />
      <Chips
        label="Machines of the key"
        machines={machines.map((id) => ({ id, name: nameOf(id) }))}
        remove={({ id }) => set({ machines: machines.filter((one) => one !== id) })}
      />
      <MachinePicker
        label="And these machines"
        choose={({ id }) => set({ machines: [...new Set([...machines, id])] })}
      />
    </>
  );
}
