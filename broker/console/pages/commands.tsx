// The page of all commands, newest first, with filters by status and machine.
import { CommandList, statusChoice } from '../commands/command-list.tsx';
import { may } from '../login-state.ts';
import { MachineFilter } from '../machines/machine-picker.tsx';
import { RunButton } from '../parts/action-buttons.tsx';
import { Page } from '../parts/page.tsx';
import { Select } from '../parts/small-components.tsx';
import { place } from '../router.ts';

export function Commands() {
  const choice = statusChoice();
  return (
    <Page title="Commands" actions={<RunButton />}>
      <div class="filters">
        <Select label="Status" {...choice} />
        {may('machines:read') && <MachineFilter />}
      </div>
      <CommandList status={choice.value} machine={place.value.query.get('machine') ?? ''} withMachine />
    </Page>
  );
}
