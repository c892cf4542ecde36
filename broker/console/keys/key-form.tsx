// The form that creates or changes an API key: its name, its scopes, its machines, and when it expires.
import type { Scope } from '../../../shared/api/route.ts';
import { client } from '../api-client.ts';
import { fromLimited, type Limits, LimitsFields, toLimited } from '../machines/machine-restriction.tsx';
import { CheckFields, SelectField, TextField } from '../parts/form.tsx';
import { FormDialog, useDraft } from '../parts/form-draft-and-dialog.tsx';
import { dayMs, now } from '../timers.ts';
import { allScopes, scopeTexts } from './scopes.ts';

export type Key = Awaited<ReturnType<typeof client.keys.list>>['items'][number];

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
  scopes: readonly Scope[];
  limits: Limits;
  /** Days until the key expires; empty for no expiry. */
  days: string;
}

/** Creates or changes a key. Resolves with the secret if the key is new. */
async function save(
  draft: Draft,
  before: Key | undefined,
): Promise<{ name: string; key: string } | undefined> {
  const { name, days, limits } = draft;
  const { tags, machine_ids } = toLimited(limits);
  const scopes = sorted(draft.scopes);
  const expires_at = days && days !== asBefore ? new Date(now() + Number(days) * dayMs).toISOString() : null;
  if (before === undefined)
    return client.keys.create({
      name,
      scopes,
      ...(tags && { tags }),
      ...(machine_ids && { machine_ids }),
      ...(expires_at !== null && { expires_at }),
    });
  // Only fields that the user changed are sent. The others could restore rights that were removed from the key
  // meanwhile.
  await client.keys.update({
    key_id: before.id,
    ...(name !== before.name && { name }),
    ...(!isDeepEqual(scopes, sorted(before.scopes)) && { scopes }),
    ...(!isDeepEqual(limits, fromLimited(before)) && { tags, machine_ids }),
    ...(days !== asBefore && { expires_at }),
  });
  return undefined;
}

const sorted = (scopes: readonly Scope[]): Scope[] => allScopes.filter((scope) => scopes.includes(scope));
const isDeepEqual = (one: unknown, other: unknown): boolean => JSON.stringify(one) === JSON.stringify(other);

export function KeyForm({ apiKey, close, saved }: KeyFormProps) {
  const { draft, bind } = useDraft<Draft>({
    name: apiKey?.name ?? '',
    scopes: apiKey?.scopes ?? ['machines:read'],
    limits: fromLimited(apiKey),
    days: apiKey ? asBefore : '',
  });
  const { name, scopes } = draft;
  return (
    <FormDialog
      title={apiKey ? `Change ${apiKey.name}` : 'New API key'}
      submit={apiKey ? 'Save' : 'Create'}
      close={close}
      run={() => save(draft, apiKey)}
      done={saved}
      disabled={!name || scopes.length === 0}
    >
      <TextField label="Name" {...bind('name')} placeholder="deploy" required autoFocus />
      <fieldset class="field">
        <legend>The key may</legend>
        <CheckFields options={allScopes.map((scope) => [scope, scopeTexts[scope]])} {...bind('scopes')} />
      </fieldset>
      <LimitsFields {...bind('limits')} />
      <SelectField
        label="Expires"
        {...bind('days')}
        options={apiKey ? [[asBefore, 'as before'], ...expiries] : expiries}
      />
    </FormDialog>
  );
}
