// The door's lines in the broker's log. Whoever fills it knocks at will: so many lines of each, and then a number.
import { Allowance } from '../../shared/allowance.ts';
import type { Logger } from '../../shared/logger.ts';

/** Lines within a minute about whoever comes from one address and has proven nothing, and about one machine. */
const mostOfStrangers = 10;
const mostOfMachine = 30;
const minute = 60_000;

export interface Notices {
  /** About somebody who has proven nothing. */
  stranger(address: string, about: object, text: string): void;
  /** About a machine that has proven itself. */
  machine(level: 'info' | 'warn', machine_id: string, about: object, text: string): void;
  /** Tells what is still to be told. */
  close(): void;
}

export function openNotices(log: Logger): Notices {
  const strangers = new Allowance<string>(mostOfStrangers, minute, (address, more) =>
    log.warn({ address, more }, 'more came to the agents’ door and proved nothing'),
  );
  const machines = new Allowance<string>(
    mostOfMachine,
    minute,
    (machine_id, more) => log.warn({ machine_id, more }, 'more lines were left out about this machine'),
    // No more kinds than machines have joined.
    Number.POSITIVE_INFINITY,
  );
  return {
    stranger(address, about, text) {
      if (strangers.take(address, address)) log.warn({ ...about, address }, text);
    },
    machine(level, machine_id, about, text) {
      if (machines.take(machine_id, machine_id)) log[level]({ machine_id, ...about }, text);
    },
    close() {
      strangers.close();
      machines.close();
    },
  };
}
