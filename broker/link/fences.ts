// One identity that two agents use, or one that links again and again: both cost everybody else, so both have a measure.
import { Allowance } from '../../shared/allowance.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Events } from '../events.ts';
import type { History } from '../history.ts';
import type { Machine } from '../state/index.ts';

/** An honest agent that loses its link at once waits longer and longer. */
const mostHellos = 60;
const minute = 60_000;

interface Fenced {
  machine: Machine;
  fenced_link: string;
  link_id: string;
}

export interface Fences {
  /** Whether a machine may link once more; proven ones only are asked for. */
  admit(machineId: string): boolean;
  /** A link took over from one of another agent process: an event, and for more of them in a minute one with their number. */
  fenced(one: Fenced): void;
  close(): void;
}

export function openFences({ history, events }: { history: History; events: Events }, log: Logger): Fences {
  const emit = ({ machine, ...data }: Fenced, more?: number): void => {
    history
      .write((transaction) =>
        events.emit(transaction, 'machine.fenced', machine, { ...data, ...(more && { more }) }),
      )
      .catch((error: unknown) => log.error({ err: error, machine_id: machine.id }, 'event not recorded'));
  };
  // No more kinds than machines have joined.
  const unlimited = Number.POSITIVE_INFINITY;
  const hellos = new Allowance<string>(
    mostHellos,
    minute,
    (machine_id, more) => log.warn({ machine_id, more }, 'a machine linked more often than it may'),
    unlimited,
  );
  const fences = new Allowance<Fenced>(1, minute, emit, unlimited);
  return {
    admit: (machineId) => hellos.take(machineId, machineId),
    fenced(one) {
      if (fences.take(one.machine.id, one)) emit(one);
    },
    close() {
      hellos.close();
      fences.close();
    },
  };
}
