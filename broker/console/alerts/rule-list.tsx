// The alert rules: a list with their conditions, and the dialogs that create, change and delete one.
import { useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { may } from '../login-state.ts';
import { limitsText } from '../machines/machine-restriction.tsx';
import { ConfirmButton, NewButton } from '../parts/action-buttons.tsx';
import { Button, IconButton } from '../parts/button.tsx';
import * as icons from '../parts/icons.ts';
import { Empty } from '../parts/loading-failed-or-empty.tsx';
import { OnOff } from '../parts/small-components.tsx';
import { actions, type Column, List, LongList, twoLines } from '../parts/table-and-paged-list.tsx';
import { attempt } from '../parts/toasts.tsx';
import { RuleForm } from './rule-form.tsx';
import { isExpiring, type Rule, ruleText } from './rule-texts.ts';

export function RuleList() {
  /** The rule in the open form: `new` for a new one, undefined if no form is open. */
  const [edited, setEdited] = useState<Rule | 'new' | undefined>(undefined);
  const [round, setRound] = useState(0);
  const changed = (): void => setRound((before) => before + 1);
  const columns: Column<Rule>[] = [
    twoLines('Rule', ({ name }) => <span>{name}</span>, ruleText),
    ['Machines', (rule) => !isExpiring(rule.kind) && limitsText(rule), 'muted'],
    ['State', ({ enabled }) => <OnOff enabled={enabled} />],
    [
      actions,
      (rule) =>
        may('webhooks:write') && <RuleButtons rule={rule} changed={changed} edit={() => setEdited(rule)} />,
      'row-buttons',
    ],
  ];
  const newButton = (
    <NewButton text="New rule" allowed={may('webhooks:write')} opens={() => setEdited('new')} />
  );
  return (
    <>
      <LongList
        read={(paging, signal) => client.alertRules.list({ sort: 'name', ...paging }, { signal })}
        version={round}
        button={newButton}
        empty={
          <Empty icon={icons.alerts} title="Nothing is watched yet">
            <p>
              A rule opens an alert when a machine is offline, a disk is nearly full, or a schedule fails.
            </p>
            {newButton}
          </Empty>
        }
      >
        {(items) => <List label="Rules" columns={columns} items={items} />}
      </LongList>
      {edited && (
        <RuleForm
          rule={edited === 'new' ? undefined : edited}
          close={() => setEdited(undefined)}
          saved={changed}
        />
      )}
    </>
  );
}

interface RuleButtonsProps {
  rule: Rule;
  changed: () => void;
  edit: () => void;
}

function RuleButtons({ rule: { id, name, enabled }, changed, edit }: RuleButtonsProps) {
  const turn = (): Promise<unknown> => client.alertRules.update({ rule_id: id, enabled: !enabled });
  return (
    <>
      <Button
        text={enabled ? 'Turn off' : 'Turn on'}
        class="quiet"
        aria-label={`Turn ${enabled ? 'off' : 'on'} ${name}`}
        press={() => void attempt(turn).then(changed)}
      />
      <IconButton icon={icons.edit} label={`Change ${name}`} title="Change and test" press={edit} />
      <ConfirmButton
        button={(ask) => (
          <IconButton icon={icons.trash} label={`Delete ${name}`} title="Delete" press={ask} />
        )}
        title={`Delete ${name}?`}
        action="Delete the rule"
        run={async () => {
          await client.alertRules.remove({ rule_id: id });
          changed();
        }}
      >
        <p>Its open alerts are resolved. Past alerts stay in the list.</p>
      </ConfirmButton>
    </>
  );
}
