// What all parts of the console bench use: a broker with machines, a tab that is logged in, and figures with limits.

import { rounded } from '../compare-programs-in-turns.ts';
import type { BrokerProcess } from '../fleet/broker-process.ts';
import { Figures } from '../fleet/print-figures.ts';
import type { Tab } from './measured-tab.ts';

export interface ConsoleBench {
  broker: BrokerProcess;
  tab: Tab;
  figures: Limits;
  /** Number of simulated machines. */
  machines: number;
  /** Id and writable directory of a machine with a real agent. */
  real: { id: string; folder: string };
  folder: string;
}

/** Figures, each with a limit that it must not exceed. */
export class Limits extends Figures {
  constructor(out: string | undefined) {
    super(out, ['what', 'measured', 'at most', '']);
  }

  most(what: string, measured: number, limit: number, unit: string): void {
    const text = `${Number.isInteger(measured) ? measured : rounded(measured)} ${unit}`;
    this.row(what, text, `${limit.toLocaleString('en')} ${unit}`, measured > limit ? 'missed' : '');
  }
}
