// API keys: finds the key that a request presents, and handles the REST routes that make, change, rotate and
// revoke keys. Only the hash of each secret is stored.
import { hash, timingSafeEqual } from 'node:crypto';
import { keys as routes } from '../../shared/api/keys.ts';
import type { Api, Caller, Handlers, Reply } from '../../shared/api/route-table.ts';
import type { KeyId } from '../../shared/api/shared-schemas.ts';
import { iso, monotonic, now } from '../../shared/clock.ts';
import { definedFields } from '../../shared/defined-fields.ts';
import { AppError } from '../../shared/errors.ts';
import { newId, newSecret } from '../../shared/ids-and-secrets.ts';
import { LogLimiter } from '../../shared/log-limiter.ts';
import type { Logger } from '../../shared/logger.ts';
import { found } from '../find-or-not-found.ts';
import { type History, type Row, textIn } from '../history/history-database.ts';
import { pageOf } from '../list-pages-and-filters.ts';
import { endLogins } from '../logins/login-validity.ts';
import type {
  AlertChannel,
  Declared,
  Key,
  Schedule,
  State,
  StateTransaction,
  Webhook,
} from '../state/index.ts';
import { currentKey, endOf, hasExpired, holds, machinesOfSchedule, within } from './rights.ts';

/** The text with which every key starts. */
const literal = 'service_apikey_';
const bearer = /^Bearer ([\x21-\x7e]+)$/i;

/**
 * Maximum number of log lines per minute about requests that come from one address without a valid key. Further
 * requests are counted, and the count is logged.
 */
const mostLines = 10;

export function hashOf(secret: string): string {
  return hash('sha256', secret);
}

export class Keys {
  readonly #state: State;
  readonly #loginOf: (caller: Caller) => Reply<Api['keys']['me']>['login'];
  readonly #log: Logger;
  readonly #usage: KeyUsage;
  readonly #limiter: LogLimiter<string>;
  /** The committed keys from which `#byHash` was made. If the keys have changed, `#byHash` is made again. */
  #indexed: State['keys'] | undefined;
  #byHash = new Map<string, { key: Key; until: number }>();

  private constructor(
    state: State,
    usage: KeyUsage,
    loginOf: (caller: Caller) => Reply<Api['keys']['me']>['login'],
    log: Logger,
  ) {
    this.#state = state;
    this.#loginOf = loginOf;
    this.#log = log;
    this.#usage = usage;
    this.#limiter = new LogLimiter<string>(mostLines, (address, more) =>
      log.warn(
        { address, more },
        'more requests from this address came without a valid API key; only their number is logged',
      ),
    );
  }

  static async open(
    state: State,
    history: History,
    loginOf: (caller: Caller) => Reply<Api['keys']['me']>['login'],
    log: Logger,
  ): Promise<Keys> {
    return new Keys(state, await KeyUsage.open(history, state.keys), loginOf, log);
  }

  /**
   * SHA-256 of the secret in the header `Authorization: Bearer KEY`, even if no key has this secret; undefined for
   * other headers.
   */
  hashIn(authorization: string): string | undefined {
    const presented = bearer.exec(authorization)?.[1];
    return presented?.startsWith(literal) ? hashOf(presented) : undefined;
  }

  /** The key whose secret is in the header `Authorization: Bearer KEY`, even if the key has expired. */
  find(authorization: string): Key | undefined {
    const hashed = this.hashIn(authorization);
    if (hashed === undefined) return undefined;
    if (this.#indexed !== this.#state.keys) this.#index();
    const found = this.#byHash.get(hashed);
    if (!found || found.until <= now()) return undefined;
    const { key } = found;
    // timingSafeEqual() takes the same time whatever the hashes are. The duration of an ordinary comparison could
    // reveal the hash.
    const hashes = [key.hash, key.previous?.hash ?? key.hash];
    return hashes.some((one) => timingSafeEqual(Buffer.from(one), Buffer.from(hashed))) ? key : undefined;
  }

  /** Does the same as find(), but first reads the changes of other brokers. */
  async findNew(authorization: string): Promise<Key | undefined> {
    if (this.hashIn(authorization) === undefined) return undefined;
    await this.#state.refresh();
    return this.find(authorization);
  }

  /** True if the header `Authorization: Bearer KEY` names a key that has not expired. */
  accepts(authorization: string): boolean {
    const key = this.find(authorization);
    return key !== undefined && !hasExpired(key);
  }

  #index(): void {
    this.#indexed = this.#state.keys;
    this.#byHash.clear();
    for (const key of this.#indexed.values()) {
      const { hash: current, previous } = key;
      if (previous) this.#byHash.set(previous.hash, { key, until: Date.parse(previous.until) });
      this.#byHash.set(current, { key, until: Number.POSITIVE_INFINITY });
    }
  }

  /**
   * Records the use of a key and returns its current version. Throws unauthorized, and logs the address, if no key was
   * found or the key is revoked or expired.
   */
  admit(found: Key | undefined, address: string): Key {
    try {
      if (!found) throw noGoodKey;
      const key = currentKey(this.#state, found.id);
      this.#usage.note(key.id, address);
      return key;
    } catch (error) {
      if (this.#limiter.take(address, address))
        this.#log.warn(
          { address, ...(found && { key_id: found.id }) },
          'a request came with a wrong, revoked or expired API key',
        );
      throw error;
    }
  }

  close(): void {
    this.#limiter.close();
  }

  readonly handlers: Handlers['keys'] = {
    create: async ({ name, scopes, machine_ids = null, tags = null, expires_at }, caller) => {
      const secret = `${literal}${newSecret()}`;
      const key: Key = {
        id: newId('key') as KeyId,
        ...{ name, scopes, machine_ids, tags },
        hash: hashOf(secret),
        created_at: iso(),
        expires_at: expires_at?.toISOString() ?? null,
        created_by: caller.key_id,
        previous: null,
      };
      await this.#put(caller, () => key);
      return { ...this.#serialize(key), key: secret };
    },
    list: async (input, caller) => {
      await this.#usage.readOthers();
      const own = currentKey(this.#state, caller.key_id);
      const seen = [...this.#state.keys.values()].filter((key) => within(key, own));
      const page = pageOf(routes.list, seen, input);
      return { items: page.items.map((key) => this.#serialize(key)), total: page.total };
    },
    get: async ({ key_id }, caller) => {
      await this.#usage.readOthers();
      return this.#serialize(find(key_id, caller, this.#state));
    },
    me: (_input, caller) => ({
      ...this.#serialize(currentKey(this.#state, caller.key_id)),
      login: this.#loginOf(caller),
    }),
    update: async ({ key_id, expires_at, ...changes }, caller) => {
      const key = await this.#put(caller, (declared) => {
        const before = find(key_id, caller, declared);
        return { ...before, ...definedFields(changes), expires_at: newEnd(before, expires_at) };
      });
      return this.#serialize(key);
    },
    rotate: async ({ key_id, expires_at, grace }, caller) => {
      const secret = `${literal}${newSecret()}`;
      const key = await this.#put(caller, (declared, transaction) => {
        const before = find(key_id, caller, declared);
        const previous = grace > 0 ? { hash: before.hash, until: iso(now() + grace) } : null;
        endLogins(transaction, before.id, previous?.until, caller.login_id);
        return { ...before, hash: hashOf(secret), previous, expires_at: newEnd(before, expires_at) };
      });
      return { ...this.#serialize(key), key: secret };
    },
    remove: async ({ key_id }, caller) => {
      const stopped = await this.#state.change((transaction) => {
        const key = find(key_id, caller, transaction.before);
        transaction.remove('keys', key.id);
        fixMachines(key, transaction);
        caller.commit(transaction);
        return stoppedWith(key, transaction.before, caller);
      });
      return { deleted: true, ...stopped };
    },
  };

  #serialize({ hash: _, previous: _previous, ...key }: Key) {
    const use = this.#usage.lastOf(key.id);
    return { ...key, last_used_at: use ? iso(use.at) : null, last_used_ip: use?.ip ?? null };
  }

  /** Commits a new or changed key. Throws forbidden if the caller has no right to make it. */
  #put(caller: Caller, make: (declared: Declared, transaction: StateTransaction) => Key): Promise<Key> {
    return this.#state.change((transaction) => {
      const key = make(transaction.before, transaction);
      assertNotMore(key, currentKey(transaction.before, caller.key_id));
      transaction.put('keys', key);
      caller.commit(transaction, { key_id: key.id });
      return key;
    });
  }
}

/** Throws key_not_found, or forbidden for a key that the caller may not read or change. */
function find(id: string, caller: Caller, declared: Pick<Declared, 'keys'>): Key {
  const key = found(declared.keys, 'key', id);
  assertNotStronger(key, currentKey(declared, caller.key_id));
  return key;
}

/** The message is the same for all unknown keys, so that it gives no hint to attackers who guess keys. */
const anyKey =
  'the API key is missing or unknown: send one in the header Authorization: Bearer service_apikey_…';
const noGoodKey = new AppError('unauthorized', anyKey);

function newEnd({ expires_at }: Key, end: Date | null | undefined): string | null {
  return end === undefined ? expires_at : (end?.toISOString() ?? null);
}

/**
 * Throws forbidden if `key` is stronger than the caller's own key: `key` has a scope that `own` lacks, or may use a
 * machine that `own` may not use.
 */
function assertNotStronger(key: Key, own: Key): void {
  const missing = key.scopes.find((scope) => !holds(own, scope));
  if (missing) {
    const text = `a key without the scope ${missing} cannot read, create or change a key with this scope; use a key with ${missing}`;
    throw new AppError('forbidden', text, { required_scope: missing });
  }
  if (within(key, own)) return;
  const text =
    'a key limited to some machines cannot read, create or change a key for other machines; use a key without machine_ids and tags';
  throw new AppError('forbidden', text);
}

/** Throws forbidden if `key` is stronger than the caller's own key, or expires later. */
function assertNotMore(key: Key, own: Key): void {
  assertNotStronger(key, own);
  if (endOf(key) <= endOf(own)) return;
  const { expires_at } = own;
  const text = `a key cannot create, change or rotate a key that expires later than itself; send an expires_at of ${expires_at} or earlier`;
  throw new AppError('forbidden', text, { expires_at });
}

/**
 * Returns the ids of the objects that stop when a key is revoked: the key's enabled schedules that the caller may see,
 * and its enabled webhooks and alert channels. The key's queued commands and logins end too, but their ids are not
 * returned. Also returns the ids of the saved commands that were last changed with the key. Other keys can still run
 * these commands, so the user should check them.
 */
function stoppedWith({ id }: Key, declared: Declared, caller: Caller) {
  const { schedules, webhooks, alert_channels, saved_commands } = declared;
  const isSeen = (one: Schedule): boolean =>
    !caller.reachable() || machinesOfSchedule(one, declared).some((machine) => caller.reaches(machine));
  const stopped = [...schedules.values()].filter(
    (one) => one.requested_by === id && one.enabled && isSeen(one),
  );
  const isSilenced = (one: Webhook | AlertChannel): boolean => one.key_id === id && one.enabled;
  const changed = [...saved_commands.values()].filter((one) => one.updated_by === id);
  const idsOf = <Id>(some: readonly { id: Id }[]): Id[] => some.map((one) => one.id);
  return {
    schedules: idsOf(stopped),
    webhooks: idsOf([...webhooks.values()].filter(isSilenced)),
    alert_channels: idsOf([...alert_channels.values()].filter(isSilenced)),
    saved_commands: idsOf(changed),
  };
}

/** Stores a removed key's limits in the key's schedules that have tags, so that their machines stay the same. */
function fixMachines({ id, machine_ids, tags }: Key, transaction: StateTransaction): void {
  const own = transaction.all('schedules').filter((one) => one.tags !== null && one.requested_by === id);
  for (const one of own) transaction.put('schedules', { ...one, key_limits: { machine_ids, tags } });
}

// ---- The last use of each key

interface Use {
  /** Milliseconds since 1970. */
  at: number;
  ip: string;
  /**
   * Monotonic time at which this process last stored the key's use in the database; undefined if it has not done so
   * yet.
   */
  written_at?: number | undefined;
}

const tables = [
  'CREATE TABLE key_uses (key_id TEXT PRIMARY KEY, last_used_at INTEGER NOT NULL, ip TEXT NOT NULL) WITHOUT ROWID',
];

const allUses = 'SELECT key_id, last_used_at, ip FROM key_uses';
const useIn = (row: Row): Use => ({ at: Number(row.last_used_at), ip: textIn(row, 'ip') });

/** Shortest time in milliseconds between two database writes about the use of one key. */
const betweenMs = 60_000;

/**
 * Records when and from where each key was last used. It writes in the background, so that no request waits
 * for it.
 */
class KeyUsage {
  readonly #history: History;
  readonly #uses: Map<string, Use>;

  private constructor(history: History, uses: Map<string, Use>) {
    this.#history = history;
    this.#uses = uses;
  }

  /** Reads when each key was last used. Deletes the rows of keys that were removed since the last start. */
  static async open(history: History, keys: ReadonlyMap<string, unknown>): Promise<KeyUsage> {
    await history.migrate('keys', tables);
    const others = 'DELETE FROM key_uses WHERE key_id NOT IN (SELECT value FROM json_each(?))';
    const rows = await history.write((transaction) => {
      transaction.run(others, JSON.stringify([...keys.keys()]));
      return transaction.all(allUses);
    });
    return new KeyUsage(history, new Map(rows.map((row) => [textIn(row, 'key_id'), useIn(row)])));
  }

  /** Reads the uses that other brokers on the same database have stored. Never rejects. */
  async readOthers(): Promise<void> {
    if (!this.#history.isRemote) return;
    // While the database does not answer, the uses that were read last remain.
    for (const row of await this.#history.all(allUses).catch(() => [])) {
      const id = textIn(row, 'key_id');
      const known = this.#uses.get(id);
      const use = useIn(row);
      if (use.at > (known?.at ?? 0)) this.#uses.set(id, { ...use, written_at: known?.written_at });
    }
  }

  note(id: KeyId, ip: string): void {
    const written_at = this.#uses.get(id)?.written_at;
    const use: Use = { at: now(), ip, written_at };
    this.#uses.set(id, use);
    if (written_at !== undefined && monotonic() - written_at < betweenMs) return;
    use.written_at = monotonic();
    const row = { key_id: id, last_used_at: use.at, ip };
    this.#history
      .write((transaction) => transaction.put('key_uses', 'key_id', row))
      // The error is ignored: the history logs it, and later uses of the key are written again.
      .catch(() => {});
  }

  lastOf(id: string): Use | undefined {
    return this.#uses.get(id);
  }
}
