// Whether a request may do what it asks for: the key, its scope, its reach, and whether every id names something.
import type { IdNoun, MachineId, Route } from '../../shared/api/route.ts';
import { AppError, type Code } from '../../shared/errors.ts';
import type { Keys } from '../keys/index.ts';
import { hasExpired, holds, localKey, reaches, watchRights } from '../keys/rights.ts';
import type { Declared, Key, State } from '../state/index.ts';
import type { FoundId, RawInput } from './input.ts';
import type { Quota, Rates } from './rates.ts';
import type { Recorder } from './recording.ts';

/**
 * For each noun with ids: whether one names something, and the machines behind it, of which a key must reach one. As a
 * filter one may also name what has been removed and left its history.
 */
export type Lookups = Record<
  IdNoun,
  (id: string, declared: Declared, filters: boolean) => { machines?: readonly MachineId[] } | undefined
>;

export interface AccessRooms {
  state: State;
  keys: Keys;
  lookups: Lookups;
  recorder: Recorder;
}

const bearer = /^Bearer ([\x21-\x7e]+)$/i;

/** Who asks, as far as it has been said. */
export interface Asker {
  /** `Bearer KEY`, or empty. */
  authorization: string;
  /** Over the broker's own socket file, whose callers need no key. */
  local: boolean;
  /** Where the request comes from, as far as proxies that we trust tell; empty over the socket file. */
  address: string;
}

/** Whoever asks, once the request is counted. */
export interface Visitor {
  address: string;
  /** The key that was shown, looked up once; it may have expired. Undefined: none, or a wrong one. */
  key: Key | undefined;
  /** Of a key that is limited: what it has left. */
  quota?: Quota | undefined;
}

/** The key that `Bearer KEY` holds, also one that has expired. */
function keyIn(authorization: string, keys: Keys): Key | undefined {
  const presented = bearer.exec(authorization)?.[1];
  return presented === undefined ? undefined : keys.find(presented);
}

/** Whether `Bearer KEY` holds a good one. */
export function holdsKey(authorization: string, keys: Keys): boolean {
  const key = keyIn(authorization, keys);
  return key !== undefined && !hasExpired(key);
}

/**
 * A request as it arrives is counted, once: against its key, or against its source where the key is wrong. Throws
 * rate_limited for a source; a key that has spent too much is refused when it knocks.
 */
export async function count(
  { authorization, local, address }: Asker,
  { keys, rates }: { keys: Keys; rates: Rates },
): Promise<Visitor> {
  if (local) return { address, key: localKey };
  // Who shows nothing tries nothing.
  if (authorization === '') return { address, key: undefined };
  const key = keyIn(authorization, keys);
  if (key && !hasExpired(key)) return { address, key, quota: await rates.spend(key.id) };
  await rates.strike(address);
  return { address, key };
}

export function requireScope(key: Key, { access }: Route): void {
  if (access === 'everybody' || access === 'any key' || holds(key, access)) return;
  throw new AppError('forbidden', `this needs a key with the scope ${access}`, { required_scope: access });
}

/** An id of a request, whether it names something, and the machines that are named by it or behind it. */
export interface Subject extends FoundId {
  named: boolean;
  machines?: readonly MachineId[] | undefined;
}

/** Everything that a request names, as it is declared. */
export function subjectsOf(ids: readonly FoundId[], lookups: Lookups, declared: Declared): Subject[] {
  return ids.map((found) => {
    const names = lookups[found.noun](found.id, declared, found.filters);
    // A machine's id counts whether it names one or not: an outsider learns nothing.
    const machines = found.noun === 'machine' ? [found.id as MachineId] : names?.machines;
    return { ...found, named: names !== undefined, machines };
  });
}

/** First whether the key reaches a machine of every id, then whether each id names something. */
export function judgeSubjects(subjects: readonly Subject[], key: Key, declared: Declared): void {
  for (const { noun, id, machines } of subjects) {
    if (machines && !machines.some((machine) => reaches(key, machine, declared))) {
      throw new AppError('forbidden', 'this key does not reach that machine', { [`${noun}_id`]: id });
    }
  }
  const missing = subjects.find(({ named }) => !named);
  if (!missing) return;
  const { noun, id } = missing;
  const code: Code = `${noun}_not_found`;
  throw new AppError(code, `no such ${noun.replace('_', ' ')}`, { [`${noun}_id`]: id });
}

/**
 * For a route that may leave its machine out: names the only one there is. Throws forbidden to a key that does not reach
 * it, before anything else is looked at, and validation_failed when the query and the body name different ones.
 */
export function implyMachine(raw: RawInput, key: Key, declared: Declared): void {
  const inQuery = raw.query.machine_id;
  const { body } = raw;
  const inBody =
    typeof body === 'object' && body !== null && 'machine_id' in body ? body.machine_id : undefined;
  if (inQuery !== undefined && inBody !== undefined && inQuery !== inBody) {
    const issues = [{ path: 'machine_id', message: 'is another one in the query' }];
    throw new AppError('validation_failed', 'body: machine_id: is another one in the query', { issues });
  }
  const [only, ...more] = [...declared.machines.values()];
  if (inQuery !== undefined || inBody !== undefined || only === undefined || more.length > 0) return;
  if (!reaches(key, only.id, declared)) {
    throw new AppError('forbidden', 'this key does not reach the machine that is registered here');
  }
  raw.query.machine_id = only.id;
}

/** Judges again whenever the key may have lost a right; what fails goes to `end`. The result stops that. */
export function judgeAgain(
  key: Key,
  state: State,
  judge: () => void,
  end: (reason: unknown) => void,
): () => void {
  return watchRights(state, key.id, () => {
    try {
      judge();
    } catch (error) {
      end(error);
    }
  });
}
