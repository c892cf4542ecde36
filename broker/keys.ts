// API keys: made, shown once, kept as hashes, and what each may do.
import { createHash, timingSafeEqual } from 'node:crypto';
import type { Caller, Handlers } from '../shared/api/index.ts';
import type { KeyId, MachineId, Scope } from '../shared/api/route.ts';
import { after, iso, now } from '../shared/clock.ts';
import { AppError } from '../shared/errors.ts';
import { newId, newSecret } from '../shared/ids.ts';
import { pageOf } from './paging.ts';
import type { Key, State } from './state/index.ts';

/** Spec section 5: the literal every key starts with. */
const literal = 'service_apikey_';

export interface Keys {
  handlers: Handlers['keys'];
  /** The key behind a presented secret; undefined when there is none, or it has expired. */
  authenticate(presented: string): Key | undefined;
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

export function openKeys(state: State): Keys {
  const byHash = hashIndex(state);

  return {
    authenticate(presented) {
      if (!presented.startsWith(literal)) return undefined;
      const hash = hashOf(presented);
      const key = byHash().get(hash);
      if (!key || !timingSafeEqual(Buffer.from(key.hash), Buffer.from(hash))) return undefined;
      return hasExpired(key) ? undefined : key;
    },
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
        };
        await state.change((draft) => {
          const maker = ownKey(caller, draft.get('keys', caller.key_id));
          refuseStronger(key, maker, caller);
          if (maker.expires_at !== null && (key.expires_at ?? '9999') > maker.expires_at) {
            throw new AppError('forbidden', 'a key that expires makes none that lasts longer', {
              expires_at: maker.expires_at,
            });
          }
          draft.put('keys', key);
          caller.made(draft, key.id);
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
      me: (_input, caller) => shown(ownKey(caller, state.keys.get(caller.key_id))),
      async remove(input, caller) {
        const schedules = await state.change((draft) => {
          const key = draft.get('keys', input.key_id);
          if (!key) throw new AppError('key_not_found', 'no such key', { key_id: input.key_id });
          refuseStronger(key, ownKey(caller, draft.get('keys', caller.key_id)), caller);
          draft.remove('keys', key.id);
          return stoppedWith(key, state, caller);
        });
        return { deleted: true, schedules };
      },
    },
  };
}

/** The caller's key as it is now; one that was revoked meanwhile is nobody's. */
function ownKey(caller: Caller, found: Key | undefined): Key {
  if (caller.key_id === localKey.id) return localKey;
  if (found) return found;
  throw new AppError('unauthorized', 'this key was revoked');
}

/** A key makes, and removes, no key stronger than itself. */
function refuseStronger(key: Key, maker: Key, caller: Caller): void {
  const missing = key.scopes.find((scope) => !caller.may(scope));
  if (missing) {
    throw new AppError('forbidden', `a key without ${missing} cannot deal with one that has it`, {
      required_scope: missing,
    });
  }
  if (!within(key, maker)) {
    throw new AppError(
      'forbidden',
      'a key limited to some machines cannot deal with one that reaches others',
    );
  }
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

function shown({ hash: _, ...key }: Key) {
  return key;
}

function hashOf(secret: string): string {
  return createHash('sha256').update(secret).digest('hex');
}

/** Keys by hash, made anew only when the committed keys changed. */
function hashIndex(state: State): () => Map<string, Key> {
  let from: State['keys'] | undefined;
  let index = new Map<string, Key>();
  return () => {
    if (from === state.keys) return index;
    from = state.keys;
    index = new Map([...from.values()].map((key) => [key.hash, key]));
    return index;
  };
}
