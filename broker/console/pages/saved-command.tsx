// The page of a saved command, with buttons to run, schedule, change and delete it. With the id `new` or the tab
// `edit`, the page displays the form for a saved command instead.
import { client } from '../api-client.ts';
import { argvText } from '../commands/argv-text.ts';
import { SavedCommandForm } from '../commands/saved-command-form.tsx';
import {
  allowedText,
  mayChangeSaved,
  type Parameter,
  type SavedCommand,
} from '../commands/saved-command-model.ts';
import { durationText } from '../format-times-and-sizes.ts';
import { may } from '../login-state.ts';
import { DeleteButton } from '../parts/action-buttons.tsx';
import { ButtonLink } from '../parts/button.tsx';
import * as icons from '../parts/icons.ts';
import { Show } from '../parts/loading-failed-or-empty.tsx';
import { WithScopes } from '../parts/missing-scope.tsx';
import { Page } from '../parts/page.tsx';
import { Ago } from '../parts/small-components.tsx';
import { type Column, List, twoLines } from '../parts/table-and-paged-list.tsx';
import { say } from '../parts/toasts.tsx';
import { useData } from '../parts/use-data.ts';
import { go, type Params, to } from '../router.ts';
import { mayWrite } from '../schedules/schedule-list.tsx';

const above = { text: 'Saved commands', href: to('/saved-commands') };

export function SavedCommandPage({ params: { saved = '', tab = '' } }: { params: Params }) {
  if (saved === 'new') {
    return (
      <Page title="Save a command" above={[above]}>
        <WithScopes scopes={['commands:execute']}>
          <SavedCommandForm />
        </WithScopes>
      </Page>
    );
  }
  return <Existing key={tab} id={saved} isEdited={tab === 'edit'} />;
}

function Existing({ id, isEdited }: { id: string; isEdited: boolean }) {
  const loaded = useData(
    (signal) => client.savedCommands.get({ saved_command_id: id }, { signal }),
    [id],
    null,
  );
  const { data } = loaded;
  const name = data?.name ?? 'Saved command';
  if (isEdited) {
    return (
      <Page title={`Change ${name}`} above={[above, { text: name, href: to('/saved-commands', id) }]}>
        <WithScopes scopes={['commands:execute']}>
          <Show of={loaded}>{(saved) => <SavedCommandForm saved={saved} />}</Show>
        </WithScopes>
      </Page>
    );
  }
  return (
    <Page title={name} above={[above]} actions={data && <Actions saved={data} />}>
      <Show of={loaded}>{(saved) => <Detail saved={saved} />}</Show>
    </Page>
  );
}

function Actions({ saved: { id, name } }: { saved: SavedCommand }) {
  return (
    <>
      {mayWrite() && (
        <ButtonLink icon={icons.schedules} text="Schedule" href={`${to('/schedules', 'new')}?saved=${id}`} />
      )}
      {may('commands:execute') && (
        <ButtonLink icon={icons.play} text="Run" class="primary" href={`${to('/run')}?saved=${id}`} />
      )}
      {mayChangeSaved() && (
        <>
          <ButtonLink icon={icons.edit} text="Edit" href={to('/saved-commands', id, 'edit')} />
          <DeleteButton
            title={`Delete ${name}?`}
            action="Delete the saved command"
            run={async () => {
              await client.savedCommands.remove({ saved_command_id: id });
              say(`${name} is deleted`);
              go(to('/saved-commands'));
            }}
          >
            <p>
              It cannot be deleted while a schedule uses it. The commands that it ran stay in the history.
            </p>
          </DeleteButton>
        </>
      )}
    </>
  );
}

function Detail({ saved }: { saved: SavedCommand }) {
  const { argv, description, user, cwd, timeout, updated_at, parameters } = saved;
  return (
    <>
      <section class="card command-card">
        <pre class="command-line">{argvText(argv)}</pre>
        {description && <p class="fact-row">{description}</p>}
        <p class="fact-row muted">
          {user && <span>as {user}</span>}
          {cwd && <span>in {cwd}</span>}
          {timeout !== null && <span>for at most {durationText(timeout)}</span>}
          <span>
            changed <Ago at={updated_at} />
          </span>
        </p>
      </section>
      {parameters.length > 0 && <List label="Parameters" columns={columns} items={parameters} />}
    </>
  );
}

const columns: Column<Parameter>[] = [
  ['Parameter', ({ name }) => <code>{name}</code>],
  twoLines(
    'Value',
    (parameter) => <span>{allowedText(parameter)}</span>,
    ({ description }) => description,
  ),
  [
    'Default',
    ({ default: byDefault, required }) => {
      if (byDefault === null) return required ? 'none' : 'left out';
      return <code>{String(byDefault)}</code>;
    },
    'muted',
  ],
];
