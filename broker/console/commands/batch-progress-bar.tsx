// The progress of a batch: one bar with the number of machines per state of their command.
import type { client } from '../api-client.ts';

type Batch = Awaited<ReturnType<typeof client.batches.list>>['items'][number];

const order = [
  'completed',
  'failed',
  'timeout',
  'lost',
  'expired',
  'cancelled',
  'running',
  'queued',
] as const;

export function Counts({ batch: { counts, total } }: { batch: Pick<Batch, 'counts' | 'total'> }) {
  const some = order.filter((name) => counts[name] > 0);
  const words = some.map((name) => `${counts[name]} ${name}`).join(', ');
  return (
    <span class="counts" title={words}>
      <span class="counts-track" aria-hidden="true">
        {some.map((name) => (
          <span key={name} class={name} style={{ flexGrow: counts[name] }} />
        ))}
      </span>
      <span class="number">
        {counts.completed} of {total}
      </span>
      <span class="only-read">{words}</span>
    </span>
  );
}
