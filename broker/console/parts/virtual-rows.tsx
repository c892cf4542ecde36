// A scrolling list that draws only the rows in view, for any number of rows of one height.
import type { ComponentChildren } from 'preact';
import { useCallback, useEffect, useLayoutEffect, useRef, useState } from 'preact/hooks';

interface VirtualRowsProps {
  count: number;
  rowHeight: number;
  label: string;
  header: ComponentChildren;
  row: (index: number) => ComponentChildren;
  /** Called with the first and the last row that are drawn. */
  onRange?: (first: number, last: number) => void;
  class?: string;
}

/** Rows drawn above and below those in view, so that a small scroll shows no blanks. */
const margin = 8;

export function VirtualRows({
  count,
  rowHeight,
  label,
  header,
  row,
  onRange,
  class: name,
}: VirtualRowsProps) {
  const scroller = useRef<HTMLDivElement>(null);
  const [range, setRange] = useState({ first: 0, last: Math.min(count, 40) });
  const measure = useCallback(() => {
    const element = scroller.current;
    if (!element) return;
    const first = Math.max(0, Math.floor(element.scrollTop / rowHeight) - margin);
    const last = Math.ceil((element.scrollTop + element.clientHeight) / rowHeight) + margin;
    setRange((before) => (before.first === first && before.last === last ? before : { first, last }));
  }, [rowHeight]);
  useLayoutEffect(measure, [count, measure]);
  useEffect(() => {
    const element = scroller.current;
    if (!element) return undefined;
    const sizes = new ResizeObserver(measure);
    sizes.observe(element);
    return () => sizes.disconnect();
  }, [measure]);
  const last = Math.min(range.last, count);
  useEffect(() => {
    if (last > range.first) onRange?.(range.first, last - 1);
  }, [range.first, last, onRange]);
  const indexes = Array.from({ length: Math.max(0, last - range.first) }, (_, index) => range.first + index);
  return (
    <div
      class={`rows ${name ?? ''}`}
      role="table"
      aria-label={label}
      aria-rowcount={count + 1}
      style={{ flexBasis: `${(count + 1) * rowHeight}px` }}
    >
      <div role="rowgroup" class="rows-head">
        {header}
      </div>
      <div role="rowgroup" class="rows-body" ref={scroller} onScroll={measure} tabIndex={0}>
        <div class="rows-space" role="presentation" style={{ height: `${count * rowHeight}px` }}>
          <div role="presentation" style={{ transform: `translateY(${range.first * rowHeight}px)` }}>
            {indexes.map(row)}
          </div>
        </div>
      </div>
    </div>
  );
}
