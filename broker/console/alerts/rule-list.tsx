// The alert rules: a list with their conditions, and the dialogs that create, change and delete one.
import { useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { may } from '../login-session.ts';
import { limitsText } from '../machines/limits-fields.tsx';
import { NewButton } from '../parts/action-buttons.tsx';
import { Button, IconButton } from '../parts/button.tsx';
import * as icons from '../parts/icons.ts';
import { Empty } from '../parts/loading-failed-or-empty.tsx';
import { actions, type Column, List, LongList } from '../parts/paged-list.tsx';
import { Confirm, OnOff } from '../parts/small-components.tsx';
import { attempt } from '../parts/toasts.tsx';
import { RuleForm } from './rule-form.tsx';
import { isExpiring, type Rule, ruleText } from './rule-texts.ts';

/** The open dialog: `new` for the form of a new rule, otherwise the rule that is edited or removed. */
type Open = 'new' | { what: 'edit' | 'remove'; rule: Rule };

export function RuleList() {
  const [open, setOpen] = useState<Open | undefined>(undefined);
  const [round, setRound] = useState(0);
  const close = (): void => setOpen(undefined);
  const changed = (): void => setRound((before) => before + 1);
  const columns: Column<Rule>[] = [
    [
      'Rule',
      (rule) => (
        <>
          <span>{rule.name}</span>
          <span class="muted small">{ruleText(rule)}</span>
        </>
      ),
      'wide two-lines',
    ],
    ['Machines', (rule) => !isExpiring(rule.kind) && limitsText(rule), 'muted'],
    ['State', ({ enabled }) => <OnOff enabled={enabled} />],
    [
      actions,
      (rule) =>
        may('webhooks:write') && (
          <RuleButtons rule={rule} changed={changed} open={(what) => setOpen({ what, rule })} />
        ),
      'row-buttons',
    ],
  ];
  const newButton = (
    <NewButton text="New rule" allowed={may('webhooks:write')} opens={() => setOpen('new')} />
  );
  return (
    <>
      <LongList
        read={(paging, signal) => client.alertRules.list({ sort: 'name', ...paging }, { signal })}
        version={round}
        empty={
          <Empty icon={icons.alerts} title="Nothing is watched yet">
            <p>
              A rule opens an alert when a machine is offline, a disk is nearly full, or a schedule fails.
            </p>
            {newButton}
          </Empty>
        }
      >
        {(items) => (
          <>
            <div class="filters">{newButton}</div>
            <List label="Rules" columns={columns} items={items} />
          </>
        )}
      </LongList>
      {open && <RuleDialog open={open} close={close} changed={changed} />}
    </>
  );
}

interface RuleButtonsProps {
  rule: Rule;
  changed: () => void;
  open: (what: 'edit' | 'remove') => void;
}

function RuleButtons({ rule: { id, name, enabled }, changed, open }: RuleButtonsProps) {
  const turn = (): Promise<unknown> => client.alertRules.update({ rule_id: id, enabled: !enabled });
  return (
    <>
      <Button
        text={enabled ? 'Turn off' : 'Turn on'}
        class="quiet"
        aria-label={`Turn ${enabled ? 'off' : 'on'} ${name}`}
        press={() => void attempt(turn).then(changed)}
      />
      <IconButton
        icon={icons.edit}
        label={`Change ${name}`}
        title="Change and test"
        press={() => open('edit')}
      />
      <IconButton icon={icons.trash} label={`Delete ${name}`} title="Delete" press={() => open('remove')} />
    </>
  );
}

function RuleDialog({ open, close, changed }: { open: Open; close: () => void; changed: () => void }) {
  if (open !== 'new' && open.what === 'remove') {
    return (
      <Confirm
        title={`Delete ${open.rule.name}?`}
        action="Delete the rule"
        onClose={close}
        run={async () => {
          await client.alertRules.remove({ rule_id: open.rule.id });
          changed();
        }}
      >
        <p>Its open alerts are resolved. Past alerts stay in the list.</p>
      </Confirm>
    );
  }
  return <RuleForm rule={open === 'new' ? undefined : open.rule} close={close} saved={changed} />;
}
