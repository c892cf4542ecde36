// A line chart over time (uPlot). The library is loaded with the first page that has a chart.
import { useEffect, useRef } from 'preact/hooks';
import uPlot from 'uplot';
import { isDark } from '../theme.ts';

interface ChartProps {
  label: string;
  /** Time of each value in seconds since 1970. */
  times: readonly number[];
  values: readonly (number | null)[];
  /** CSS custom property of the line's colour, such as `--accent-text`. */
  color: string;
  /** Formats a value for the axis. */
  format: (value: number) => string;
  /** Largest value of the axis; by default it follows from the values. */
  most?: number;
  /** First and last time of the axis, in seconds since 1970. */
  span: readonly [from: number, to: number];
}

const shortTime = new Intl.DateTimeFormat(undefined, { hour: '2-digit', minute: '2-digit', hour12: false });
const timeText = (seconds: number): string => shortTime.format(new Date(seconds * 1000));

const colorOf = (name: string): string =>
  getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const height = 150;

function optionsOf({ values, color, format, most, span }: ChartProps, width: number): uPlot.Options {
  const axis = {
    stroke: colorOf('--muted'),
    grid: { stroke: colorOf('--line'), width: 1 },
    ticks: { show: false },
  };
  const font = '11px system-ui, sans-serif';
  return {
    width,
    height,
    legend: { show: false },
    cursor: { y: false, points: { size: 7 }, sync: { key: 'machine' } },
    scales: {
      x: { range: () => [...span] },
      y: { range: (_, __, max) => [0, most ?? (max > 0 ? max * 1.1 : 1)] },
    },
    axes: [
      { ...axis, font, size: 26, grid: { show: false }, values: (_, splits) => splits.map(timeText) },
      { ...axis, font, size: 58, values: (_, splits) => splits.map(format) },
    ],
    series: [
      {},
      {
        stroke: colorOf(color),
        width: 1.5,
        fill: `color-mix(in srgb, ${colorOf(color)} 9%, transparent)`,
        // A line needs two values. A value with a gap on both sides is drawn as a dot.
        points: { show: false, size: 5, filter: () => lonely(values) },
      },
    ],
  };
}

export function Chart(props: ChartProps) {
  const { label, times, values } = props;
  const holder = useRef<HTMLDivElement>(null);
  const value = useRef<HTMLSpanElement>(null);
  const dark = isDark();
  useEffect(() => {
    const element = holder.current;
    if (!element) return undefined;
    const data: uPlot.AlignedData = [[...times], [...values]];
    const options = optionsOf(props, element.clientWidth);
    const plot = new uPlot(
      { ...options, hooks: { setCursor: [({ cursor }) => show(cursor.idx)] } },
      data,
      element,
    );
    const show = (index: number | null | undefined): void => {
      if (value.current) value.current.textContent = textAt(props, index ?? times.length - 1);
    };
    show(null);
    const sizes = new ResizeObserver(() => plot.setSize({ width: element.clientWidth, height }));
    sizes.observe(element);
    return () => {
      sizes.disconnect();
      plot.destroy();
    };
  }, [times, values, dark]);
  return (
    <figure class="chart card">
      <figcaption>
        <h3>{label}</h3>
        <span class="number muted" ref={value} />
      </figcaption>
      <div
        ref={holder}
        role="img"
        aria-label={`${label} over time; now ${textAt(props, times.length - 1)}`}
      />
    </figure>
  );
}

/** Returns the indexes of the values that have a gap on both sides. */
function lonely(values: ChartProps['values']): number[] {
  const isGap = (index: number): boolean => (values[index] ?? null) === null;
  return [...values.keys()].filter((index) => !isGap(index) && isGap(index - 1) && isGap(index + 1));
}

/** Returns the value at one time as text, such as `14:05  12 %`. */
function textAt({ times, values, format }: ChartProps, index: number): string {
  const [at, value] = [times[index], values[index] ?? null];
  if (at === undefined) return '';
  return `${timeText(at)}  ${value === null ? '' : format(value)}`;
}
