// One-time tickets that log in a person on the broker's own machine, who then needs not type a key.
import type { KeyId } from '../../shared/api/route.ts';
import { now } from '../../shared/clock.ts';
import { newSecret } from '../../shared/ids.ts';
import { isLoopback } from '../../shared/loopback.ts';
import { hashOf } from '../keys/index.ts';

const literal = 'login_ticket_';
const bearer = new RegExp(`^Bearer (${literal}[0-9A-Za-z]+)$`, 'i');
const validMs = 5 * 60_000;
const mostTickets = 16;

export class Tickets {
  /** Tickets that were not used, by their hash, oldest first. */
  readonly #open = new Map<string, { key_id: KeyId; until: number }>();

  /** Makes a ticket for a key, which is valid once and for 5 minutes. */
  make(key_id: KeyId): string {
    for (const oldest of [...this.#open.keys()].slice(0, 1 - mostTickets)) this.#open.delete(oldest);
    const ticket = `${literal}${newSecret()}`;
    this.#open.set(hashOf(ticket), { key_id, until: now() + validMs });
    return ticket;
  }

  /**
   * Uses up the ticket in `Bearer TICKET`, and returns the key that it is for. Only clients on this machine
   * may use tickets.
   */
  redeem(authorization: string, address: string): KeyId | undefined {
    const hashed = hashOf(bearer.exec(authorization)?.[1] ?? '');
    const found = this.#open.get(hashed);
    if (!found || !isLoopback(address)) return undefined;
    this.#open.delete(hashed);
    return found.until > now() ? found.key_id : undefined;
  }
}
