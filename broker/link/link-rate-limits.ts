// Limits per minute for links: log lines, hellos of one machine, and events about two agents with one
// identity.
import { LogLimiter } from '../../shared/log-limiter.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Events } from '../event-log.ts';
import type { History } from '../history/history-database.ts';
import type { Machine } from '../state/index.ts';

/** Maximum number of log lines per minute about one unauthenticated address, and about one machine. */
const addressLines = 10;
const machineLines = 30;
/**
 * Maximum number of hellos of one machine per minute. A correct agent sends fewer, because it waits longer after
 * each lost link.
 */
const machineHellos = 60;
/**
 * Maximum number of machines that a limiter counts. It is infinite: only machines that have joined are counted, so
 * unknown clients cannot fill the memory.
 */
const unlimited = Number.POSITIVE_INFINITY;

/** A new link that replaced a link of another agent process with the same identity. */
interface Takeover {
  machine: Machine;
  fenced_link: string;
  link_id: string;
}

export type LinkLimits = ReturnType<typeof createLinkLimits>;

export function createLinkLimits(services: { history: History; events: Events; log: Logger }) {
  const { history, events, log } = services;
  const warn = (key: string, text: string) => (value: string, more: number) =>
    log.warn({ [key]: value, more }, text);
  const unauthenticated = warn(
    'address',
    'more connections from this address to the gRPC port did not authenticate; only their number is logged',
  );
  const addresses = new LogLimiter(addressLines, unauthenticated);
  const lines = warn('machine_id', 'more log lines about this machine were left out');
  const machines = new LogLimiter(machineLines, lines, unlimited);
  const tooMany = warn('machine_id', 'a machine connected too often; further connections were refused');
  const hellos = new LogLimiter(machineHellos, tooMany, unlimited);
  const takeovers = new LogLimiter<Takeover>(1, (first, more) => record(first, more), unlimited);

  function record({ machine, ...links }: Takeover, more?: number): void {
    const data = { ...links, ...(more && { more }) };
    history
      .write((transaction) => events.emit(transaction, 'machine.fenced', machine, data))
      .catch((error: unknown) =>
        log.error({ err: error, machine_id: machine.id }, 'the event machine.fenced could not be written'),
      );
  }

  return {
    /** Logs a warning about a peer that has not authenticated. */
    unauthenticated(address: string, about: object, text: string): void {
      if (addresses.take(address, address)) log.warn({ ...about, address }, text);
    },
    /** Logs a line about an authenticated machine. */
    machine(level: 'info' | 'warn', machine_id: string, about: object, text: string): void {
      if (machines.take(machine_id, machine_id)) log[level]({ machine_id, ...about }, text);
    },
    /** True if an authenticated machine may connect again in this minute. */
    admits: (machineId: string): boolean => hellos.take(machineId, machineId),
    /**
     * Records the first takeover of a machine in a minute as an event. If more follow, a second event at the end of the
     * minute has their number.
     */
    takeover(one: Takeover): void {
      if (takeovers.take(one.machine.id, one)) record(one);
    },
    /** Reports how many log lines, hellos and takeovers were left out so far. */
    close(): void {
      for (const limiter of [addresses, machines, hellos, takeovers]) limiter.close();
    },
  };
}
