// The state of an upgrade of agents.
import type { client } from '../api-client.ts';
import { State } from '../parts/small-components.tsx';

export type Upgrade = Awaited<ReturnType<typeof client.upgrades.get>>;

/** The colour is that of a warning if the upgrade is over, but not every machine has the new version. */
export function UpgradeState({ of: { status, counts, total } }: { of: Upgrade }) {
  const isPartial = status === 'completed' && counts.upgraded < total;
  return <State of={isPartial ? 'skipped' : status} text={status} />;
}
