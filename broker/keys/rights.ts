// Decides what each key may do, and on which machines. The decision is based on the committed state. During a change of
// the state, it is based on the state before this change.

import type { Scope } from '../../shared/api/route.ts';
import type { Rights } from '../../shared/api/route-table.ts';
import type { KeyId, LoginId, MachineId } from '../../shared/api/shared-schemas.ts';
import { after, iso, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import type { Declared, Key, Schedule, State } from '../state/index.ts';

type Keys = Pick<Declared, 'keys'>;
type Machines = Pick<Declared, 'machines'>;

/** The key of clients that use the broker's socket file, which only the broker's user can open. */
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

/** Errors for clients that have sent the right secret. All other clients get one general message. */
const expired = new AppError('unauthorized', 'this API key has expired: use another, or have it extended');
const revoked = new AppError('unauthorized', 'this API key was revoked: use another one');

/**
 * Returns the time when a key expires, in milliseconds since 1970. ISO texts are not compared, because texts of
 * years after 9999 sort before those of earlier years.
 */
export function endOf({ expires_at }: Pick<Key, 'expires_at'>): number {
  return expires_at === null ? Number.POSITIVE_INFINITY : Date.parse(expires_at);
}

export function hasExpired(key: Key): boolean {
  return endOf(key) <= now();
}

function keyOf({ keys }: Keys, id: KeyId): Key | undefined {
  return id === localKey.id ? localKey : keys.get(id);
}

/** The current version of a key. Throws unauthorized if it is revoked or expired. */
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

/** True if a key has a scope; the scope admin includes all others. */
export function holds(key: Key, scope: Scope): boolean {
  return key.scopes.includes('admin') || key.scopes.includes(scope);
}

/** Selects the machines of a key or an alert rule, by id or by tag. If both fields are null, selects all machines. */
export type Limits = Pick<Key, 'machine_ids' | 'tags'>;

export function isUnlimited({ machine_ids, tags }: Limits): boolean {
  return !machine_ids && !tags;
}

/**
 * Returns true if a key may use a machine, because its limits name the machine's id or one of its tags. A key
 * without limits may use all machines.
 */
export function reaches(key: Limits, machine: MachineId, { machines }: Machines): boolean {
  if (isUnlimited(key) || key.machine_ids?.includes(machine)) return true;
  const tags = machines.get(machine)?.tags ?? [];
  return key.tags?.some((tag) => tags.includes(tag)) ?? false;
}

/**
 * Cache of the machines that each limited key may use. Each change of a machine creates a new map of all machines. An
 * entry is outdated if its field `of` is an earlier map. A changed key is a new object, which has no entry.
 */
const reachableBy = new WeakMap<Key, { of: Machines['machines']; ids: readonly MachineId[] }>();

/**
 * Returns the machines that a key may use; undefined for a key without limits. Returns the same array until the key
 * or a machine changes, so that callers can compare references.
 */
function reachable(key: Key, { machines }: Machines): readonly MachineId[] | undefined {
  // A key without limits may also read the records of removed machines.
  if (isUnlimited(key)) return undefined;
  const known = reachableBy.get(key);
  if (known?.of === machines) return known.ids;
  const tagged = key.tags
    ? [...machines.values()].filter(({ tags }) => key.tags?.some((tag) => tags.includes(tag)))
    : [];
  const ids = [...new Set([...(key.machine_ids ?? []), ...tagged.map(({ id }) => id)])];
  reachableBy.set(key, { of: machines, ids });
  return ids;
}

/**
 * True if `outer` may use every machine that `key` may use, even after machines have got or lost tags. So a limited
 * `outer` must have all ids and all tags of `key`.
 */
export function within(key: Key, outer: Key): boolean {
  if (isUnlimited(outer) || isUnlimited(key)) return isUnlimited(outer);
  const machines = key.machine_ids?.every((id) => outer.machine_ids?.includes(id)) ?? true;
  const tags = key.tags?.every((tag) => outer.tags?.includes(tag)) ?? true;
  return machines && tags;
}

/**
 * True if a key may use every machine that `limits` selects. Any machine can get a tag later, so a limited key must
 * itself have each tag of `limits`.
 */
export function mayUseAll(key: Limits, limits: Limits, declared: Machines): boolean {
  if (isUnlimited(key) || isUnlimited(limits)) return isUnlimited(key);
  const machines = limits.machine_ids?.every((id) => reaches(key, id, declared)) ?? true;
  return machines && (limits.tags?.every((tag) => key.tags?.includes(tag)) ?? true);
}

/**
 * The rights of a key. Each call uses the key as it is at that moment, and throws unauthorized once it is revoked or
 * expired.
 */
export function rightsOf(declared: Keys & Machines, id: KeyId): Rights {
  const key = (): Key => currentKey(declared, id);
  return {
    may: (scope) => holds(key(), scope),
    reaches: (machine) => reaches(key(), machine, declared),
    reachable: () => reachable(key(), declared),
  };
}

/** A key that is to be used on a machine, directly or through a login. */
interface Intent {
  key_id: KeyId;
  login_id?: LoginId | undefined;
  machine_id: MachineId;
}

/** True if a key has the scope and may use the machine at this moment. */
function may(state: State, scope: Scope, { key_id, login_id, machine_id }: Intent): boolean {
  const key = goodKey(state, key_id);
  if (login_id !== undefined && !state.logins.has(login_id)) return false;
  return key !== undefined && holds(key, scope) && reaches(key, machine_id, state);
}

/** Returns a function that returns true if the key of a queued command or a schedule may still run its command. */
export function mayRun(state: State) {
  return ({ requested_by, machine_id }: { requested_by: KeyId; machine_id: MachineId }): boolean =>
    may(state, 'commands:execute', { key_id: requested_by, machine_id });
}

/**
 * Returns a function that returns true if the key of a schedule may still watch a path, and run the command when the
 * path changes.
 */
export function mayWatch(state: State) {
  return ({ requested_by, machine_id }: { requested_by: KeyId; machine_id: MachineId }): boolean =>
    mayRun(state)({ requested_by, machine_id }) &&
    may(state, 'files:read', { key_id: requested_by, machine_id });
}

/**
 * Returns the machines that a schedule runs on. If the schedule has tags, it runs on every machine that has all of
 * these tags and that its key may use. Otherwise, it runs on its one machine.
 */
export function machinesOfSchedule(
  schedule: Pick<Schedule, 'machine_id' | 'tags' | 'requested_by' | 'key_limits'>,
  declared: Keys & Machines,
): MachineId[] {
  const { machine_id, tags, requested_by, key_limits } = schedule;
  if (machine_id !== null) return [machine_id];
  // An empty list of tags would match every machine.
  if (!tags || tags.length === 0) return [];
  // After the key has expired or was revoked, the machines stay the same. At a due time nothing runs on them, but the
  // history gets a failed run for each of them, with the reason.
  const limits = keyOf(declared, requested_by) ?? key_limits;
  if (!limits) return [];
  const tagged = [...declared.machines.values()].filter((one) => tags.every((tag) => one.tags.includes(tag)));
  return tagged.filter(({ id }) => reaches(limits, id, declared)).map(({ id }) => id);
}

/**
 * Calls `look` after every change of the state, and when the key expires. Call the returned function to stop.
 */
export function watchRights(state: State, key_id: KeyId, look: () => void): () => void {
  let cancel = (): void => {};
  const awaitExpiry = (): void => {
    cancel();
    const left = endOf(keyOf(state, key_id) ?? localKey) - now();
    // No timer is needed for a key that has expired already, because callers also check the key themselves.
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
 * Returns a function that watches a key and, if the key is used through a login, this login. It calls `end` as soon as
 * the key may no longer attach to a machine's sessions, or the login has ended. It returns a function that stops the
 * watching.
 */
export function whileAttachable(state: State) {
  return (intent: Intent, end: () => void): (() => void) => {
    const look = (): void => {
      // If the machine was removed, its sessions end for all clients, so this client needs no check.
      if (state.machines.has(intent.machine_id) && !may(state, 'sessions:attach', intent)) end();
    };
    const stop = watchRights(state, intent.key_id, look);
    look();
    return stop;
  };
}

/**
 * Returns a function that finds the present rights of a key, for the webhooks and alert channels that act for the key.
 * It returns undefined if the key is revoked or expired.
 */
export function rightsIn(state: State) {
  return (id: KeyId, declared: Declared = state) => {
    const key = goodKey(declared, id);
    return (
      key && {
        may: (scope: Scope) => holds(key, scope),
        // For an event about no machine, the caller passes an empty id. The result is then true only for a key without
        // limits.
        reaches: (machine: string) => reaches(key, machine as MachineId, declared),
        within: (other: KeyId) => {
          const outer = goodKey(declared, other);
          return outer !== undefined && within(key, outer);
        },
      }
    );
  };
}
