// The age of a machine's values, in words.

import { durationText } from '../format-times-and-sizes.ts';
import { lost } from '../live-updates.ts';
import { Ago } from '../parts/small-components.tsx';
import { clock } from '../timers.ts';
import type { MachineRow } from './live-machine-list.ts';

/** A machine's values count as old if it has sent nothing for this many milliseconds. Agents report every 15 s. */
const staleMs = 30_000;

const silenceOf = ({ heardAt }: MachineRow): number => Math.max(0, clock.value - heardAt);

/** True if the displayed values of a machine may be out of date. */
export const isOld = (machine: MachineRow): boolean =>
  machine.status === 'offline' || lost.value || silenceOf(machine) > staleMs;

export function LastSeen({ machine }: { machine: MachineRow }) {
  if (machine.status === 'offline') return <Ago at={machine.last_seen} />;
  const silence = silenceOf(machine);
  if (lost.value) return <span class="warn-text">{durationText(silence)} old</span>;
  if (silence > staleMs) return <span class="warn-text">silent for {durationText(silence)}</span>;
  return <span class="muted">now</span>;
}
