// Logins: each login is a browser's access with the rights of one API key. The cookie contains the secret of the
// login, and the state contains the hash of the secret.
import { timingSafeEqual } from 'node:crypto';
import { logins as routes } from '../../shared/api/logins.ts';
import type { Api, Caller, Handlers, Reply } from '../../shared/api/route-table.ts';
import type { LoginId } from '../../shared/api/shared-schemas.ts';
import { every, iso, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId, newSecret } from '../../shared/ids-and-secrets.ts';
import type { Logger } from '../../shared/logger.ts';
import { found } from '../find-or-not-found.ts';
import { hashOf } from '../keys/index.ts';
import { currentKey, endOf, hasExpired, holds, within } from '../keys/rights.ts';
import { pageOf } from '../list-pages-and-filters.ts';
import type { Declared, Key, Login, State, StateTransaction } from '../state/index.ts';
import { cookieWith, noCookie } from './cookie.ts';
import { Tickets } from './local-login-tickets.ts';
import { endOfSecret } from './login-validity.ts';

/** Milliseconds without a request after which a login ends. */
const idleMs = 12 * 3_600_000;
/** Milliseconds after which a login ends in any case. */
const longestMs = 7 * 24 * 3_600_000;
/** Maximum number of logins of one key. A further login ends the one that has not been used for the longest time. */
const mostOfKey = 50;
const sweepMs = 60_000;
/**
 * Shortest time in milliseconds between two writes of a login's last use, because each write writes the whole
 * state.json.
 */
const saveMs = 3_600_000;

export class Logins {
  readonly tickets = new Tickets();
  readonly #state: State;
  readonly #log: Logger;
  /** Time of the last request of each login at this broker. The stored time may be up to an hour older. */
  readonly #used = new Map<LoginId, number>();
  readonly #stop: () => void;
  /** The committed logins from which `#byHash` was made. If the logins have changed, `#byHash` is made again. */
  #indexed: State['logins'] | undefined;
  #byHash = new Map<string, Login>();

  constructor(state: State, log: Logger) {
    this.#state = state;
    this.#log = log;
    this.#stop = every(sweepMs, () => this.#sweep());
  }

  /** Finds the login of this secret, and its key; undefined if the login has ended or the key is revoked or expired. */
  find(secret: string): { login: Login; key: Key } | undefined {
    if (this.#indexed !== this.#state.logins) {
      this.#indexed = this.#state.logins;
      this.#byHash = new Map([...this.#indexed.values()].map((login) => [login.hash, login]));
    }
    const hashed = hashOf(secret);
    const login = this.#byHash.get(hashed);
    // This comparison always takes the same time. Otherwise its duration could reveal the hash.
    if (!login || !timingSafeEqual(Buffer.from(login.hash), Buffer.from(hashed))) return undefined;
    const key = this.#state.keys.get(login.key_id);
    return key && this.#endOf(login) > now() ? { login, key } : undefined;
  }

  /** Reads the changes of other brokers first, and then finds the login. */
  async findNew(secret: string): Promise<{ login: Login; key: Key } | undefined> {
    await this.#state.refresh();
    return this.find(secret);
  }

  /** Records that a request has used a login. */
  note({ id }: Login): void {
    this.#used.set(id, now());
  }

  /** The login of a request, for GET /auth/me; undefined for a request with a key. */
  ofCaller({ login_id }: Caller): Reply<Api['logins']['create']> | undefined {
    const login = login_id && this.#state.logins.get(login_id);
    return login && this.#serialize(login);
  }

  close(): void {
    this.#stop();
  }

  readonly handlers: Handlers['logins'] = {
    create: async ({ name }, caller) => {
      assertPrivate(caller);
      assertKeyItself(caller);
      const secret = newSecret();
      const at = iso();
      const made: Login = {
        id: newId('login') as LoginId,
        ...{ key_id: caller.key_id, hash: hashOf(secret), name: name ?? null, address: caller.address },
        ...{ created_at: at, confirmed_at: at, used_at: at },
      };
      const login = await this.#state.change((transaction) => {
        // The built-in key of the broker's socket file is not stored and cannot be revoked, so it gets no login.
        const key = transaction.before.keys.get(caller.key_id);
        if (!key) throw noStoredKey;
        const secret_until = endOfSecret(key, caller.secret_hash);
        const bound = { ...made, ...(secret_until !== undefined && { secret_until }) };
        this.#removeSurplus(transaction, bound);
        transaction.put('logins', bound);
        caller.commit(transaction, { login_id: bound.id });
        return bound;
      });
      caller.headers.set('Set-Cookie', cookieWith(secret, longestMs));
      return this.#serialize(login);
    },
    list: (input, caller) => {
      const own = currentKey(this.#state, caller.key_id);
      const items = [...this.#state.logins.values()].flatMap((login) => {
        const listed = this.#endOf(login) > now() && mayManage(own, login, this.#state);
        return listed ? [this.#serialize(login)] : [];
      });
      return pageOf(routes.list, items, input);
    },
    confirm: async ({ login_id }, caller) => {
      assertKeyItself(caller);
      const login = await this.#state.change((transaction) => {
        const before = found(transaction.before.logins, 'login', login_id);
        if (before.key_id !== caller.key_id) throw anotherKey;
        const confirmed = { ...before, confirmed_at: iso() };
        transaction.put('logins', confirmed);
        caller.commit(transaction);
        return confirmed;
      });
      return this.#serialize(login);
    },
    remove: async ({ login_id }, caller) => {
      await this.#state.change((transaction) => {
        const login = found(transaction.before.logins, 'login', login_id);
        if (!mayManage(currentKey(transaction.before, caller.key_id), login, transaction.before))
          throw notManaged;
        transaction.remove('logins', login_id);
        caller.commit(transaction);
      });
      if (caller.login_id === login_id) caller.headers.set('Set-Cookie', noCookie);
      return { deleted: true };
    },
  };

  #usedAt({ id, used_at }: Login): number {
    // Another broker may have saved a later use.
    return Math.max(this.#used.get(id) ?? 0, Date.parse(used_at));
  }

  #endOf(login: Login): number {
    const key = this.#state.keys.get(login.key_id);
    if (!key || hasExpired(key)) return 0;
    const longest = Date.parse(login.created_at) + longestMs;
    const secret = Date.parse(login.secret_until ?? '') || Number.POSITIVE_INFINITY;
    return Math.min(longest, this.#usedAt(login) + idleMs, endOf(key), secret);
  }

  #serialize(login: Login): Reply<Api['logins']['create']> {
    const { hash: _, used_at: _saved, secret_until: _end, ...rest } = login;
    const key_name = this.#state.keys.get(login.key_id)?.name ?? '';
    return {
      ...rest,
      key_name,
      last_used_at: iso(this.#usedAt(login)),
      expires_at: iso(this.#endOf(login)),
    };
  }

  /** If a key has too many logins, removes the one that has not been used for the longest time. */
  #removeSurplus(transaction: StateTransaction, { key_id }: Login): void {
    const own = transaction.all('logins').filter((login) => login.key_id === key_id);
    own.sort((a, b) => this.#usedAt(a) - this.#usedAt(b));
    for (const { id } of own.slice(0, Math.max(0, own.length + 1 - mostOfKey)))
      transaction.remove('logins', id);
  }

  /** Removes logins that have ended, which also ends their streams. Saves the last use of the remaining logins. */
  #sweep(): void {
    const all = [...this.#state.logins.values()];
    const ended = all.filter((login) => this.#endOf(login) <= now());
    const unsaved = all.filter((login) => this.#usedAt(login) - Date.parse(login.used_at) >= saveMs);
    for (const id of this.#used.keys()) if (!this.#state.logins.has(id)) this.#used.delete(id);
    if (ended.length === 0 && unsaved.length === 0) return;
    const saved = this.#state.change((transaction) => {
      for (const { id } of unsaved) {
        const login = transaction.get('logins', id);
        if (login) transaction.put('logins', { ...login, used_at: iso(this.#usedAt(login)) });
      }
      for (const { id } of ended) transaction.remove('logins', id);
    });
    // After a failure, the next call of #sweep() makes the same changes.
    saved.catch((error: unknown) =>
      this.#log.error({ err: error }, 'changes of logins could not be saved; trying again in a minute'),
    );
  }
}

const noStoredKey = new AppError(
  'forbidden',
  'a request through the broker’s own socket file cannot log in, because it uses no API key: create a key with farhand auth create-key, and log in with that key',
);
const anotherKey = new AppError(
  'forbidden',
  'this login belongs to another API key; confirm it with that key',
);
const notManaged = new AppError(
  'forbidden',
  'this login belongs to another API key; end it with that key, or with a key that has the scope admin and may use all machines',
);

/**
 * True if the key `own` may list and end a login. Every key may do this with its own logins. A key with the scope admin
 * may also do this with the logins of another key, if it may use every machine that the other key may use.
 */
function mayManage(own: Key, { key_id }: Login, { keys }: Pick<Declared, 'keys'>): boolean {
  if (own.id === key_id) return true;
  const key = keys.get(key_id);
  return key !== undefined && holds(own, 'admin') && within(key, own);
}

/** Throws forbidden if others on the network could read the cookie. */
function assertPrivate({ secure }: Caller): void {
  if (secure) return;
  const message =
    'logging in needs an encrypted connection, because others could read a cookie that is sent over plain HTTP. Use https (start the broker with --tls or --tls-cert); or set --trusted-proxy to your TLS proxy, which must send X-Forwarded-Proto; or open the console on the broker’s own machine';
  throw new AppError('forbidden', message);
}

/** Throws forbidden unless the request has the API key itself, not the cookie of a login. */
function assertKeyItself({ login_id }: Caller): void {
  if (login_id !== undefined)
    throw new AppError(
      'forbidden',
      'this request needs the API key itself, not the cookie of a login: send the key in the header Authorization',
    );
}
