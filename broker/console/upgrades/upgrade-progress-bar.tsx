// The progress of an upgrade: one bar with the number of machines per status.
import type { client } from '../api-client.ts';

export type Upgrade = Awaited<ReturnType<typeof client.upgrades.get>>;

/** The statuses of machines in the order of the bar, each with the class of its colour. */
const colors = [
  ['upgraded', 'completed'],
  ['failed', 'failed'],
  ['skipped', 'expired'],
  ['cancelled', 'cancelled'],
  ['switching', 'running'],
  ['staging', 'running'],
  ['busy', 'running'],
  ['offline', 'queued'],
  ['waiting', 'queued'],
] as const;

export function UpgradeProgress({ upgrade: { counts, total } }: { upgrade: Upgrade }) {
  const some = colors.filter(([status]) => counts[status] > 0);
  const words = some.map(([status]) => `${counts[status]} ${status}`).join(', ');
  return (
    <span class="counts" title={words}>
      <span class="counts-track" aria-hidden="true">
        {some.map(([status, color]) => (
          <span key={status} class={color} style={{ flexGrow: counts[status] }} />
        ))}
      </span>
      <span class="number">
        {counts.upgraded} of {total}
      </span>
      <span class="only-read">{words}</span>
    </span>
  );
}
