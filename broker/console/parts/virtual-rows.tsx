// A scrolling list that draws only the rows in view. It may have any number of rows, all of the same height.
import type { ComponentChildren, RefObject } from 'preact';
import { useCallback, useEffect, useLayoutEffect, useRef, useState } from 'preact/hooks';

interface VirtualRowsProps {
  count: number;
  rowHeight: number;
  label: string;
  /** The content above the rows of a table. Without it, the rows form a list. */
  header?: ComponentChildren;
  /** Width in pixels below which the rows and the header scroll sideways. */
  leastWidth?: number;
  row: (index: number) => ComponentChildren;
  /** Called with the indexes of the first and the last drawn row. */
  onRange: (first: number, last: number) => void;
}

/** Height of the header in pixels, including its own border and the border of the frame. */
const headHeight = 39;

/** Rows drawn above and below the visible ones, so that a small scroll shows no gaps. */
const margin = 8;

/**
 * Maximum number of rows, in addition to `margin`, that are drawn ahead in the direction of scrolling. The browser
 * scrolls without waiting for the page, so gaps would appear without these rows.
 */
const mostAhead = 32;

const marginFor = (ahead: number): number => margin + Math.min(mostAhead, Math.max(0, ahead));

/** Calls `measure` when the size of the element changes. */
export function useResize(element: RefObject<HTMLElement | null>, measure: () => void): void {
  useEffect(() => {
    if (!element.current) return undefined;
    const sizes = new ResizeObserver(measure);
    sizes.observe(element.current);
    return () => sizes.disconnect();
  }, [measure]);
}

/** The range of rows to draw: the visible ones, and some above and below. */
function useRange({ count, rowHeight, onRange }: Pick<VirtualRowsProps, 'count' | 'rowHeight' | 'onRange'>) {
  const scroller = useRef<HTMLDivElement>(null);
  const [range, setRange] = useState({ first: 0, last: Math.min(count, 40) });
  const before = useRef(0);
  const measure = useCallback(() => {
    const element = scroller.current;
    if (!element) return;
    const { scrollTop, clientHeight } = element;
    // Number of rows that the next two frames will scroll at the present speed; negative if upwards.
    const moved = Math.round((2 * (scrollTop - before.current)) / rowHeight);
    before.current = scrollTop;
    const first = Math.max(0, Math.floor(scrollTop / rowHeight) - marginFor(-moved));
    const last = Math.ceil((scrollTop + clientHeight) / rowHeight) + marginFor(moved);
    setRange((before) => (before.first === first && before.last === last ? before : { first, last }));
  }, [rowHeight]);
  useLayoutEffect(measure, [count, measure]);
  useResize(scroller, measure);
  const last = Math.min(range.last, count);
  useEffect(() => {
    if (last > range.first) onRange(range.first, last - 1);
  }, [range.first, last, onRange]);
  return { scroller, range, measure, last };
}

export function VirtualRows({ count, rowHeight, label, header, leastWidth, row, onRange }: VirtualRowsProps) {
  const { scroller, range, measure, last } = useRange({ count, rowHeight, onRange });
  const isList = header === undefined;
  const indexes = Array.from({ length: Math.max(0, last - range.first) }, (_, index) => range.first + index);
  const width = leastWidth === undefined ? {} : { minWidth: `${leastWidth}px` };
  const named = { 'aria-label': label };
  return (
    <div
      class="rows"
      {...(!isList && { role: 'table', 'aria-rowcount': count + 1, ...named })}
      style={{ flexBasis: `${count * rowHeight + (isList ? 0 : headHeight)}px` }}
    >
      {!isList && (
        <div role="rowgroup" class="rows-head" style={width}>
          {header}
        </div>
      )}
      <div
        class="rows-body"
        {...(isList ? { role: 'list', ...named } : { role: 'rowgroup' })}
        ref={scroller}
        onScroll={measure}
        tabIndex={0}
        style={width}
      >
        <div class="rows-space" role="presentation" style={{ height: `${count * rowHeight}px` }}>
          {indexes.map((index) => (
            // Each row is in an element with `contain: strict` (class row-at), so that the browser paints only the
            // rows that come into view.
            <div
              key={index}
              class="row-at"
              role="presentation"
              style={{ top: `${index * rowHeight}px`, height: `${rowHeight}px` }}
            >
              {row(index)}
            </div>
          ))}
        </div>
      </div>
    </div>
  );
}
