// The page with the live list of machines. Its URL contains search, filters and order.
import { may } from '../login-state.ts';
import { Filters, viewChoice } from '../machines/filters.tsx';
import { filterNames, queryOf } from '../machines/filters-in-url.ts';
import { useFleet } from '../machines/live-machine-list.ts';
import { MachineCards } from '../machines/machine-cards.tsx';
import { MachineTable, SelectAll } from '../machines/machine-table.tsx';
import { clearSelection, selected, selecting } from '../machines/selected-machines.ts';
import { NewButton, RunButton } from '../parts/action-buttons.tsx';
import { Button, ButtonLink } from '../parts/button.tsx';
import * as icons from '../parts/icons.ts';
import { Empty, Failed, Placeholder } from '../parts/loading-failed-or-empty.tsx';
import { Page } from '../parts/page.tsx';
import { place, setQuery, to } from '../router.ts';

export function Machines() {
  const given = place.value.query;
  const query = queryOf(given);
  const { fleet, show } = useFleet(query);
  const filtered = filterNames.some((name) => given.get(name));
  const isCards = viewChoice().value === 'cards';
  const total = fleet.total.value;
  const error = fleet.error.value;
  const body = (): preact.ComponentChildren => {
    if (total === undefined)
      return error === undefined ? <Placeholder /> : <Failed error={error} retry={() => fleet.refresh()} />;
    if (total === 0) return filtered ? <NoneFound /> : <NoMachines />;
    if (!isCards) return <MachineTable fleet={fleet} query={query} show={show} />;
    return (
      <>
        <p class="check">
          <SelectAll fleet={fleet} query={query} />
          <span aria-hidden="true">Select all</span>
        </p>
        <MachineCards fleet={fleet} show={show} />
      </>
    );
  };
  return (
    <Page
      title="Machines"
      full
      beside={total !== undefined && <span class="count">{total.toLocaleString()}</span>}
      actions={joinButton()}
    >
      <Filters />
      {body()}
      <SelectionBar total={total ?? 0} />
    </Page>
  );
}

const joinButton = () => <NewButton text="Join a machine" allowed={may('admin')} opens={to('/join')} />;

function NoneFound() {
  return (
    <Empty icon={icons.search} title="No machine matches">
      <p>Change the search or the filters, or remove them.</p>
      <Button text="Remove all filters" press={() => setQuery({ q: '', tags: '', status: '' })} />
    </Empty>
  );
}

function NoMachines() {
  return (
    <Empty icon={icons.machines} title="No machine has joined yet">
      <p>
        Run one line in the machine’s shell to join it. Its agent dials out, so the broker needs no access to
        it.
      </p>
      {may('admin') ? joinButton() : <p>Joining needs a key with the scope admin.</p>}
    </Empty>
  );
}

/** Buttons for the selected machines. */
function SelectionBar({ total }: { total: number }) {
  const count = selected.value.size;
  const read = selecting.value;
  if (count === 0 && read === undefined) return null;
  return (
    <section class="selection" aria-label="Selected machines" aria-live="polite">
      <strong>
        {read === undefined
          ? `${count.toLocaleString()} selected`
          : `Selecting ${read.toLocaleString()} of ${total.toLocaleString()}`}
      </strong>
      {read === undefined && <RunButton />}
      {may('machines:write') && read === undefined && (
        <ButtonLink text="Upgrade" href={to('/upgrades', 'new')} />
      )}
      <Button text="Clear" press={clearSelection} />
    </section>
  );
}
