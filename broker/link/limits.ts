// Limits per minute of the link: log lines, hellos of one machine, and takeover events of two agents with one identity.
import { LogLimiter } from '../../shared/log-limiter.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Events } from '../events.ts';
import type { History } from '../history.ts';
import type { Machine } from '../state/index.ts';

/** Log lines about one address that has not authenticated, and about one machine. */
const addressLines = 10;
const machineLines = 30;
/** An honest agent that loses its link at once waits longer and longer. */
const machineHellos = 60;
const minute = 60_000;
/** For limiters whose keys are machines that have joined. */
const unlimited = Number.POSITIVE_INFINITY;

/** A link that took over from one of another agent process. */
interface Takeover {
  machine: Machine;
  fenced_link: string;
  link_id: string;
}

export class LinkLimits {
  readonly #services: { history: History; events: Events; log: Logger };
  readonly #addresses: LogLimiter<string>;
  readonly #machines: LogLimiter<string>;
  readonly #hellos: LogLimiter<string>;
  readonly #takeovers: LogLimiter<Takeover>;

  constructor(services: { history: History; events: Events; log: Logger }) {
    const { log } = services;
    const warn = (key: string, text: string) => (value: string, more: number) =>
      log.warn({ [key]: value, more }, text);
    const unauthenticated = warn('address', 'more connections to the gRPC port did not authenticate');
    const lines = warn('machine_id', 'more log lines about this machine were left out');
    const hellos = warn('machine_id', 'a machine linked more often than it may');
    this.#services = services;
    this.#addresses = new LogLimiter(addressLines, minute, unauthenticated);
    this.#machines = new LogLimiter(machineLines, minute, lines, unlimited);
    this.#hellos = new LogLimiter(machineHellos, minute, hellos, unlimited);
    this.#takeovers = new LogLimiter(1, minute, (first, more) => this.#record(first, more), unlimited);
  }

  /** Logs about a peer that has not authenticated. */
  unauthenticated(address: string, about: object, text: string): void {
    if (this.#addresses.take(address, address)) this.#services.log.warn({ ...about, address }, text);
  }

  /** Logs about an authenticated machine. */
  machine(level: 'info' | 'warn', machine_id: string, about: object, text: string): void {
    if (this.#machines.take(machine_id, machine_id))
      this.#services.log[level]({ machine_id, ...about }, text);
  }

  /** Whether an authenticated machine may link once more. */
  admits(machineId: string): boolean {
    return this.#hellos.take(machineId, machineId);
  }

  /** Records an event, and for more of them in a minute one with their number. */
  takeover(one: Takeover): void {
    if (this.#takeovers.take(one.machine.id, one)) this.#record(one);
  }

  /** Logs at once how many lines were left out. */
  close(): void {
    for (const limiter of [this.#addresses, this.#machines, this.#hellos, this.#takeovers]) limiter.close();
  }

  #record({ machine, ...links }: Takeover, more?: number): void {
    const { history, events, log } = this.#services;
    const data = { ...links, ...(more && { more }) };
    history
      .write((transaction) => events.emit(transaction, 'machine.fenced', machine, data))
      .catch((error: unknown) =>
        log.error({ err: error, machine_id: machine.id }, 'a takeover event could not be written'),
      );
  }
}
