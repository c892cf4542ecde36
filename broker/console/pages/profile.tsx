// The page of the user's profile: the API key and its rights, logins of browsers, theme and shortcuts.
import { useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { logOut, me } from '../login-state.ts';
import { limitsText } from '../machines/machine-restriction.tsx';
import { menu } from '../navigation-menu.ts';
import { Button } from '../parts/button.tsx';
import { Page } from '../parts/page.tsx';
import { Ago, Card, Choice, Fact, Tags } from '../parts/small-components.tsx';
import { actions, type Column, List, LongList } from '../parts/table-and-paged-list.tsx';
import { attempt } from '../parts/toasts.tsx';
import { chooseTheme, theme, themes } from '../theme.ts';

export function Profile() {
  const key = me.value;
  if (!key) return null;
  return (
    <Page title="Profile">
      <div class="narrow stack">
        <Card title="Your key">
          <dl class="facts">
            <Fact name="Name">{key.name}</Fact>
            <Fact name="Scopes">
              <Tags of={key.scopes} />
            </Fact>
            <Fact name="Machines">{limitsText(key)}</Fact>
            <Fact name="Expires">
              <Ago at={key.expires_at} />
            </Fact>
          </dl>
        </Card>
        <section class="card">
          <div class="card-head spread">
            <h2>Theme</h2>
            <Choice label="Theme" options={themes} value={theme.value} choose={chooseTheme} />
          </div>
        </section>
        <Logins />
        <Shortcuts />
      </div>
    </Page>
  );
}

type Login = Awaited<ReturnType<typeof client.logins.list>>['items'][number];

function Logins() {
  const [round, setRound] = useState(0);
  const own = me.value?.login?.id;
  const end = async (id: string): Promise<void> => {
    if (id === own) await logOut();
    else await client.logins.remove({ login_id: id });
    setRound(round + 1);
  };
  const columns: Column<Login>[] = [
    [
      'Browser',
      ({ id, name }) => (
        <span>
          {name ?? 'Browser'} {id === own && <span class="tag">this one</span>}
        </span>
      ),
      'wide two-lines',
    ],
    ['Key', ({ key_name }) => key_name],
    ['Address', ({ address }) => address, 'muted'],
    ['Last used', ({ last_used_at }) => <Ago at={last_used_at} />, 'muted'],
    ['Ends', ({ expires_at }) => <Ago at={expires_at} />, 'muted'],
    [
      actions,
      ({ id }) => (
        <Button
          text={id === own ? 'Log out' : 'End'}
          class="quiet"
          press={() => void attempt(() => end(id))}
        />
      ),
    ],
  ];
  return (
    <>
      <h2>Logins</h2>
      <LongList
        read={(paging, signal) => client.logins.list(paging, { signal })}
        version={round}
        empty={<p class="muted">No browser is logged in.</p>}
      >
        {(items) => <List label="Logins" columns={columns} items={items} />}
      </LongList>
    </>
  );
}

function Shortcuts() {
  const keys: readonly (readonly [keys: string, text: string])[] = [
    ['Ctrl K', 'find a machine, a page or an action'],
    ['/', 'search on this page'],
    ['?', 'this list'],
    ...menu.value.map(({ key, text }) => [`g ${key}`, text] as const),
    ['Ctrl Enter', 'send a form'],
    ['Ctrl Shift K', 'the same as Ctrl K, but works in a terminal too'],
    ['Ctrl Shift F', 'search in a terminal'],
    ['Ctrl Shift C', 'copy from a terminal'],
    ['Ctrl S', 'save a file'],
    ['Space F2 Delete', 'select, rename, delete files'],
  ];
  return (
    <section class="card">
      <h2>Shortcuts</h2>
      <dl class="card-body shortcuts">
        {keys.map(([name, text]) => (
          <div key={name}>
            <dt>
              {name.split(' ').map((part) => (
                <kbd key={part}>{part}</kbd>
              ))}
            </dt>
            <dd>{text}</dd>
          </div>
        ))}
      </dl>
    </section>
  );
}
