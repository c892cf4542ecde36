// What a login adds to the rights of its key: it must exist, and some requests need a confirmation by the key.
import type { LoginId, Route } from '../../shared/api/route.ts';
import { now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import type { Declared } from '../state/state.ts';

type Logins = Pick<Declared, 'logins'>;

/** Time after which a confirmation counts no more. */
const confirmedMs = 15 * 60_000;

export const loginEnded = new AppError('unauthorized', 'this login has ended: log in again');

/** Throws unauthorized for a login that has ended. Requests with a key have no login. */
export function assertLogin({ logins }: Logins, id: LoginId | undefined): void {
  if (id !== undefined && !logins.has(id)) throw loginEnded;
}

/** Throws confirmation_required if the route needs one and the login has none of the last 15 minutes. */
export function assertConfirmed({ logins }: Logins, id: LoginId | undefined, route: Route): void {
  if (id === undefined || !route.confirmed) return;
  const confirmed_at = Date.parse(logins.get(id)?.confirmed_at ?? '');
  const age = now() - confirmed_at;
  // A confirmation in the future comes from a clock that was set back.
  if (age >= 0 && age < confirmedMs) return;
  const message = `this needs the API key again: send it with POST /logins/${id}/confirm, then repeat the request`;
  throw new AppError('confirmation_required', message, { login_id: id });
}
