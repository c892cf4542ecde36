// What each key may do, and on which machines: judged from the declared documents, committed or as a change finds them.
import type { Rights } from '../../shared/api/index.ts';
import type { KeyId, MachineId, Scope } from '../../shared/api/route.ts';
import { after, iso, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import type { Declared, Key, State } from '../state/index.ts';

type Keys = Pick<Declared, 'keys'>;
type Machines = Pick<Declared, 'machines'>;

/** The key of callers over the broker's own socket file, which only its user can open. */
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

/** Answered only to a caller with the secret of that key. */
const expired = new AppError('unauthorized', 'this key has expired: ask for another, or for more time');
const revoked = new AppError('unauthorized', 'this key was revoked');

/** When a key ends, in milliseconds: as a text, later years may sort before earlier ones. */
export function endOf({ expires_at }: Pick<Key, 'expires_at'>): number {
  return expires_at === null ? Number.POSITIVE_INFINITY : Date.parse(expires_at);
}

export function hasExpired(key: Key): boolean {
  return endOf(key) <= now();
}

function keyOf({ keys }: Keys, id: KeyId): Key | undefined {
  return id === localKey.id ? localKey : keys.get(id);
}

/** The key of this id as it is. Throws unauthorized where it is revoked or expired. */
export function currentKey(declared: Keys, id: KeyId): Key {
  const key = keyOf(declared, id);
  if (!key) throw revoked;
  if (hasExpired(key)) throw expired;
  return key;
}

function goodKey(declared: Keys, id: KeyId): Key | undefined {
  const key = keyOf(declared, id);
  return key && !hasExpired(key) ? key : undefined;
}

/** Whether a key holds a scope; admin holds all. */
export function holds(key: Key, scope: Scope): boolean {
  return key.scopes.includes('admin') || key.scopes.includes(scope);
}

function isUnlimited({ machine_ids, tags }: Key): boolean {
  return !machine_ids && !tags;
}

/** Whether a key reaches a machine: by its id, or by any of its tags; a key without limits reaches all. */
export function reaches(key: Key, machine: MachineId, { machines }: Machines): boolean {
  if (isUnlimited(key) || key.machine_ids?.includes(machine)) return true;
  const tags = machines.get(machine)?.tags ?? [];
  return key.tags?.some((tag) => tags.includes(tag)) ?? false;
}

/** Every machine a key reaches; undefined: all there are and were. */
function reachable(key: Key, declared: Machines): MachineId[] | undefined {
  if (isUnlimited(key)) return undefined;
  const present = [...declared.machines.values()].filter(({ id }) => reaches(key, id, declared));
  return [...new Set([...(key.machine_ids ?? []), ...present.map(({ id }) => id)])];
}

/** Whether all a key reaches, today and after any retagging, is inside what the other reaches. */
export function within(key: Key, outer: Key): boolean {
  if (isUnlimited(outer) || isUnlimited(key)) return isUnlimited(outer);
  const machines = key.machine_ids?.every((id) => outer.machine_ids?.includes(id)) ?? true;
  const tags = key.tags?.every((tag) => outer.tags?.includes(tag)) ?? true;
  return machines && tags;
}

/** What the key of this id may, each time as it is then. */
export function rightsOf(declared: Keys & Machines, id: KeyId): Rights {
  const key = (): Key => currentKey(declared, id);
  return {
    may: (scope) => holds(key(), scope),
    reaches: (machine) => reaches(key(), machine, declared),
    reachable: () => reachable(key(), declared),
  };
}

/** What a key is to do, and where. */
interface Intent {
  key_id: KeyId;
  machine_id: MachineId;
}

/** Whether the key of this id, as it is now, may do what needs a scope. */
function may(state: State, scope: Scope, { key_id, machine_id }: Intent): boolean {
  const key = goodKey(state, key_id);
  return key !== undefined && holds(key, scope) && reaches(key, machine_id, state);
}

/** Whether the key behind a queued command or a schedule may still run it. */
export function mayRun(state: State) {
  return ({ requested_by, machine_id }: { requested_by: KeyId; machine_id: MachineId }): boolean =>
    may(state, 'commands:execute', { key_id: requested_by, machine_id });
}

/** Calls `look` after every change of a key or machine, and when the key expires. The result stops that. */
export function watchRights(state: State, key_id: KeyId, look: () => void): () => void {
  let cancel = (): void => {};
  const awaitExpiry = (): void => {
    cancel();
    const left = endOf(keyOf(state, key_id) ?? localKey) - now();
    // A look after the end finds the key expired by itself.
    if (left > 0 && Number.isFinite(left)) cancel = after(left, again);
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
      // Where the machine itself was removed, its sessions end for everybody.
      if (state.machines.has(intent.machine_id) && !may(state, 'sessions:attach', intent)) end();
    };
    const stop = watchRights(state, intent.key_id, look);
    look();
    return stop;
  };
}

/** What a key may at this moment, for webhooks that act on its behalf; undefined once it is revoked or expired. */
export function rightsIn(state: State) {
  return (id: KeyId, declared: Declared = state) => {
    const key = goodKey(declared, id);
    return (
      key && {
        may: (scope: Scope) => holds(key, scope),
        // An event that names no machine is reached by no key that is limited to some.
        reaches: (machine: string) => reaches(key, machine as MachineId, declared),
        within: (other: KeyId) => {
          const outer = goodKey(declared, other);
          return outer !== undefined && within(key, outer);
        },
      }
    );
  };
}
