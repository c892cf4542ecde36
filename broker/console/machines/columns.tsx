// The columns of the list of machines: cells, widths, and which columns are chosen.
import { computed, signal } from '@preact/signals';
import type { ComponentChildren } from 'preact';
import { percentUsed } from '../../../shared/percent-used.ts';
import { durationText } from '../format-times-and-sizes.ts';
import { storedText, storeText } from '../local-storage.ts';
import { Bar, Sparkline } from '../parts/bar-and-sparkline.tsx';
import { Ago, State } from '../parts/small-components.tsx';
import { mediaSignal } from '../theme.ts';
import { LastSeen } from './age-of-values.tsx';
import type { MachineRow } from './live-machine-list.ts';

export interface Column {
  name: string;
  text: string;
  /** Least width in pixels, and the column's share of the remaining width. */
  width: readonly [least: number, share: number];
  cell: (machine: MachineRow) => ComponentChildren;
}

export const columns: readonly Column[] = [
  {
    name: 'status',
    text: 'Status',
    width: [76, 0.6],
    cell: ({ status }) => <State of={status} />,
  },
  {
    name: 'cpu',
    text: 'CPU',
    width: [92, 1],
    cell: ({ latest }) => (
      <Bar percent={latest?.cpu.usage} title={latest ? `${latest.cpu.cores} cores` : undefined} />
    ),
  },
  {
    name: 'memory',
    text: 'Memory',
    width: [92, 1],
    cell: ({ latest }) => <Bar percent={latest ? percentUsed(latest.memory) : undefined} />,
  },
  {
    name: 'disk',
    text: 'Disk',
    width: [92, 1],
    cell: ({ latest }) => <Bar percent={latest ? percentUsed(latest.disk) : undefined} />,
  },
  {
    name: 'last_seen',
    text: 'Last seen',
    width: [112, 0.6],
    cell: (machine) => <LastSeen machine={machine} />,
  },
  {
    name: 'hour',
    text: 'Last hour',
    width: [104, 0.4],
    cell: ({ name, hour }) => <Sparkline values={hour.cpu} label={`CPU of ${name} in the last hour`} />,
  },
  {
    name: 'memory_hour',
    text: 'Memory, last hour',
    width: [112, 0.4],
    cell: ({ name, hour }) => <Sparkline values={hour.memory} label={`Memory of ${name} in the last hour`} />,
  },
  {
    name: 'load',
    text: 'Load',
    width: [64, 0.3],
    cell: ({ latest }) => <span class="number muted">{latest?.load_average[0]?.toFixed(2)}</span>,
  },
  {
    name: 'uptime',
    text: 'Up for',
    width: [72, 0.3],
    cell: ({ latest }) => <span class="muted">{latest && durationText(latest.uptime * 1000)}</span>,
  },
  {
    name: 'hostname',
    text: 'Host name',
    width: [110, 1],
    cell: ({ hostname }) => <span class="muted">{hostname}</span>,
  },
  {
    name: 'system',
    text: 'System',
    width: [92, 0.5],
    cell: ({ os, arch }) => <span class="muted">{`${os} ${arch}`}</span>,
  },
  {
    name: 'version',
    text: 'Agent',
    width: [72, 0.3],
    cell: ({ agent_version }) => <span class="muted">{agent_version}</span>,
  },
  {
    name: 'created_at',
    text: 'Joined',
    width: [92, 0.4],
    cell: ({ created_at }) => (
      <span class="muted">
        <Ago at={created_at} />
      </span>
    ),
  },
];

const phone = mediaSignal('(max-width: 800px)');
const medium = mediaSignal('(max-width: 1100px)');

/** The default columns for the width of the window. */
const byWidth = computed(() => {
  if (phone.value) return ['status', 'cpu'];
  const most = ['status', 'cpu', 'memory', 'disk', 'last_seen'];
  return medium.value ? most : [...most, 'hour'];
});

const chosen = signal(storedText('columns')?.split(','));

/** Displays these columns from now on. With undefined, displays the columns that fit the window. */
export function chooseColumns(names: readonly string[] | undefined): void {
  chosen.value = names && [...names];
  storeText('columns', names?.join());
}

export const isChosen = computed(() => chosen.value !== undefined);
export const visibleColumns = computed(() => {
  const names = chosen.value ?? byWidth.value;
  return columns.filter(({ name }) => names.includes(name));
});

const selectWidth = 40;
const gap = 8;
const nameWidth = computed(() => (phone.value ? 92 : 170));

/** The widths of all columns of a row: the checkbox, the name, and the chosen columns. */
export const template = computed(() => {
  const tracks = visibleColumns.value.map(({ width: [least, part] }) =>
    phone.value ? `${least}px` : `minmax(${least}px, ${part}fr)`,
  );
  return [`${selectWidth}px`, `minmax(${nameWidth.value}px, 2.2fr)`, ...tracks].join(' ');
});

/** Width in pixels below which the table scrolls sideways. */
export const leastWidth = computed(() => {
  const widths = visibleColumns.value.map(({ width: [least] }) => least + gap);
  return widths.reduce((sum, width) => sum + width, selectWidth + nameWidth.value + gap + 12);
});
