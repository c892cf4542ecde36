// The page that joins a machine: it creates a token, displays the command to run on the machine, and reports
// when the machine has joined.
import { useEffect, useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { quoted } from '../commands/argv-text.ts';
import { listen } from '../live-updates.ts';
import { tagsOf } from '../machines/machine-restriction.tsx';
import { DeleteButton } from '../parts/action-buttons.tsx';
import { Button, ButtonLink } from '../parts/button.tsx';
import { Form, SelectField, TextField } from '../parts/form.tsx';
import { useDraft } from '../parts/form-draft-and-dialog.tsx';
import * as icons from '../parts/icons.ts';
import { Page } from '../parts/page.tsx';
import { OneLine } from '../parts/secret-dialog.tsx';
import { Ago, Card, Notice, State, Tags } from '../parts/small-components.tsx';
import { actions, type Column, List, LongList } from '../parts/table-and-paged-list.tsx';
import { useData } from '../parts/use-data.ts';
import { to } from '../router.ts';
import { hourMs } from '../timers.ts';

type Token = Awaited<ReturnType<typeof client.joinTokens.create>>;

export function Join() {
  const [token, setToken] = useState<Token | undefined>(undefined);
  const [round, setRound] = useState(0);
  const changed = (): void => setRound(round + 1);
  const show = (next: Token | undefined): void => {
    setToken(next);
    changed();
  };
  return (
    <Page title="Join a machine" above={[{ text: 'Machines', href: to('/machines') }]}>
      <div class="narrow stack">
        {token ? <Waiting token={token} again={() => show(undefined)} /> : <NewToken created={show} />}
        <Tokens round={round} changed={changed} />
      </div>
    </Page>
  );
}

function NewToken({ created }: { created: (token: Token) => void }) {
  const { draft, bind } = useDraft({ name: '', tags: '', uses: '1', hours: '1' });
  const create = async (): Promise<void> => {
    const { name, tags, uses, hours } = draft;
    const wanted = tagsOf(tags);
    created(
      await client.joinTokens.create({
        ...(name && { name }),
        ...(wanted.length > 0 && { tags: wanted }),
        uses: Number(uses),
        expires_in: Number(hours) * hourMs,
      }),
    );
  };
  return (
    <section class="card card-body">
      <p class="muted">
        The agent connects to this broker, so the machine needs no open port. The line to paste contains a
        token, so the agent needs no password.
      </p>
      <Form submit="Show the line to paste" run={create}>
        <div class="fields">
          <TextField label="Name" {...bind('name')} placeholder="its host name" autoFocus />
          <TextField label="Tags" {...bind('tags')} placeholder="web, eu" />
          <SelectField
            label="Machines"
            {...bind('uses')}
            options={[
              ['1', 'one machine'],
              ['10', 'up to 10'],
              ['100', 'up to 100'],
              ['1000', 'up to 1,000'],
            ]}
          />
          <SelectField
            label="The token is valid for"
            {...bind('hours')}
            options={[
              ['1', 'an hour'],
              ['24', 'a day'],
              ['168', 'a week'],
              ['720', '30 days'],
            ]}
          />
        </div>
      </Form>
    </section>
  );
}

/** The machines that have joined since a time, newest first. */
function useArrivals(since: string) {
  const { data, reload } = useData(
    (signal) => client.machines.list({ since, sort: '-created_at', limit: 100 }, { signal }),
    [since],
  );
  useEffect(() => listen(({ event }) => event?.type === 'machine.registered' && reload()), []);
  return data?.items ?? [];
}

function Waiting({ token, again }: { token: Token; again: () => void }) {
  const arrived = useArrivals(token.created_at);
  const [latest] = arrived;
  return (
    <Card title={token.install === null ? 'Start the agent' : 'Run this in a shell on the machine'}>
      {token.install === null ? (
        <>
          <Notice icon={icons.info}>{token.install_missing}</Notice>
          <p>
            Save the token below as token.txt on the machine. Then install the agent there, and start it with{' '}
            <code>{startOptions(token)}</code>.
          </p>
          <OneLine text={token.token} />
        </>
      ) : (
        <OneLine text={token.install} />
      )}
      <p class="muted small">
        The token joins {token.uses === 1 ? 'one machine' : `up to ${token.uses.toLocaleString()} machines`},
        expires <Ago at={token.expires_at} />, and is not displayed again.
      </p>
      <div class="arrival" role="status" aria-live="polite">
        {latest ? (
          <>
            <State of="online" text={`${latest.name} has joined`} />
            <ButtonLink text={`Open ${latest.name}`} class="primary" href={to('/machines', latest.id)} />
          </>
        ) : (
          <State of="running" text="Waiting for the machine…" />
        )}
        <Button text="Another token" press={again} />
      </div>
      {arrived.length > 1 && (
        <ul class="names">
          {arrived.map(({ id, name }) => (
            <li key={id}>
              <a href={to('/machines', id)}>{name}</a>
            </li>
          ))}
        </ul>
      )}
    </Card>
  );
}

function startOptions({ name, uses }: Token): string {
  const named = uses === 1 && name !== null ? ` --name ${quoted(name)}` : '';
  return `--join-token-file token.txt${named}`;
}

type OpenToken = Awaited<ReturnType<typeof client.joinTokens.list>>['items'][number];

function Tokens({ round, changed }: { round: number; changed: () => void }) {
  const columns: Column<OpenToken>[] = [
    ['Name', ({ name }) => name ?? <span class="muted">without a name</span>],
    ['Tags', ({ tags }) => <Tags of={tags ?? []} />, 'wide'],
    ['Left', ({ uses, uses_left }) => `${uses_left} of ${uses}`, 'right number'],
    ['Expires', ({ expires_at }) => <Ago at={expires_at} />, 'muted'],
    [
      actions,
      (token) => (
        <DeleteButton
          label={`Delete the token ${token.name ?? token.id}`}
          class="quiet"
          title={`Delete the token ${token.name ?? 'without a name'}?`}
          action="Delete the token"
          run={async () => {
            await client.joinTokens.remove({ join_token_id: token.id });
            changed();
          }}
        >
          <p>No further machine can join with it. Machines that have joined are not affected.</p>
        </DeleteButton>
      ),
    ],
  ];
  return (
    <LongList
      read={(paging, signal) => client.joinTokens.list(paging, { signal })}
      version={round}
      when={({ type }) => type === 'machine.registered'}
      empty={null}
    >
      {(items) => (
        <>
          <h2>Open tokens</h2>
          <List label="Join tokens" columns={columns} items={items} />
        </>
      )}
    </LongList>
  );
}
