// API keys: made, shown once, kept as hashes, and what each may do.

import type { Caller, Handlers } from '../../shared/api/index.ts';
import { keys as routes } from '../../shared/api/keys.ts';
import type { KeyId } from '../../shared/api/route.ts';
import { iso, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { newId } from '../../shared/ids.ts';
import { LogLimiter } from '../../shared/log-limiter.ts';
import type { Logger } from '../../shared/logger.ts';
import type { History } from '../history.ts';
import { type KeyUses, openKeyUses } from '../key-uses.ts';
import { pageOf } from '../paging.ts';
import type { Declared, Key, State } from '../state/index.ts';
import { currentKey, endOf, holds, within } from './rights.ts';
import { hashOf, newKeySecret, secretIndex } from './secrets.ts';

/** The longest that strangers fill the log: so many lines from one address in a minute, and then a number. */
const mostStrangers = 10;
const minute = 60_000;

export type Keys = ReturnType<typeof openKeys>;

export function openKeys(state: State, history: History, log: Logger) {
  const uses = openKeyUses(history, state.keys);
  const strangers = new LogLimiter<string>(mostStrangers, minute, (address, more) =>
    log.warn({ address, more }, 'more requests came without a good key'),
  );
  return {
    /** The key behind a presented secret, also one that has expired. */
    find: secretIndex(state),
    /**
     * The key that was found as it is now, whose use is noted. Throws unauthorized where there is none, or it is no
     * longer good, and tells the log where such a one came from.
     */
    admit(found: Key | undefined, address: string): Key {
      try {
        if (!found) throw noGoodKey;
        const key = currentKey(state, found.id);
        uses.note(key.id, address);
        return key;
      } catch (error) {
        if (strangers.take(address, address)) {
          log.warn({ address, ...(found && { key_id: found.id }) }, 'a request came without a good key');
        }
        throw error;
      }
    },
    close: (): void => strangers.close(),
    handlers: keyHandlers(state, uses),
  };
}

function keyHandlers(state: State, uses: KeyUses): Handlers['keys'] {
  function shown({ hash: _, previous: _previous, ...key }: Key) {
    const { at = null, ip = null } = uses.lastOf(key.id) ?? {};
    return { ...key, last_used_at: at === null ? null : iso(at), last_used_ip: ip };
  }
  return {
    async create({ name, scopes, machine_ids = null, tags = null, expires_at }, caller) {
      const secret = newKeySecret();
      const key: Key = {
        id: newId('key') as KeyId,
        ...{ name, scopes, machine_ids, tags },
        hash: hashOf(secret),
        created_at: iso(),
        expires_at: expires_at?.toISOString() ?? null,
        created_by: caller.key_id,
        previous: null,
      };
      await put(state, caller, () => key);
      return { ...shown(key), key: secret };
    },
    list(input, caller) {
      const own = currentKey(state, caller.key_id);
      const seen = [...state.keys.values()].filter((key) => within(key, own));
      const page = pageOf(routes.list, seen, input);
      return { items: page.items.map(shown), total: page.total };
    },
    get: ({ key_id }, caller) => shown(find(key_id, caller, state)),
    me: (_input, caller) => shown(currentKey(state, caller.key_id)),
    async update({ key_id, name, scopes, expires_at, ...limits }, caller) {
      const key = await change(state, key_id, caller, (before) => ({
        name: name ?? before.name,
        scopes: scopes ?? before.scopes,
        machine_ids: limits.machine_ids === undefined ? before.machine_ids : limits.machine_ids,
        tags: limits.tags === undefined ? before.tags : limits.tags,
        expires_at: newEnd(before, expires_at),
      }));
      return shown(key);
    },
    async rotate({ key_id, expires_at, grace }, caller) {
      const secret = newKeySecret();
      const key = await change(state, key_id, caller, (before) => ({
        hash: hashOf(secret),
        previous: grace > 0 ? { hash: before.hash, until: iso(now() + grace) } : null,
        expires_at: newEnd(before, expires_at),
      }));
      return { ...shown(key), key: secret };
    },
    async remove({ key_id }, caller) {
      const stopped = await state.change((draft) => {
        const key = find(key_id, caller, draft.before);
        draft.remove('keys', key.id);
        caller.commit(draft);
        return stoppedWith(key, state, caller);
      });
      uses.forget(key_id);
      return { deleted: true, ...stopped };
    },
  };
}

/** A key that the caller may deal with. */
function find(id: string, caller: Caller, declared: Pick<Declared, 'keys'>): Key {
  const key = declared.keys.get(id);
  if (!key) throw new AppError('key_not_found', 'no such key', { key_id: id });
  refuseStronger(key, currentKey(declared, caller.key_id));
  return key;
}

/** Commits a key that the caller may make. */
function put(state: State, caller: Caller, make: (declared: Declared) => Key): Promise<Key> {
  return state.change((draft) => {
    const key = make(draft.before);
    refuseMore(key, currentKey(draft.before, caller.key_id));
    draft.put('keys', key);
    caller.commit(draft, { key_id: key.id });
    return key;
  });
}

/** Changes a key into one that the caller may make. */
function change(state: State, id: string, caller: Caller, edit: (before: Key) => Partial<Key>): Promise<Key> {
  return put(state, caller, (declared) => {
    const key = find(id, caller, declared);
    return { ...key, ...edit(key) };
  });
}

/** One text for all that nobody knows, so that a guesser learns nothing. */
const noGoodKey = new AppError(
  'unauthorized',
  'send a valid API key: Authorization: Bearer service_apikey_…',
);
function newEnd({ expires_at }: Key, end: Date | null | undefined): string | null {
  return end === undefined ? expires_at : (end?.toISOString() ?? null);
}

/** A key deals with none that is stronger than itself. */
function refuseStronger(key: Key, own: Key): void {
  const missing = key.scopes.find((scope) => !holds(own, scope));
  if (missing) {
    throw new AppError('forbidden', `a key without ${missing} cannot deal with one that has it`, {
      required_scope: missing,
    });
  }
  if (!within(key, own)) {
    throw new AppError(
      'forbidden',
      'a key limited to some machines cannot deal with one that reaches others',
    );
  }
}

/** And makes none that is stronger, or lasts longer. */
function refuseMore(key: Key, own: Key): void {
  refuseStronger(key, own);
  if (endOf(key) <= endOf(own)) return;
  throw new AppError('forbidden', 'a key that expires makes none that lasts longer', {
    expires_at: own.expires_at,
  });
}

/** Schedules that ran, and webhooks that told, with the right of this key, and won't any more. */
function stoppedWith({ id }: Key, state: State, caller: Caller) {
  const ran = [...state.schedules.values()].filter(
    (one) => one.requested_by === id && one.enabled && caller.reaches(one.machine_id),
  );
  const told = [...state.webhooks.values()].filter((one) => one.key_id === id && one.enabled);
  return { schedules: ran.map((one) => one.id), webhooks: told.map((one) => one.id) };
}
