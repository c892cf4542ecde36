// Small graphs of measured values: a bar for a percentage, and a sparkline of the last hour.

/** A bar of at least this percentage has the colour of a warning (`warn`) or of an alarm (`bad`). */
const high = { warn: 75, bad: 90 };

const toneOf = (percent: number): string =>
  percent >= high.bad ? 'bad' : percent >= high.warn ? 'warn' : '';

/** A percentage as a bar with its number. */
export function Bar({ percent, title }: { percent: number | undefined; title?: string | undefined }) {
  if (percent === undefined || Number.isNaN(percent)) return <span class="muted">–</span>;
  return (
    <span class={`bar ${toneOf(percent)}`} title={title}>
      <span class="bar-track" aria-hidden="true">
        <span style={{ width: `${Math.min(100, Math.max(0, percent))}%` }} />
      </span>
      <span class="number">{Math.round(percent)} %</span>
    </span>
  );
}

const [width, height] = [96, 22];

/** Values from 0 to 100 as a line. Missing values are gaps. */
export function Sparkline({ values, label }: { values: readonly (number | null)[]; label: string }) {
  const step = width / Math.max(1, values.length - 1);
  let pen = 'M';
  let line = '';
  for (const [index, value] of values.entries()) {
    if (value === null) pen = 'M';
    else {
      const y = height - 1 - (Math.min(100, Math.max(0, value)) / 100) * (height - 2);
      line += `${pen}${(index * step).toFixed(1)} ${y.toFixed(1)}`;
      pen = 'L';
    }
  }
  return (
    <svg
      class="sparkline"
      width={width}
      height={height}
      viewBox={`0 0 ${width} ${height}`}
      preserveAspectRatio="none"
      role="img"
      aria-label={label}
    >
      {line !== '' && <path d={line} />}
    </svg>
  );
}
