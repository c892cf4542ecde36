// The page of all saved commands, each with its program, arguments and parameters.
import { client } from '../api-client.ts';
import { argvText } from '../commands/argv-text.ts';
import { mayChangeSaved, type SavedCommand } from '../commands/saved-command-model.ts';
import { may } from '../login-state.ts';
import { NewButton } from '../parts/action-buttons.tsx';
import { ButtonLink } from '../parts/button.tsx';
import * as icons from '../parts/icons.ts';
import { Empty } from '../parts/loading-failed-or-empty.tsx';
import { Page } from '../parts/page.tsx';
import { Ago } from '../parts/small-components.tsx';
import { actions, type Column, List, LongList, twoLines } from '../parts/table-and-paged-list.tsx';
import { to } from '../router.ts';

const newButton = () => (
  <NewButton text="Save a command" allowed={mayChangeSaved()} opens={to('/saved-commands', 'new')} />
);

export function SavedCommands() {
  return (
    <Page title="Saved commands" actions={newButton()}>
      <LongList
        read={(paging, signal) => client.savedCommands.list({ sort: 'name', ...paging }, { signal })}
        empty={
          <Empty icon={icons.saved} title="No command is saved yet">
            <p>
              A saved command is a program with parameters. You give their values when you run it, and no
              shell interprets them.
            </p>
            {newButton()}
          </Empty>
        }
      >
        {(items) => <List label="Saved commands" columns={columns} items={items} />}
      </LongList>
    </Page>
  );
}

const columns: Column<SavedCommand>[] = [
  ['Name', ({ id, name }) => <a href={to('/saved-commands', id)}>{name}</a>],
  twoLines(
    'Command',
    ({ argv }) => <span class="mono">{argvText(argv)}</span>,
    ({ description }) => description,
  ),
  ['Changed', ({ updated_at }) => <Ago at={updated_at} />, 'muted'],
  [
    actions,
    ({ id, name }) =>
      may('commands:execute') && (
        <ButtonLink
          icon={icons.play}
          class="quiet icon-only"
          href={`${to('/run')}?saved=${id}`}
          aria-label={`Run ${name}`}
          title="Run"
        />
      ),
  ],
];
