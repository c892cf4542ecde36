// The page of API keys: what each key may do and on which machines. It creates, changes and revokes keys, and
// replaces their secrets.
import { useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { type Key, KeyForm } from '../keys/key-form.tsx';
import { KeyRights } from '../keys/view-key-rights.tsx';
import { me } from '../login-state.ts';
import { limitsText } from '../machines/machine-restriction.tsx';
import { ConfirmButton, DeleteButton, NewButton } from '../parts/action-buttons.tsx';
import { Button, IconButton } from '../parts/button.tsx';
import * as icons from '../parts/icons.ts';
import { Empty } from '../parts/loading-failed-or-empty.tsx';
import { Page } from '../parts/page.tsx';
import { Secret } from '../parts/secret-dialog.tsx';
import { Ago, State, Tags } from '../parts/small-components.tsx';
import { actions, type Column, List, LongList } from '../parts/table-and-paged-list.tsx';
import { say } from '../parts/toasts.tsx';
import { clock } from '../timers.ts';

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

interface KeyListProps {
  items: readonly Key[];
  changed: () => void;
  reveal: (secret: { name: string; key: string }) => void;
}

function KeyList({ items, changed, reveal }: KeyListProps) {
  const [open, setOpen] = useState<{ what: 'reach' | 'edit'; key: Key } | undefined>(undefined);
  const close = (): void => setOpen(undefined);
  const columns: Column<Key>[] = [
    ['Name', (key) => <KeyName apiKey={key} reach={() => setOpen({ what: 'reach', key })} />],
    ['May do', ({ scopes }) => <Tags of={scopes} />, 'wide'],
    ['Machines', limitsText, 'muted'],
    ['Last used', ({ last_used_at }) => <Ago at={last_used_at} />, 'muted'],
    ['Expires', ({ expires_at }) => <Expiry at={expires_at} />, 'muted'],
    [
      actions,
      (key) => (
        <KeyButtons
          apiKey={key}
          edit={() => setOpen({ what: 'edit', key })}
          changed={changed}
          reveal={reveal}
        />
      ),
      'row-buttons',
    ],
  ];
  return (
    <>
      <List label="API keys" columns={columns} items={items} />
      {open?.what === 'reach' && <KeyRights apiKey={open.key} close={close} />}
      {open?.what === 'edit' && <KeyForm apiKey={open.key} close={close} saved={changed} />}
    </>
  );
}

function KeyName({ apiKey: { id, name }, reach }: { apiKey: Key; reach: () => void }) {
  return (
    <>
      <Button text={name} class="link" title="Scopes and machines of this key" press={reach} />{' '}
      {id === me.value?.id && <span class="tag">you</span>}
    </>
  );
}

function Expiry({ at }: { at: string | null }) {
  return at !== null && Date.parse(at) <= clock.value ? <State of="expired" /> : <Ago at={at} />;
}

interface KeyButtonsProps extends Omit<KeyListProps, 'items'> {
  apiKey: Key;
  edit: () => void;
}

function KeyButtons({ apiKey: { id, name }, edit, changed, reveal }: KeyButtonsProps) {
  return (
    <>
      <IconButton icon={icons.edit} label={`Change ${name}`} press={edit} />
      <ConfirmButton
        button={(ask) => (
          <IconButton icon={icons.refresh} label={`Replace the secret of ${name}`} press={ask} />
        )}
        title={`Replace the secret of ${name}?`}
        action="Replace the secret"
        run={async () => {
          reveal(await client.keys.rotate({ key_id: id }));
          changed();
        }}
      >
        <p>
          The old secret is refused from now on, and other logins of the key end. The rights of the key stay
          the same.
        </p>
      </ConfirmButton>
      <DeleteButton
        label={`Revoke ${name}`}
        class="quiet"
        title={`Revoke ${name}?`}
        action="Revoke the key"
        run={() => revoke(id, name).then(changed)}
      >
        <p>
          The key is refused from now on, and its logins end. Schedules, webhooks and alert channels that were
          made with it stop, too.
        </p>
        {id === me.value?.id && <p class="bad-text">This is the key you are logged in with.</p>}
      </DeleteButton>
    </>
  );
}

async function revoke(id: string, name: string): Promise<void> {
  const { schedules, webhooks, alert_channels } = await client.keys.remove({ key_id: id });
  const stopped = schedules.length + webhooks.length + alert_channels.length;
  const what = 'stopped schedules, webhooks and alert channels';
  say(`${name} is revoked${stopped > 0 ? `; ${what}: ${stopped}` : ''}`);
}
