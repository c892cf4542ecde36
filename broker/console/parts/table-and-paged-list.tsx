// Lists that are loaded page by page. The first page is live, and a button adds further pages.
import type { ComponentChildren } from 'preact';
import { useEffect, useRef, useState } from 'preact/hooks';
import type { ListResult } from '../../../shared/sdk/index.ts';
import type { Happened } from '../live-updates.ts';
import { Show } from './loading-failed-or-empty.tsx';
import { More } from './small-components.tsx';
import { attempt } from './toasts.tsx';
import { useData } from './use-data.ts';

export type Read<T> = (
  paging: { limit: number; offset: number },
  signal: AbortSignal,
) => Promise<ListResult<T>>;

interface LongListProps<T> {
  read: Read<T>;
  /** The values of the list's filter. When one of them changes, the list begins again with its first page. */
  inputs?: readonly unknown[];
  /** A value that is different after each edit by the user. All loaded pages of the list are then loaded again. */
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

const pageSize = 50;

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
  const [further, setFurther] = useState<readonly T[]>([]);
  const first = useData((signal) => read({ limit: pageSize, offset: 0 }, signal), inputs, when, topic);
  const previous = useRef(first.data);
  // Counts changes of the filter. Further pages that were requested with an earlier filter are not used.
  const filter = useRef(0);
  useEffect(() => {
    filter.current += 1;
    setFurther([]);
  }, inputs);
  useEffect(() => {
    const before = previous.current;
    previous.current = first.data;
    if (before && first.data) setFurther(furtherAfter(before, first.data));
  }, [first.data]);
  const more = async (offset: number): Promise<void> => {
    const requested = filter.current;
    const { items } = await read({ limit: pageSize, offset }, new AbortController().signal);
    if (filter.current === requested) setFurther((before) => [...before, ...items]);
  };
  const reload = async (): Promise<void> => {
    const requested = filter.current;
    first.reload();
    const again: T[] = [];
    for (let offset = pageSize; offset < pageSize + further.length; offset += pageSize) {
      const { items } = await read({ limit: pageSize, offset }, new AbortController().signal);
      again.push(...items);
    }
    if (filter.current === requested) setFurther(again);
  };
  const displayed = useRef(version);
  useEffect(() => {
    if (displayed.current !== version) void attempt(reload);
    displayed.current = version;
  }, [version]);
  return (
    <Show of={first}>
      {({ items, total }) => {
        if (total === 0) return empty;
        const all = withoutRepeats([...items, ...further]);
        return (
          <>
            {button && <div class="filters">{button}</div>}
            {children(all, () => void attempt(reload))}
            <More count={all.length} of={total} more={() => void attempt(() => more(all.length))} />
          </>
        );
      }}
    </Show>
  );
}

/** Removes repeated items. An item can occur in two pages, because they are loaded at different times. */
function withoutRepeats<T extends { id: string }>(items: readonly T[]): T[] {
  const seen = new Set<string>();
  return items.filter(({ id }) => !seen.has(id) && seen.add(id));
}

/**
 * Call this after the first page of a list was loaded again. `before` is the old first page, `now` the new one. Returns
 * a function that updates the items of the further pages. If new items have pushed old items out of the first page, the
 * function puts these old items in front of the further items.
 */
function furtherAfter<T extends { id: string }>(before: ListResult<T>, now: ListResult<T>) {
  const ids = new Set(now.items.map(({ id }) => id));
  // If the old and the new first page have no item in common, items between them may never have been loaded. The
  // further items are then removed, so that the list has no gap.
  const isNewPage = !before.items.some(({ id }) => ids.has(id));
  const start = before.items.length - Math.max(0, now.total - before.total);
  const pushed = before.items.filter(({ id }, index) => index >= start && !ids.has(id));
  return (further: readonly T[]): readonly T[] => {
    if (further.length === 0) return further;
    return isNewPage ? [] : [...pushed, ...further];
  };
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
