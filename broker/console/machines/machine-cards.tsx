// The list of machines as cards, in as many columns as fit.
import { useCallback, useLayoutEffect, useRef, useState } from 'preact/hooks';
import { percentUsed } from '../../../shared/percent-used.ts';
import { Bar, Sparkline } from '../parts/bar-and-sparkline.tsx';
import { Fact, State, Tags } from '../parts/small-components.tsx';
import { useResize, VirtualRows } from '../parts/virtual-rows.tsx';
import { to } from '../router.ts';
import { isOld, LastSeen } from './age-of-values.tsx';
import type { MachineRow } from './live-machine-list.ts';
import { type FleetProps, SelectOne } from './machine-table.tsx';

/** Sizes in pixels: the least width of a card, and the height of a row of cards with its gap. */
const [leastWidth, rowHeight] = [270, 186];

export function MachineCards({ fleet, show }: Pick<FleetProps, 'fleet' | 'show'>) {
  const frame = useRef<HTMLDivElement>(null);
  const [beside, setBeside] = useState(1);
  const measure = useCallback(() => {
    const width = frame.current?.clientWidth ?? 0;
    setBeside(Math.max(1, Math.floor(width / leastWidth)));
  }, []);
  useLayoutEffect(measure, []);
  useResize(frame, measure);
  const total = fleet.total.value ?? 0;
  return (
    <div class="machine-cards" ref={frame}>
      <VirtualRows
        label="Machines"
        count={Math.ceil(total / beside)}
        rowHeight={rowHeight}
        row={(row) => (
          <div
            key={row}
            class="card-row"
            role="presentation"
            style={{ gridTemplateColumns: `repeat(${beside}, minmax(0, 1fr))` }}
          >
            {Array.from({ length: Math.min(beside, total - row * beside) }, (_, column) => {
              const index = row * beside + column;
              return <Card key={index} index={index} total={total} machine={fleet.row(index)} />;
            })}
          </div>
        )}
        onRange={(first, last) => show(first * beside, Math.min(total, (last + 1) * beside) - 1)}
      />
    </div>
  );
}

interface CardProps {
  index: number;
  total: number;
  machine: MachineRow | undefined;
}

function Card({ index, total, machine }: CardProps) {
  const position = { role: 'listitem' as const, 'aria-posinset': index + 1, 'aria-setsize': total };
  if (!machine) return <div {...position} class="card machine-card" />;
  const { id, name, status, tags, latest, hour } = machine;
  return (
    <div {...position} class={isOld(machine) ? 'card machine-card old' : 'card machine-card'}>
      <header>
        <SelectOne machine={machine} />
        <a href={to('/machines', id)} class="cut">
          {name}
        </a>
        <State of={status} />
      </header>
      <Sparkline values={hour.cpu} label={`CPU of ${name} in the last hour`} />
      <dl>
        <Fact name="CPU">
          <Bar percent={latest?.cpu.usage} />
        </Fact>
        <Fact name="Memory">
          <Bar percent={latest ? percentUsed(latest.memory) : undefined} />
        </Fact>
        <Fact name="Disk">
          <Bar percent={latest ? percentUsed(latest.disk) : undefined} />
        </Fact>
      </dl>
      <footer>
        <LastSeen machine={machine} />
        <Tags of={tags} />
      </footer>
    </div>
  );
}
