// Limits of the link in a minute: log lines, hellos of one machine, and events about two agents with one identity.

import { LogLimiter } from '../../shared/log-limiter.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Events } from '../events.ts';
import type { History } from '../history.ts';
import type { Machine } from '../state/index.ts';

/** Lines about one address that has authenticated nothing, and about one machine. */
const addressLines = 10;
const machineLines = 30;
/** An honest agent that loses its link at once waits longer and longer. */
const machineHellos = 60;
const minute = 60_000;
/** Where there are no more kinds than machines have joined. */
const unlimited = Number.POSITIVE_INFINITY;

/** A link that took over from one of another agent process. */
interface Takeover {
  machine: Machine;
  fenced_link: string;
  link_id: string;
}

export class LinkLimits {
  readonly #rooms: { history: History; events: Events; log: Logger };
  readonly #addresses: LogLimiter<string>;
  readonly #machines: LogLimiter<string>;
  readonly #hellos: LogLimiter<string>;
  readonly #takeovers: LogLimiter<Takeover>;

  constructor(rooms: { history: History; events: Events; log: Logger }) {
    const { log } = rooms;
    const warn = (key: string, text: string) => (value: string, more: number) =>
      log.warn({ [key]: value, more }, text);
    const unauthenticated = warn('address', 'more came to the agents’ port and proved nothing');
    const lines = warn('machine_id', 'more lines were left out about this machine');
    const hellos = warn('machine_id', 'a machine linked more often than it may');
    this.#rooms = rooms;
    this.#addresses = new LogLimiter(addressLines, minute, unauthenticated);
    this.#machines = new LogLimiter(machineLines, minute, lines, unlimited);
    this.#hellos = new LogLimiter(machineHellos, minute, hellos, unlimited);
    this.#takeovers = new LogLimiter(1, minute, (first, more) => this.#record(first, more), unlimited);
  }

  /** Logs about a peer that has authenticated nothing. */
  unauthenticated(address: string, about: object, text: string): void {
    if (this.#addresses.take(address, address)) this.#rooms.log.warn({ ...about, address }, text);
  }

  /** Logs about an authenticated machine. */
  machine(level: 'info' | 'warn', machine_id: string, about: object, text: string): void {
    if (this.#machines.take(machine_id, machine_id)) this.#rooms.log[level]({ machine_id, ...about }, text);
  }

  /** Whether an authenticated machine may link once more. */
  admits(machineId: string): boolean {
    return this.#hellos.take(machineId, machineId);
  }

  /** Records an event, and for more of them in a minute one with their number. */
  takeover(one: Takeover): void {
    if (this.#takeovers.take(one.machine.id, one)) this.#record(one);
  }

  /** Reports at once what was held back. */
  close(): void {
    for (const limiter of [this.#addresses, this.#machines, this.#hellos, this.#takeovers]) limiter.close();
  }

  #record({ machine, ...links }: Takeover, more?: number): void {
    const { history, events, log } = this.#rooms;
    const data = { ...links, ...(more && { more }) };
    history
      .write((transaction) => events.emit(transaction, 'machine.fenced', machine, data))
      .catch((error: unknown) => log.error({ err: error, machine_id: machine.id }, 'event not recorded'));
  }
}
