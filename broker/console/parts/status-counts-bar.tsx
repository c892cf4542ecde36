// A bar with the number of machines per status, for batches and upgrades.

/** The statuses in the order of the bar, each with the CSS class of its color. Waiting statuses have no class. */
const colors: readonly (readonly [status: string, color: string])[] = [
  ['completed', 'good'],
  ['upgraded', 'good'],
  ['failed', 'bad'],
  ['timeout', 'bad'],
  ['lost', 'bad'],
  ['skipped', 'warn'],
  ['expired', 'warn'],
  ['cancelled', 'warn'],
  ['running', 'busy'],
  ['switching', 'busy'],
  ['staging', 'busy'],
  ['busy', 'busy'],
  ['offline', ''],
  ['queued', ''],
  ['waiting', ''],
];

interface StatusCountsProps {
  counts: Readonly<Record<string, number>>;
  /** The number of machines that have succeeded. */
  done: number;
  total: number;
}

export function StatusCounts({ counts, done, total }: StatusCountsProps) {
  const some = colors.flatMap(([status, color]) => {
    const count = counts[status] ?? 0;
    return count > 0 ? [{ status, color, count }] : [];
  });
  const words = some.map(({ status, count }) => `${count} ${status}`).join(', ');
  return (
    <span class="counts" title={words}>
      <span class="counts-track" aria-hidden="true">
        {some.map(({ status, color, count }) => (
          <span key={status} class={color} style={{ flexGrow: count }} />
        ))}
      </span>
      <span class="number">
        {done} of {total}
      </span>
      <span class="only-read">{words}</span>
    </span>
  );
}
