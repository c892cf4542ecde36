// The page of API keys: what each key may do and on which machines. It creates, changes and revokes keys, and
// replaces their secrets.
import { useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { type Key, KeyForm } from '../keys/key-form.tsx';
import { KeyRights } from '../keys/view-key-rights.tsx';
import { me } from '../login-session.ts';
import { limitsText } from '../machines/limits-fields.tsx';
import { NewButton } from '../parts/action-buttons.tsx';
import { Button, IconButton } from '../parts/button.tsx';
import * as icons from '../parts/icons.ts';
import { Empty } from '../parts/loading-failed-or-empty.tsx';
import { Page } from '../parts/page.tsx';
import { actions, type Column, List, LongList } from '../parts/paged-list.tsx';
import { Secret } from '../parts/secret-dialog.tsx';
import { Ago, Confirm, State, Tags } from '../parts/small-components.tsx';
import { say } from '../parts/toasts.tsx';
import { clock } from '../time.ts';

export function Keys() {
  const [round, setRound] = useState(0);
  const [creating, setCreating] = useState(false);
  const [secret, setSecret] = useState<{ name: string; key: string } | undefined>(undefined);
  const changed = (): void => setRound((before) => before + 1);
  const newButton = <NewButton text="New key" opens={() => setCreating(true)} />;
  return (
    <Page title="API keys" actions={newButton}>
      <LongList
        read={(paging, signal) => client.keys.list({ sort: 'name', ...paging }, { signal })}
        version={round}
        empty={
          <Empty icon={icons.key} title="There is no key">
            <p>People and programs log in with a key. Create one for each.</p>
            {newButton}
          </Empty>
        }
      >
        {(items) => <KeyList items={items} changed={changed} reveal={setSecret} />}
      </LongList>
      {creating && (
        <KeyForm
          close={() => setCreating(false)}
          saved={(made) => {
            setSecret(made);
            changed();
          }}
        />
      )}
      {secret && (
        <Secret title={`The key ${secret.name}`} secret={secret.key} close={() => setSecret(undefined)} />
      )}
    </Page>
  );
}

type What = 'reach' | 'edit' | 'rotate' | 'revoke';

interface KeyListProps {
  items: readonly Key[];
  changed: () => void;
  reveal: (secret: { name: string; key: string }) => void;
}

function KeyList({ items, changed, reveal }: KeyListProps) {
  const [open, setOpen] = useState<{ what: What; key: Key } | undefined>(undefined);
  const close = (): void => setOpen(undefined);
  return (
    <>
      <List label="API keys" columns={columnsOf((what, key) => setOpen({ what, key }))} items={items} />
      {open && (
        <KeyDialog what={open.what} apiKey={open.key} close={close} changed={changed} reveal={reveal} />
      )}
    </>
  );
}

const columnsOf = (open: (what: What, key: Key) => void): Column<Key>[] => [
  [
    'Name',
    (key) => (
      <>
        <Button
          text={key.name}
          class="link"
          title="Scopes and machines of this key"
          press={() => open('reach', key)}
        />{' '}
        {key.id === me.value?.id && <span class="tag">you</span>}
      </>
    ),
  ],
  ['May do', ({ scopes }) => <Tags of={scopes} />, 'wide'],
  ['Machines', limitsText, 'muted'],
  ['Last used', ({ last_used_at }) => <Ago at={last_used_at} />, 'muted'],
  ['Expires', ({ expires_at }) => <Expiry at={expires_at} />, 'muted'],
  [
    actions,
    (key) => (
      <>
        <IconButton
          icon={icons.edit}
          label={`Change ${key.name}`}
          title="Change"
          press={() => open('edit', key)}
        />
        <IconButton
          icon={icons.refresh}
          label={`Replace the secret of ${key.name}`}
          title="Replace the secret"
          press={() => open('rotate', key)}
        />
        <IconButton
          icon={icons.trash}
          label={`Revoke ${key.name}`}
          title="Revoke"
          press={() => open('revoke', key)}
        />
      </>
    ),
    'row-buttons',
  ],
];

function Expiry({ at }: { at: string | null }) {
  return at !== null && Date.parse(at) <= clock.value ? <State of="expired" /> : <Ago at={at} />;
}

interface KeyDialogProps extends Omit<KeyListProps, 'items'> {
  what: What;
  apiKey: Key;
  close: () => void;
}

function KeyDialog({ what, apiKey, close, changed, reveal }: KeyDialogProps) {
  if (what === 'reach') return <KeyRights apiKey={apiKey} close={close} />;
  if (what === 'edit') return <KeyForm apiKey={apiKey} close={close} saved={changed} />;
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
        <p>
          The old secret is refused from now on, and other logins of the key end. The rights of the key stay
          the same.
        </p>
      </Confirm>
    );
  }
  return (
    <Confirm
      title={`Revoke ${apiKey.name}?`}
      action="Revoke the key"
      onClose={close}
      run={async () => {
        const { schedules, webhooks, alert_channels } = await client.keys.remove({ key_id: apiKey.id });
        const stopped = schedules.length + webhooks.length + alert_channels.length;
        const what = 'schedules, webhooks and alert channels that stop with it';
        say(`${apiKey.name} is revoked${stopped > 0 ? `; ${what}: ${stopped}` : ''}`);
        changed();
      }}
    >
      <p>
        The key is refused from now on, and its logins end. Schedules, webhooks and alert channels that were
        made with it stop, too.
      </p>
      {apiKey.id === me.value?.id && <p class="bad-text">This is the key you are logged in with.</p>}
    </Confirm>
  );
}
