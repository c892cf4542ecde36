// A bar with the number of machines per status, for batches and upgrades.
import { toneOf } from './small-components.tsx';

/** The order of the bar: machines whose work is over, then those that are busy, then those that wait. */
const order = ['good', 'bad', 'warn', 'busy', 'idle'];

interface StatusCountsProps {
  counts: Readonly<Record<string, number>>;
  /** The number of machines that have succeeded. */
  done: number;
  total: number;
}

export function StatusCounts({ counts, done, total }: StatusCountsProps) {
  const some = Object.entries(counts)
    .filter(([, count]) => count > 0)
    .map(([status, count]) => ({ status, count, tone: toneOf(status) }))
    .sort((one, other) => order.indexOf(one.tone) - order.indexOf(other.tone));
  const words = some.map(({ status, count }) => `${count} ${status}`).join(', ');
  return (
    <span class="counts" title={words}>
      <span class="counts-track" aria-hidden="true">
        {some.map(({ status, tone, count }) => (
          <span key={status} class={tone} style={{ flexGrow: count }} />
        ))}
      </span>
      <span class="number">
        {done} of {total}
      </span>
      <span class="only-read">{words}</span>
    </span>
  );
}
