// The list of machines, live: search, filters and order stand in the address.
import { useMemo, useState } from 'preact/hooks';
import { client } from '../client.ts';
import { lost } from '../live.ts';
import { type MachineQuery, type MachineRow, useFleet } from '../machines/fleet.ts';
import { clearSelection, selectAll, selected, toggle } from '../machines/selection.ts';
import { Ago, State, Tags } from '../parts/basics.tsx';
import { Bar, Sparkline, share } from '../parts/gauges.tsx';
import { Icon } from '../parts/icon.tsx';
import * as icons from '../parts/icons.ts';
import { Empty, Failed, Page, Placeholder } from '../parts/page.tsx';
import { SearchField } from '../parts/search-field.tsx';
import { sayError } from '../parts/toasts.tsx';
import { VirtualRows } from '../parts/virtual-rows.tsx';
import { place, setQuery, to } from '../routes.ts';
import { may } from '../session.ts';
import { durationText } from '../time.ts';

const sorts = ['name', 'status', 'cpu', 'memory', 'disk', 'last_seen'] as const;
type SortField = (typeof sorts)[number];
const rowHeight = 44;
/** Milliseconds without a message after which values count as old: agents report every 10 s. */
const staleMs = 30_000;

function queryOf(given: URLSearchParams): MachineQuery {
  const [search, tags, status, sort] = ['q', 'tags', 'status', 'sort'].map((name) => given.get(name) ?? '');
  const field = sorts.find((name) => name === sort?.replace('-', ''));
  return {
    sort: field === undefined ? 'name' : sort?.startsWith('-') ? `-${field}` : field,
    ...(search && { search }),
    ...(tags && { tags }),
    ...((status === 'online' || status === 'offline') && { status }),
  };
}

export function Machines() {
  const given = place.value.query;
  const query = useMemo(() => queryOf(given), [given.toString()]);
  const { fleet, show } = useFleet(query);
  const filtered = ['q', 'tags', 'status'].some((name) => given.get(name));
  const { total } = fleet;
  const body = (): preact.ComponentChildren => {
    if (total === undefined)
      return fleet.error === undefined ? (
        <Placeholder />
      ) : (
        <Failed error={fleet.error} retry={() => fleet.refresh()} />
      );
    if (total === 0) return filtered ? <NoneFound /> : <NoMachines />;
    return (
      <VirtualRows
        class="machines"
        label="Machines"
        count={total}
        rowHeight={rowHeight}
        header={<Head query={query} known={() => fleet.known()} />}
        row={(index) => <Row key={index} index={index} machine={fleet.row(index)} />}
        onRange={show}
      />
    );
  };
  return (
    <Page
      title="Machines"
      full
      beside={total !== undefined && <span class="count">{total.toLocaleString()}</span>}
      actions={
        may('admin') && (
          <a class="button primary" href={to('/join')}>
            <Icon of={icons.join} />
            Join a machine
          </a>
        )
      }
    >
      <Filters />
      {body()}
      <SelectionBar />
    </Page>
  );
}

function Filters() {
  const { query } = place.value;
  const status = query.get('status') ?? '';
  return (
    <div class="filters">
      <SearchField label="Search by name" name="q" />
      <label class="select">
        <span class="only-read">Status</span>
        <select value={status} onChange={({ currentTarget }) => setQuery({ status: currentTarget.value })}>
          <option value="">Any status</option>
          <option value="online">Online</option>
          <option value="offline">Offline</option>
        </select>
      </label>
      <TagFilter value={query.get('tags') ?? ''} />
    </div>
  );
}

/** A field for tags that proposes those in use, which are read when it is first used. */
function TagFilter({ value }: { value: string }) {
  const [tags, setTags] = useState<readonly { name: string; machines: number }[] | undefined>(undefined);
  const read = (): void => {
    if (tags === undefined) client.tags.list({ limit: 100 }).then(({ items }) => setTags(items), sayError);
  };
  return (
    <label class="select">
      <span class="only-read">Tags</span>
      <input
        list="tags"
        placeholder="Any tag"
        value={value}
        autoComplete="off"
        onFocus={read}
        onInput={({ currentTarget }) => setQuery({ tags: currentTarget.value })}
      />
      <datalist id="tags">
        {tags?.map(({ name, machines }) => (
          <option key={name} value={name}>
            {machines === 1 ? '1 machine' : `${machines} machines`}
          </option>
        ))}
      </datalist>
    </label>
  );
}

function Head({ query, known }: { query: MachineQuery; known: () => readonly MachineRow[] }) {
  const columns: readonly (readonly [field: SortField, text: string])[] = [
    ['name', 'Name'],
    ['status', 'Status'],
    ['cpu', 'CPU'],
    ['memory', 'Memory'],
    ['disk', 'Disk'],
    ['last_seen', 'Last seen'],
  ];
  const all = known();
  const every = all.length > 0 && all.every(({ id }) => selected.value.has(id));
  return (
    <div role="row" class="machine-row head" aria-rowindex={1}>
      <span role="columnheader" class="c-select">
        <input
          type="checkbox"
          aria-label="Select all loaded machines"
          checked={every}
          onChange={() => (every ? clearSelection() : selectAll(all))}
        />
      </span>
      {columns.map(([field, text]) => (
        <SortHead
          key={field}
          field={field}
          text={text}
          sort={typeof query.sort === 'string' ? query.sort : 'name'}
        />
      ))}
      <span role="columnheader" class="c-hour">
        Last hour
      </span>
    </div>
  );
}

function SortHead({ field, text, sort }: { field: SortField; text: string; sort: string }) {
  const isSorted = sort.replace('-', '') === field;
  const descending = sort.startsWith('-');
  // The largest value is what one looks for; of names the first.
  const first = ['cpu', 'memory', 'disk', 'last_seen'].includes(field) ? `-${field}` : field;
  const next = !isSorted ? first : descending ? field : `-${field}`;
  return (
    <span
      role="columnheader"
      class={`c-${field}`}
      aria-sort={isSorted ? (descending ? 'descending' : 'ascending') : undefined}
    >
      <button type="button" class="sort" onClick={() => setQuery({ sort: next === 'name' ? '' : next })}>
        {text}
        {isSorted && <Icon of={descending ? icons.down : icons.arrowUp} size={12} />}
      </button>
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
  const { id, name, status, tags, latest, hour } = machine;
  const isSelected = selected.value.has(id);
  const old = status === 'offline' || machine.stale_ms > staleMs || lost.value;
  return (
    <div
      role="row"
      class={`machine-row ${old ? 'old' : ''}`}
      aria-rowindex={index + 2}
      aria-selected={isSelected}
    >
      <span role="cell" class="c-select">
        <input
          type="checkbox"
          aria-label={`Select ${name}`}
          checked={isSelected}
          onChange={() => toggle(machine)}
        />
      </span>
      <span role="cell" class="c-name">
        <a href={to('/machines', id)} class="cut">
          {name}
        </a>
        <Tags of={tags} />
      </span>
      <span role="cell" class="c-status">
        <State of={status} />
      </span>
      <span role="cell" class="c-cpu">
        <Bar percent={latest?.cpu.usage} title={latest ? `${latest.cpu.cores} cores` : undefined} />
      </span>
      <span role="cell" class="c-memory">
        <Bar percent={latest ? share(latest.memory) : undefined} />
      </span>
      <span role="cell" class="c-disk">
        <Bar percent={latest ? share(latest.disk) : undefined} />
      </span>
      <span role="cell" class="c-last_seen">
        <LastSeen machine={machine} />
      </span>
      <span role="cell" class="c-hour">
        <Sparkline values={hour.cpu} label={`CPU of ${name} in the last hour`} />
      </span>
    </div>
  );
}

function LastSeen({ machine: { status, stale_ms, last_seen } }: { machine: MachineRow }) {
  if (status === 'offline') return <Ago at={last_seen} />;
  return <span class="muted">{stale_ms <= staleMs ? 'now' : `silent for ${durationText(stale_ms)}`}</span>;
}

function NoneFound() {
  return (
    <Empty icon={icons.search} title="No machine matches">
      <p>Change the search or the filters, or remove them.</p>
      <button type="button" onClick={() => setQuery({ q: '', tags: '', status: '' })}>
        Remove all filters
      </button>
    </Empty>
  );
}

function NoMachines() {
  return (
    <Empty icon={icons.machines} title="No machine has joined yet">
      <p>
        A machine joins with one line in its shell. The broker needs no access to it: its agent dials out.
      </p>
      {may('admin') ? (
        <a class="button primary" href={to('/join')}>
          <Icon of={icons.join} />
          Join a machine
        </a>
      ) : (
        <p>Joining needs a key with the scope admin.</p>
      )}
    </Empty>
  );
}

/** What to do with the selected machines. */
function SelectionBar() {
  const count = selected.value.size;
  if (count === 0) return null;
  return (
    <section class="selection" aria-label="Selected machines">
      <strong>{count} selected</strong>
      {may('commands:execute') && (
        <a class="button primary" href={to('/run')}>
          <Icon of={icons.play} />
          Run a command
        </a>
      )}
      <button type="button" onClick={clearSelection}>
        Clear
      </button>
    </section>
  );
}
