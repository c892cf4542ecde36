// Checks the login of a request: it must not have ended, and some requests need a recent confirmation with the key.
// authorize-and-perform.ts checks the rights of the login's key.
import type { Route } from '../../shared/api/route.ts';
import type { KeyId, LoginId } from '../../shared/api/shared-schemas.ts';
import { now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import type { Declared, Key, StateTransaction } from '../state/index.ts';

type Logins = Pick<Declared, 'logins'>;

/** Milliseconds for which a login counts as confirmed, after its API key was sent to create or confirm the login. */
const confirmedMs = 15 * 60_000;

export const loginEnded = new AppError('unauthorized', 'this login has ended: log in again');

/** Throws unauthorized for a login that has ended. Requests with a key have no login. */
export function assertLogin({ logins }: Logins, id: LoginId | undefined): void {
  if (id !== undefined && !logins.has(id)) throw loginEnded;
}

/**
 * Throws confirmation_required if the route needs a confirmation and the login was not confirmed within the
 * last 15 minutes.
 */
export function assertConfirmed({ logins }: Logins, id: LoginId | undefined, route: Route): void {
  if (id === undefined || !route.confirmed) return;
  const confirmed_at = Date.parse(logins.get(id)?.confirmed_at ?? '');
  const age = now() - confirmed_at;
  // A confirmation in the future means that the clock was set back. It does not count.
  if (age >= 0 && age < confirmedMs) return;
  const message = `this request needs the API key again: send the key with POST /logins/${id}/confirm, then repeat the request`;
  throw new AppError('confirmation_required', message, { login_id: id });
}

/**
 * Ends the logins of a key whose secret is being replaced. They end together with the old secret, at the time `until`.
 * If `until` is undefined, they end now. Only the login `asking` continues, because its browser displays the new
 * secret.
 */
export function endLogins(
  transaction: StateTransaction,
  key_id: KeyId,
  until: string | undefined,
  asking: LoginId | undefined,
): void {
  for (const login of transaction.all('logins')) {
    if (login.key_id !== key_id || login.id === asking) continue;
    // A login with `secret_until` belongs to a secret that an earlier rotation has replaced. A key has at most one
    // replaced secret, so this rotation makes that older secret invalid. The login ends together with it, now.
    if (until === undefined || login.secret_until !== undefined) transaction.remove('logins', login.id);
    else transaction.put('logins', { ...login, secret_until: until });
  }
}

/**
 * Returns the time at which the secret with the hash `presented` ends; undefined for the current secret, or if
 * `presented` is undefined. Throws unauthorized if the secret has ended.
 */
export function endOfSecret({ hash, previous }: Key, presented: string | undefined): string | undefined {
  if (presented === undefined || presented === hash) return undefined;
  if (presented !== previous?.hash || Date.parse(previous.until) <= now()) throw replaced;
  return previous.until;
}

const replaced = new AppError('unauthorized', 'the secret of this API key was replaced: use the new one');
