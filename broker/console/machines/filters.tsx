// The bar above the list of machines: search, filters, order, and the choice between table and cards.
import { useState } from 'preact/hooks';
import { client } from '../api-client.ts';
import { Button } from '../parts/button.tsx';
import { CheckFields } from '../parts/form.tsx';
import * as icons from '../parts/icons.ts';
import { SearchField } from '../parts/search-field-in-url.tsx';
import { Choice, Dialog, Select } from '../parts/small-components.tsx';
import { sayError } from '../parts/toasts.tsx';
import { choiceIn, place, setQuery } from '../router.ts';
import { chooseColumns, columns, isChosen, visibleColumns } from './columns.tsx';
import { firstSort, isSortable } from './filters-in-url.ts';

const statuses = [
  ['', 'Any status'],
  ['online', 'Online'],
  ['offline', 'Offline'],
] as const;
const views = [
  ['', 'Table'],
  ['cards', 'Cards'],
] as const;
/** Returns whether the URL chooses the table or the cards, and a function that changes this choice. */
export const viewChoice = () => choiceIn('view', views);

export function Filters() {
  const { query } = place.value;
  const view = viewChoice();
  return (
    <div class="filters">
      <SearchField label="Search by name" name="q" />
      <Select label="Status" {...choiceIn('status', statuses)} />
      <TagFilter value={query.get('tags') ?? ''} />
      <span class="view-choice">
        {view.value === 'cards' ? (
          <Select label="Order" {...choiceIn('sort', [['', 'By name'], ...orders])} />
        ) : (
          <ColumnChoice />
        )}
        <Choice label="View" {...view} />
      </span>
    </div>
  );
}

const orders = columns
  .filter(({ name }) => isSortable(name))
  .map(({ name, text }) => [firstSort(name), `By ${name === 'cpu' ? text : text.toLowerCase()}`] as const);

/** A field for tags. It proposes the tags in use, which are loaded when the field is first used. */
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

function ColumnChoice() {
  const [open, setOpen] = useState(false);
  const close = (): void => setOpen(false);
  const names = visibleColumns.value.map(({ name }) => name);
  return (
    <>
      <Button icon={icons.columns} text="Columns" press={() => setOpen(true)} />
      {open && (
        <Dialog title="Columns" onClose={close}>
          <div class="fields">
            <CheckFields
              options={columns.map(({ name, text }) => [name, text])}
              value={names}
              change={chooseColumns}
            />
          </div>
          <p class="hint">This browser stores the choice.</p>
          <footer>
            <Button
              text="Choose by window width"
              disabled={!isChosen.value}
              press={() => chooseColumns(undefined)}
            />
            <Button text="Done" class="primary" press={close} />
          </footer>
        </Dialog>
      )}
    </>
  );
}
