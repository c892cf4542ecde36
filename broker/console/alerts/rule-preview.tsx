// A test of an alert rule before it is saved: the machines for which its condition holds now.
import { percentUsed } from '../../../shared/percent-used.ts';
import { client } from '../api-client.ts';
import { tagsOf } from '../machines/machine-restriction.tsx';
import { useData } from '../parts/use-data.ts';
import type { Draft } from './rule-draft.ts';
import { unitOf } from './rule-texts.ts';

type Status = Awaited<ReturnType<typeof client.machines.statuses>>['items'][number];
type Measured = 'cpu' | 'memory' | 'disk';

/** Maximum number of machines that are read. Those with the highest values are read first. */
const mostRead = 100;
/** Maximum number of machines that are named. */
const mostNamed = 3;

function percentOf({ latest }: Status, kind: Measured): number | undefined {
  if (latest === null) return undefined;
  return kind === 'cpu' ? latest.cpu.usage : percentUsed(latest[kind]);
}

export function RulePreview({ draft }: { draft: Draft }) {
  const { kind, mount } = draft;
  // A rule about another mount point cannot be tested: the list of machines contains only the disk of `/`.
  if (kind === 'disk' && !['', '/'].includes(mount)) return null;
  if (kind === 'offline') return <Preview draft={draft} />;
  return kind === 'cpu' || kind === 'memory' || kind === 'disk' ? (
    <Preview draft={draft} measured={kind} />
  ) : null;
}

function Preview({ draft: { kind, above, limits }, measured }: { draft: Draft; measured?: Measured }) {
  const { data } = useData(
    (signal) =>
      client.machines.statuses(
        { limit: mostRead, ...(measured ? { sort: `-${measured}` } : { status: 'offline' }) },
        { signal },
      ),
    [kind],
  );
  if (!data) return null;
  const tags = tagsOf(limits.tags);
  const isMeant = ({ id, tags: its }: Status): boolean =>
    (tags.length === 0 && limits.machines.length === 0) ||
    limits.machines.includes(id) ||
    tags.some((tag) => its.includes(tag));
  const found = data.items.filter(
    (one) =>
      isMeant(one) && (measured === undefined || (percentOf(one, measured) ?? Number.NaN) > Number(above)),
  );
  const named = found.slice(0, mostNamed).map((one) => {
    const value = measured && percentOf(one, measured);
    return value === undefined ? one.name : `${one.name} (${Math.round(value)}${unitOf(kind)})`;
  });
  const more = found.length - named.length;
  return (
    <p class="notice" role="status">
      <span>
        {found.length === 0
          ? 'Test: the rule would open no alert now.'
          : `Test: the rule would now open alerts for ${named.join(', ')}${more > 0 ? ` and ${more}${data.has_more ? ' or more' : ''} others` : ''}.`}
      </span>
    </p>
  );
}
