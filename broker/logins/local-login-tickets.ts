// One-time tickets, with which a person on the broker's own machine logs in without typing a key.
import type { KeyId } from '../../shared/api/shared-schemas.ts';
import { now } from '../../shared/clock.ts';
import { newSecret } from '../../shared/ids-and-secrets.ts';
import { isLoopback } from '../../shared/loopback.ts';
import { hashOf } from '../keys/index.ts';

const literal = 'login_ticket_';
const bearer = new RegExp(`^Bearer (${literal}[0-9A-Za-z]+)$`, 'i');
/** True for the header Authorization of a request with a ticket, valid or not. */
export const isTicket = (authorization: string): boolean => bearer.test(authorization);

const validMs = 5 * 60_000;
const mostTickets = 16;

export class Tickets {
  /** Unused tickets by their hash, oldest first. */
  readonly #open = new Map<string, { key_id: KeyId; until: number }>();

  /** Makes a ticket for a key. It is valid once, within 5 minutes. */
  make(key_id: KeyId): string {
    for (const oldest of [...this.#open.keys()].slice(0, 1 - mostTickets)) this.#open.delete(oldest);
    const ticket = `${literal}${newSecret()}`;
    this.#open.set(hashOf(ticket), { key_id, until: now() + validMs });
    return ticket;
  }

  /**
   * Uses up the ticket in `Bearer TICKET`, and returns the key for which it was made. Returns undefined for an invalid
   * ticket, or for a client on another machine.
   */
  redeem(authorization: string, address: string): KeyId | undefined {
    const hashed = hashOf(bearer.exec(authorization)?.[1] ?? '');
    const found = this.#open.get(hashed);
    if (!found || !isLoopback(address)) return undefined;
    this.#open.delete(hashed);
    return found.until > now() ? found.key_id : undefined;
  }
}
