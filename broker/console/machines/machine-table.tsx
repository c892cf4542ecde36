// The list of machines as a table, with the chosen columns.
import { Button } from '../parts/button.tsx';
import { Icon } from '../parts/icon.tsx';
import * as icons from '../parts/icons.ts';
import { Tags } from '../parts/small-components.tsx';
import { attempt } from '../parts/toasts.tsx';
import { VirtualRows } from '../parts/virtual-rows.tsx';
import { setQuery, to } from '../router.ts';
import { isOld } from './age-of-values.tsx';
import { leastWidth, template, visibleColumns } from './columns.tsx';
import { firstSort, isSortable } from './filters-in-url.ts';
import type { Fleet, MachineQuery, MachineRow } from './live-machine-list.ts';
import { learnNames } from './names.tsx';
import { clearSelection, selected, selecting, selectMatching, toggle } from './selected-machines.ts';

const rowHeight = 44;

export interface FleetProps {
  fleet: Fleet;
  query: MachineQuery;
  show: (first: number, last: number) => void;
}

export function MachineTable({ fleet, query, show }: FleetProps) {
  return (
    <VirtualRows
      label="Machines"
      count={fleet.total.value ?? 0}
      rowHeight={rowHeight}
      leastWidth={leastWidth.value}
      header={<Head fleet={fleet} query={query} />}
      row={(index) => <Row key={index} index={index} machine={fleet.row(index)} />}
      onRange={show}
    />
  );
}

function Head({ fleet, query }: Pick<FleetProps, 'fleet' | 'query'>) {
  const sort = typeof query.sort === 'string' ? query.sort : 'name';
  return (
    <div
      role="row"
      class="machine-row head"
      aria-rowindex={1}
      style={{ gridTemplateColumns: template.value }}
    >
      <span role="columnheader" class="c-select">
        <SelectAll fleet={fleet} query={query} />
      </span>
      <SortHead field="name" text="Name" sort={sort} />
      {visibleColumns.value.map((column) =>
        isSortable(column.name) ? (
          <SortHead key={column.name} field={column.name} text={column.text} sort={sort} />
        ) : (
          <span key={column.name} role="columnheader" class="cut">
            {column.text}
          </span>
        ),
      )}
    </div>
  );
}

/** A checkbox that selects every machine that matches the filters, including those that are not loaded. */
export function SelectAll({ fleet, query }: Pick<FleetProps, 'fleet' | 'query'>) {
  const total = fleet.total.value ?? 0;
  const some = selected.value.size > 0;
  const all = selected.value.size >= total && fleet.every(({ id }) => selected.value.has(id));
  const label = `Select all ${total.toLocaleString()} machines of this list`;
  return (
    <input
      type="checkbox"
      aria-label={label}
      title={label}
      checked={some && all}
      indeterminate={some && !all}
      disabled={selecting.value !== undefined}
      onChange={() => (some && all ? clearSelection() : void attempt(() => selectMatching(query)))}
    />
  );
}

function SortHead({ field, text, sort }: { field: string; text: string; sort: string }) {
  const isSorted = sort.replace('-', '') === field;
  const descending = sort.startsWith('-');
  const next = !isSorted ? firstSort(field) : descending ? field : `-${field}`;
  return (
    <span role="columnheader" aria-sort={isSorted ? (descending ? 'descending' : 'ascending') : undefined}>
      <Button class="sort" press={() => setQuery({ sort: next === 'name' ? '' : next })}>
        {text}
        {isSorted && <Icon of={descending ? icons.down : icons.arrowUp} size={12} />}
      </Button>
    </span>
  );
}

function Row({ machine, index }: { machine: MachineRow | undefined; index: number }) {
  if (!machine) {
    return (
      <div role="row" class="machine-row blank" aria-rowindex={index + 2}>
        <span role="cell" class="only-read">
          Loading
        </span>
      </div>
    );
  }
  const { id, name, tags } = machine;
  const isSelected = selected.value.has(id);
  return (
    <div
      role="row"
      class={isOld(machine) ? 'machine-row old' : 'machine-row'}
      aria-rowindex={index + 2}
      aria-selected={isSelected}
      style={{ gridTemplateColumns: template.value }}
    >
      <span role="cell" class="c-select">
        <SelectOne machine={machine} />
      </span>
      <span role="cell" class="c-name">
        <a href={to('/machines', id)} class="cut">
          {name}
        </a>
        <Tags of={tags} />
      </span>
      {visibleColumns.value.map((column) => (
        <span key={column.name} role="cell" class="cut">
          {column.cell(machine)}
        </span>
      ))}
    </div>
  );
}

export function SelectOne({ machine }: { machine: MachineRow }) {
  return (
    <input
      type="checkbox"
      aria-label={`Select ${machine.name}`}
      checked={selected.value.has(machine.id)}
      onChange={() => {
        learnNames([machine]);
        toggle(machine.id);
      }}
    />
  );
}
