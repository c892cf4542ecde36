// Lists whose rows are live. They display the first rows, and a button adds further ones.
import type { ComponentChildren } from 'preact';
import { useState } from 'preact/hooks';
import type { ListResult } from '../../../shared/sdk/index.ts';
import type { Happened } from '../live-updates.ts';
import { Show } from './loading-failed-or-empty.tsx';
import { More } from './small-components.tsx';
import { useData } from './use-data.ts';

export type Read<T> = (
  paging: { limit: number; offset: number },
  signal: AbortSignal,
) => Promise<ListResult<T>>;

interface LongListProps<T> {
  read: Read<T>;
  /** The values of the list's filter. When one of them changes, the list begins again with its first rows. */
  inputs?: readonly unknown[];
  /** A value that is different after each edit by the user. The list is then loaded again. */
  version?: unknown;
  when?: (event: Happened) => boolean;
  /** The topic whose updates reload the list. If it is set, `when` is not used. */
  topic?: 'commands';
  /** The text of an empty list. */
  empty: ComponentChildren;
  /** A button above the list. It is not displayed if the list is empty, so `empty` must contain it too. */
  button?: ComponentChildren;
  children: (items: readonly T[], reload: () => void) => ComponentChildren;
}

/** Number of rows that are displayed at first, and that the button adds. */
const step = 50;
/** Maximum number of items in one request. */
const mostRead = 100;

export function LongList<T extends { id: string }>({
  read,
  inputs = [],
  version,
  when,
  topic,
  empty,
  button,
  children,
}: LongListProps<T>) {
  const filter = JSON.stringify(inputs);
  const [wanted, setWanted] = useState({ filter, rows: step });
  const rows = wanted.filter === filter ? wanted.rows : step;
  const loaded = useData((signal) => firstRows(read, rows, signal), [filter, rows, version], when, topic);
  return (
    <Show of={loaded}>
      {({ items, total }) =>
        total === 0 ? (
          empty
        ) : (
          <>
            {button && <div class="filters">{button}</div>}
            {children(items, loaded.reload)}
            <More count={items.length} of={total} more={() => setWanted({ filter, rows: rows + step })} />
          </>
        )
      }
    </Show>
  );
}

/** Reads the first rows of a list, with as many requests as they need, all at the same time. */
async function firstRows<T extends { id: string }>(
  read: Read<T>,
  rows: number,
  signal: AbortSignal,
): Promise<{ items: readonly T[]; total: number }> {
  const pages = await Promise.all(
    Array.from({ length: Math.ceil(rows / mostRead) }, (_, page) => {
      const offset = page * mostRead;
      return read({ limit: Math.min(mostRead, rows - offset), offset }, signal);
    }),
  );
  // An item may occur in two pages, because the broker reads them one after another. It is displayed once.
  const items = new Map(pages.flatMap((page) => page.items.map((item) => [item.id, item] as const)));
  return { items: [...items.values()], total: pages.at(-1)?.total ?? 0 };
}

/** A column: its title, the content of its cells, the CSS class of title and cells, and the tooltip of the cells. */
export type Column<T> = readonly [
  title: ComponentChildren,
  cell: (item: T, index: number) => ComponentChildren,
  name?: string | undefined,
  tooltip?: (item: T) => string,
];

/** A wide column with two lines: an element, and a small text below it, which is left out if it is empty. */
export const twoLines = <T,>(
  title: string,
  first: (item: T) => ComponentChildren,
  below: (item: T) => ComponentChildren,
): Column<T> => [
  title,
  (item) => (
    <>
      {first(item)}
      <SmallLine text={below(item)} />
    </>
  ),
  'wide two-lines',
];

const SmallLine = ({ text }: { text: ComponentChildren }) =>
  text ? <span class="muted small">{text}</span> : null;

/** The title of a column of buttons. Only screen readers read it; it is not displayed. */
export const actions = <span class="only-read">Actions</span>;

interface ListProps<T> {
  label: string;
  items: readonly T[];
  /** `false` stands for a column that is left out. */
  columns: readonly (Column<T> | false)[];
  /** Returns what identifies an item after a change of the list: by default its id, or its index if it has no id. */
  keyOf?: (item: T, index: number) => string | number;
  isSelected?: (item: T) => boolean;
}

const idOf = (item: object, index: number): string | number => ('id' in item ? String(item.id) : index);

/** A table in a frame. On a narrow screen it scrolls inside the frame. */
export function List<T extends object>({ label, items, columns, keyOf = idOf, isSelected }: ListProps<T>) {
  const visible = columns.filter((column) => column !== false);
  return (
    <section class="list-frame" aria-label={label} tabIndex={0}>
      <table class="list">
        <thead>
          <tr>
            {visible.map(([title, , name], index) => (
              <th key={index} class={name}>
                {title}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {items.map((item, row) => (
            <tr key={keyOf(item, row)} aria-selected={isSelected?.(item)}>
              {visible.map(([, cell, name, tooltip], index) => (
                <td key={index} class={name} title={tooltip?.(item)}>
                  {cell(item, row)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}
