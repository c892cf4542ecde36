// API keys: what each may do and on which machines; create, rotate and revoke.
import { useState } from 'preact/hooks';
import type { Scope } from '../../../shared/api/route.ts';
import { client } from '../client.ts';
import { nameOf } from '../machines/names.ts';
import { Ago, Confirm, CopyButton, Dialog, Tags } from '../parts/basics.tsx';
import { CheckField, Form, SelectField, TextField } from '../parts/form.tsx';
import { Icon } from '../parts/icon.tsx';
import * as icons from '../parts/icons.ts';
import { List, LongList } from '../parts/lists.tsx';
import { Empty, Page } from '../parts/page.tsx';
import { say } from '../parts/toasts.tsx';
import { me } from '../session.ts';
import { now } from '../time.ts';

type Key = Awaited<ReturnType<typeof client.keys.list>>['items'][number];

/** Every scope with what it allows; the type makes the list complete. */
const scopeTexts: Readonly<Record<Scope, string>> = {
  'machines:read': 'See machines, their metrics and events',
  'machines:write': 'Rename, tag and remove machines',
  'files:read': 'Read, download and search files',
  'files:write': 'Write, upload and delete files',
  'commands:read': 'See commands and their output',
  'commands:execute': 'Run and cancel commands',
  'sessions:read': 'See terminals',
  'sessions:attach': 'Open and use terminals',
  'schedules:read': 'See schedules and their runs',
  'schedules:write': 'Create and change schedules',
  'webhooks:read': 'See webhooks and deliveries',
  'webhooks:write': 'Create and change webhooks',
  admin: 'Everything, with keys, join tokens and the audit log',
};
// The cast is safe: the record has exactly these keys.
const allScopes = Object.keys(scopeTexts) as Scope[];

export function Keys() {
  const [round, setRound] = useState(0);
  const [creating, setCreating] = useState(false);
  const [secret, setSecret] = useState<{ name: string; key: string } | undefined>(undefined);
  const changed = (): void => setRound((before) => before + 1);
  const newButton = (
    <button type="button" class="primary" onClick={() => setCreating(true)}>
      <Icon of={icons.join} />
      New key
    </button>
  );
  return (
    <Page title="API keys" actions={newButton}>
      <LongList
        read={(paging, signal) => client.keys.list({ sort: 'name', ...paging }, { signal })}
        inputs={[round]}
        empty={
          <Empty icon={icons.key} title="There is no key">
            {newButton}
          </Empty>
        }
      >
        {(items) => <KeyList items={items} changed={changed} reveal={setSecret} />}
      </LongList>
      {creating && (
        <NewKey
          close={() => setCreating(false)}
          created={(made) => {
            setCreating(false);
            setSecret(made);
            changed();
          }}
        />
      )}
      {secret && <Secret name={secret.name} secret={secret.key} close={() => setSecret(undefined)} />}
    </Page>
  );
}

interface KeyListProps {
  items: readonly Key[];
  changed: () => void;
  reveal: (secret: { name: string; key: string }) => void;
}

function KeyList({ items, changed, reveal }: KeyListProps) {
  const [open, setOpen] = useState<{ what: 'rotate' | 'revoke'; key: Key } | undefined>(undefined);
  const close = (): void => setOpen(undefined);
  return (
    <>
      <List
        label="API keys"
        head={
          <>
            <th>Name</th>
            <th class="wide">May do</th>
            <th>Machines</th>
            <th>Last used</th>
            <th>Expires</th>
            <th>
              <span class="only-read">Actions</span>
            </th>
          </>
        }
      >
        {items.map((key) => (
          <KeyRow key={key.id} apiKey={key} open={(what) => setOpen({ what, key })} />
        ))}
      </List>
      {open && (
        <KeyDialog what={open.what} apiKey={open.key} close={close} changed={changed} reveal={reveal} />
      )}
    </>
  );
}

function KeyRow({ apiKey, open }: { apiKey: Key; open: (what: 'rotate' | 'revoke') => void }) {
  return (
    <tr>
      <td>
        {apiKey.name} {apiKey.id === me.value?.id && <span class="tag">you</span>}
      </td>
      <td class="wide">
        <Tags of={apiKey.scopes} />
      </td>
      <td class="muted">{machinesOf(apiKey)}</td>
      <td class="muted">
        <Ago at={apiKey.last_used_at} />
      </td>
      <td class="muted">
        <Ago at={apiKey.expires_at} />
      </td>
      <td class="row-buttons">
        <button
          type="button"
          class="quiet icon-only"
          aria-label={`Replace the secret of ${apiKey.name}`}
          title="Replace the secret"
          onClick={() => open('rotate')}
        >
          <Icon of={icons.refresh} />
        </button>
        <button
          type="button"
          class="quiet icon-only"
          aria-label={`Revoke ${apiKey.name}`}
          title="Revoke"
          onClick={() => open('revoke')}
        >
          <Icon of={icons.trash} />
        </button>
      </td>
    </tr>
  );
}

interface KeyDialogProps extends Omit<KeyListProps, 'items'> {
  what: 'rotate' | 'revoke';
  apiKey: Key;
  close: () => void;
}

function KeyDialog({ what, apiKey, close, changed, reveal }: KeyDialogProps) {
  if (what === 'rotate') {
    return (
      <Confirm
        title={`Replace the secret of ${apiKey.name}?`}
        action="Replace the secret"
        onClose={close}
        run={async () => {
          reveal(await client.keys.rotate({ key_id: apiKey.id }));
          changed();
        }}
      >
        <p>The old secret stops at once, and so do the other logins of the key. Its rights stay.</p>
      </Confirm>
    );
  }
  return (
    <Confirm
      title={`Revoke ${apiKey.name}?`}
      action="Revoke the key"
      onClose={close}
      run={async () => {
        const { schedules, webhooks } = await client.keys.remove({ key_id: apiKey.id });
        const stopped = schedules.length + webhooks.length;
        say(
          `${apiKey.name} is revoked${stopped > 0 ? `; ${stopped} schedules and webhooks of it stop` : ''}`,
        );
        changed();
      }}
    >
      <p>It stops at once, with its logins. Schedules and webhooks made with it stop, too.</p>
      {apiKey.id === me.value?.id && <p class="bad-text">This is the key you are logged in with.</p>}
    </Confirm>
  );
}

function machinesOf({ machine_ids, tags }: Key): string {
  if (machine_ids === null && tags === null) return 'all';
  const named =
    machine_ids?.length === 1 ? [nameOf(machine_ids[0] ?? '')] : [`${machine_ids?.length ?? 0} machines`];
  return [...(machine_ids ? named : []), ...(tags ? [`tagged ${tags.join(' or ')}`] : [])].join(', ');
}

interface NewKeyProps {
  close: () => void;
  created: (made: { name: string; key: string }) => void;
}

const dayMs = 86_400_000;

function NewKey({ close, created }: NewKeyProps) {
  const [name, setName] = useState('');
  const [tags, setTags] = useState('');
  const [days, setDays] = useState('');
  const [scopes, setScopes] = useState<ReadonlySet<Scope>>(new Set(['machines:read']));
  const flip = (scope: Scope, on: boolean): void => {
    const next = new Set(scopes);
    if (on) next.add(scope);
    else next.delete(scope);
    setScopes(next);
  };
  const create = async (): Promise<void> => {
    const limits = tags.split(',').flatMap((tag) => tag.trim() || []);
    const made = await client.keys.create({
      name,
      scopes: allScopes.filter((scope) => scopes.has(scope)),
      ...(limits.length > 0 && { tags: limits }),
      ...(days && { expires_at: new Date(now() + Number(days) * dayMs).toISOString() }),
    });
    created({ name: made.name, key: made.key });
  };
  return (
    <Dialog title="New API key" onClose={close}>
      <Form submit="Create" cancel={close} run={create} disabled={!name || scopes.size === 0}>
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
        <div class="fields">
          <TextField
            label="Only machines tagged"
            value={tags}
            change={setTags}
            placeholder="web, db"
            hint="Any of these tags; empty: every machine"
          />
          <SelectField
            label="Expires"
            value={days}
            change={setDays}
            options={[
              ['', 'never'],
              ['1', 'in a day'],
              ['30', 'in 30 days'],
              ['365', 'in a year'],
            ]}
          />
        </div>
      </Form>
    </Dialog>
  );
}

function Secret({ name, secret, close }: { name: string; secret: string; close: () => void }) {
  return (
    <Dialog title={`The key ${name}`} onClose={close}>
      <p class="muted">Copy it now: it is not stored, and no other page has it.</p>
      <div class="secret">
        <pre>{secret}</pre>
        <CopyButton text={secret} />
      </div>
      <footer>
        <button type="button" class="primary" onClick={close}>
          Done
        </button>
      </footer>
    </Dialog>
  );
}
