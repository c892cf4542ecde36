// API keys: made, shown once, kept as hashes, and what each may do.
import { createHash, timingSafeEqual } from 'node:crypto';
import { Allowance } from '../shared/allowance.ts';
import type { Caller, Handlers } from '../shared/api/index.ts';
import type { KeyId, MachineId, Scope } from '../shared/api/route.ts';
import { after, iso, now } from '../shared/clock.ts';
import { AppError } from '../shared/errors.ts';
import { newId, newSecret } from '../shared/ids.ts';
import type { Logger } from '../shared/logger.ts';
import type { History } from './history.ts';
import { openKeyUses } from './key-uses.ts';
import { pageOf } from './paging.ts';
import type { Key, State } from './state/index.ts';

/** Spec section 5: the literal every key starts with. */
const literal = 'service_apikey_';

/** The longest that strangers fill the log: so many lines from one address in a minute, and then a number. */
const mostStrangers = 10;
const minute = 60_000;

export interface Keys {
  handlers: Handlers['keys'];
  /** The good key of a secret, if it is one. */
  find(presented: string): Key | undefined;
  /** The key behind a presented secret. Throws unauthorized, and tells the log where such a one came from. */
  authenticate(presented: string, address: string): Key;
  /** The key of this id as it is now. Throws unauthorized once it is revoked or expired. */
  current(id: KeyId): Key;
  close(): void;
}

/** Who calls over the broker's own socket file, which only its user can open. */
export const localKey: Key = {
  id: 'key_local' as KeyId,
  name: 'local socket',
  hash: '',
  scopes: ['admin'],
  machine_ids: null,
  tags: null,
  created_at: iso(0),
  expires_at: null,
  created_by: null,
  previous: null,
};

/** Whether a key holds a scope; admin holds all. */
export function holds(key: Key, scope: Scope): boolean {
  return key.scopes.includes('admin') || key.scopes.includes(scope);
}

/** Whether a key reaches a machine: by its id, or by any of its tags; a key without limits reaches all. */
export function reaches(key: Key, machine: MachineId, state: State): boolean {
  if (!key.machine_ids && !key.tags) return true;
  if (key.machine_ids?.includes(machine)) return true;
  const tags = state.machines.get(machine)?.tags ?? [];
  return key.tags?.some((tag) => tags.includes(tag)) ?? false;
}

/** Every machine a key reaches; undefined: all there are and were. */
export function reachable(key: Key, state: State): MachineId[] | undefined {
  if (!key.machine_ids && !key.tags) return undefined;
  const tagged = [...state.machines.values()].filter((machine) =>
    machine.tags.some((tag) => key.tags?.includes(tag)),
  );
  return [...new Set([...(key.machine_ids ?? []), ...tagged.map((machine) => machine.id)])];
}

function hasExpired({ expires_at }: Key): boolean {
  return expires_at !== null && Date.parse(expires_at) <= now();
}

/** What a key is to do, and where. */
interface Intent {
  key_id: KeyId;
  machine_id: MachineId;
}

/** Whether the key of this id, as it is now, may do what needs a scope. */
function may(state: State, scope: Scope, { key_id, machine_id }: Intent): boolean {
  const key = keyOf(state, key_id);
  return key !== undefined && !hasExpired(key) && holds(key, scope) && reaches(key, machine_id, state);
}

function keyOf(state: State, id: KeyId): Key | undefined {
  return id === localKey.id ? localKey : state.keys.get(id);
}

/** Whether the key behind a command that waits may still have it run. */
export function mayRun(state: State) {
  return ({ requested_by, machine_id }: { requested_by: KeyId; machine_id: MachineId }): boolean =>
    may(state, 'commands:execute', { key_id: requested_by, machine_id });
}

/** Calls `look` after every change of a key or machine, and when the key expires. The result stops that. */
export function watchRights(state: State, key_id: KeyId, look: () => void): () => void {
  let cancel = (): void => {};
  const awaitExpiry = (): void => {
    cancel();
    const { expires_at = null } = keyOf(state, key_id) ?? {};
    const left = expires_at === null ? 0 : Date.parse(expires_at) - now();
    // Whoever judges an expired key says no by himself.
    if (left > 0) cancel = after(left, again);
  };
  const again = (): void => {
    awaitExpiry();
    look();
  };
  const stopWatching = state.watch(again);
  awaitExpiry();
  return () => {
    stopWatching();
    cancel();
  };
}

/**
 * Calls `end` once a key may no longer take part in sessions there: revoked, expired, without the scope, or without the
 * reach. The result stops that.
 */
export function whileAttachable(state: State) {
  return (intent: Intent, end: () => void): (() => void) => {
    const look = (): void => {
      // Where the machine itself has gone, its sessions are over for everybody.
      if (state.machines.has(intent.machine_id) && !may(state, 'sessions:attach', intent)) end();
    };
    const stop = watchRights(state, intent.key_id, look);
    look();
    return stop;
  };
}

/** What a key may at this moment, for whoever acts on its behalf; undefined once it is revoked or expired. */
export function rightsIn(state: State) {
  const alive = (id: KeyId): Key | undefined => {
    const key = id === localKey.id ? localKey : state.keys.get(id);
    return key && !hasExpired(key) ? key : undefined;
  };
  return (id: KeyId) => {
    const key = alive(id);
    return (
      key && {
        may: (scope: Scope) => holds(key, scope),
        // What names no machine is reached by nobody who is limited to some.
        reaches: (machine: string) => reaches(key, machine as MachineId, state),
        within: (other: KeyId) => {
          const outer = alive(other);
          return outer !== undefined && within(key, outer);
        },
      }
    );
  };
}

export function openKeys(state: State, history: History, log: Logger): Keys {
  const bySecret = secretIndex(state);
  const uses = openKeyUses(history, state.keys);
  const strangers = new Allowance<string>(mostStrangers, minute, (address, more) =>
    log.warn({ address, more }, 'more requests came without a good key'),
  );

  function shown({ hash: _, previous: _previous, ...key }: Key) {
    const { at = null, ip = null } = uses.lastOf(key.id) ?? {};
    return { ...key, last_used_at: at === null ? null : iso(at), last_used_ip: ip };
  }

  /** One that the caller may deal with. */
  function find(id: string, caller: Caller, keys: Pick<State['keys'], 'get'> = state.keys): Key {
    const key = keys.get(id);
    if (!key) throw new AppError('key_not_found', 'no such key', { key_id: id });
    refuseStronger(key, ownKey(caller, keys.get(caller.key_id)));
    return key;
  }

  /** Changes one into what the caller may make. */
  function change(id: string, caller: Caller, edit: (before: Key) => Partial<Key>): Promise<Key> {
    return state.change((draft) => {
      const keys = { get: (one: string) => draft.get('keys', one) };
      const before = find(id, caller, keys);
      const after = { ...before, ...edit(before) };
      refuseMore(after, ownKey(caller, keys.get(caller.key_id)));
      draft.put('keys', after);
      caller.commit(draft, { key_id: after.id });
      return after;
    });
  }

  return {
    find(presented) {
      const key = bySecret(presented);
      return key && !hasExpired(key) ? key : undefined;
    },
    authenticate(presented, address) {
      const key = bySecret(presented);
      if (key && !hasExpired(key)) {
        uses.note(key.id, address);
        return key;
      }
      if (strangers.take(address, address)) {
        log.warn({ address, ...(key && { key_id: key.id }) }, 'a request came without a good key');
      }
      throw key ? expired : noGoodKey;
    },
    current(id) {
      const key = keyOf(state, id);
      if (!key) throw revoked;
      if (hasExpired(key)) throw expired;
      return key;
    },
    close: () => strangers.close(),
    handlers: {
      async create(input, caller) {
        const secret = `${literal}${newSecret()}`;
        const key: Key = {
          id: newId('key') as KeyId,
          name: input.name,
          hash: hashOf(secret),
          scopes: input.scopes,
          machine_ids: input.machine_ids ?? null,
          tags: input.tags ?? null,
          created_at: iso(),
          expires_at: input.expires_at?.toISOString() ?? null,
          created_by: caller.key_id,
          previous: null,
        };
        await state.change((draft) => {
          refuseMore(key, ownKey(caller, draft.get('keys', caller.key_id)));
          draft.put('keys', key);
          caller.commit(draft, { key_id: key.id });
        });
        return { ...shown(key), key: secret };
      },
      list(input, caller) {
        const own = ownKey(caller, state.keys.get(caller.key_id));
        const page = pageOf(
          [...state.keys.values()].filter((key) => within(key, own)),
          input,
          (key, field) => (field === 'name' ? key.name : key.created_at),
        );
        return { items: page.items.map(shown), total: page.total };
      },
      get: ({ key_id }, caller) => shown(find(key_id, caller)),
      me: (_input, caller) => shown(ownKey(caller, state.keys.get(caller.key_id))),
      async update({ key_id, name, scopes, expires_at, ...limits }, caller) {
        const key = await change(key_id, caller, (before) => ({
          name: name ?? before.name,
          scopes: scopes ?? before.scopes,
          machine_ids: limits.machine_ids === undefined ? before.machine_ids : limits.machine_ids,
          tags: limits.tags === undefined ? before.tags : limits.tags,
          expires_at: endOf(before, expires_at),
        }));
        return shown(key);
      },
      async rotate({ key_id, expires_at, grace }, caller) {
        const secret = `${literal}${newSecret()}`;
        const key = await change(key_id, caller, (before) => ({
          hash: hashOf(secret),
          previous: grace > 0 ? { hash: before.hash, until: iso(now() + grace) } : null,
          expires_at: endOf(before, expires_at),
        }));
        return { ...shown(key), key: secret };
      },
      async remove({ key_id }, caller) {
        const schedules = await state.change((draft) => {
          const key = find(key_id, caller, { get: (id) => draft.get('keys', id) });
          draft.remove('keys', key.id);
          caller.commit(draft);
          return stoppedWith(key, state, caller);
        });
        uses.forget(key_id);
        return { deleted: true, schedules };
      },
    },
  };
}

/** One text for all that nobody knows, so that a guesser learns nothing. */
const noGoodKey = new AppError(
  'unauthorized',
  'send a valid API key: Authorization: Bearer service_apikey_…',
);
/** Only who has its secret, or had, hears these two. */
const expired = new AppError('unauthorized', 'this key has expired: ask for another, or for more time');
const revoked = new AppError('unauthorized', 'this key was revoked');

function endOf({ expires_at }: Key, wish: Date | null | undefined): string | null {
  return wish === undefined ? expires_at : (wish?.toISOString() ?? null);
}

/** The caller's key as it is now; one that was revoked meanwhile is nobody's. */
function ownKey(caller: Caller, found: Key | undefined): Key {
  if (caller.key_id === localKey.id) return localKey;
  if (found) return found;
  throw revoked;
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
  if (own.expires_at === null || (key.expires_at ?? '9999') <= own.expires_at) return;
  throw new AppError('forbidden', 'a key that expires makes none that lasts longer', {
    expires_at: own.expires_at,
  });
}

/** Schedules that ran with the right of this key, and won't any more. */
function stoppedWith({ id }: Key, state: State, caller: Caller): string[] {
  return [...state.schedules.values()]
    .filter((one) => one.requested_by === id && one.enabled && caller.reaches(one.machine_id))
    .map((one) => one.id);
}

/** Whether all a key reaches, today and after any retagging, is inside what the other reaches. */
function within(key: Key, outer: Key): boolean {
  if (!outer.machine_ids && !outer.tags) return true;
  if (!key.machine_ids && !key.tags) return false;
  const machines = key.machine_ids?.every((id) => outer.machine_ids?.includes(id)) ?? true;
  const tags = key.tags?.every((tag) => outer.tags?.includes(tag)) ?? true;
  return machines && tags;
}

function hashOf(secret: string): string {
  return createHash('sha256').update(secret).digest('hex');
}

/** Finds the key of a secret by its hash, in an index that is made anew only when the committed keys changed. */
function secretIndex(state: State): (presented: string) => Key | undefined {
  let from: State['keys'] | undefined;
  let index = new Map<string, { key: Key; until: number }>();
  return (presented) => {
    if (!presented.startsWith(literal)) return undefined;
    if (from !== state.keys) index = secretsOf(state.keys);
    from = state.keys;
    const hash = hashOf(presented);
    const found = index.get(hash);
    if (!found || found.until <= now()) return undefined;
    const { key } = found;
    // Whatever the index does with its time, what is compared takes the same.
    const known = [key.hash, key.previous?.hash ?? key.hash];
    return known.some((one) => timingSafeEqual(Buffer.from(one), Buffer.from(hash))) ? key : undefined;
  };
}

function secretsOf(keys: State['keys']): Map<string, { key: Key; until: number }> {
  const before = [...keys.values()].flatMap((key) =>
    key.previous ? [[key.previous.hash, { key, until: Date.parse(key.previous.until) }] as const] : [],
  );
  const now = [...keys.values()].map((key) => [key.hash, { key, until: Number.POSITIVE_INFINITY }] as const);
  return new Map([...before, ...now]);
}
