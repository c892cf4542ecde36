// Whether a request may do what it asks for: the key, its scope, its reach, and whether every id names something.
import type { IdNoun, MachineId, Route } from '../../shared/api/route.ts';
import { AppError, type Code } from '../../shared/errors.ts';
import { holds, type Keys, localKey, reaches, watchRights } from '../keys.ts';
import type { Key, State } from '../state/index.ts';
import type { RawInput, Reader } from './input.ts';
import type { Quota, Rates } from './rates.ts';
import type { Recorder } from './recording.ts';

/** For each noun with ids: whether one names something, and the machines behind it, of which a key must reach one. */
export type Lookups = Record<IdNoun, (id: string) => { machines?: readonly MachineId[] } | undefined>;

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

/** The key of whoever asks. Throws unauthorized. */
export function authenticate({ authorization, local, address }: Asker, keys: Keys): Key {
  if (local) return localKey;
  return keys.authenticate(bearer.exec(authorization)?.[1] ?? '', address);
}

/** The good key that `Bearer KEY` holds, if it holds one. */
export function keyIn(authorization: string, keys: Keys): Key | undefined {
  const presented = bearer.exec(authorization)?.[1];
  return presented === undefined ? undefined : keys.find(presented);
}

/** A request as it arrives is counted, once: against its key, or against its source where the key is wrong. */
export async function count(
  asker: Asker,
  { keys, rates }: { keys: Keys; rates: Rates },
): Promise<{ known: boolean; quota?: Quota | undefined }> {
  if (asker.local) return { known: true };
  // Who shows nothing tries nothing.
  if (asker.authorization === '') return { known: false };
  const key = keyIn(asker.authorization, keys);
  if (key) return { known: true, quota: await rates.spend(key.id) };
  await rates.strike(asker.address);
  return { known: false };
}

export function requireScope(key: Key, { access }: Route): void {
  if (access === 'everybody' || access === 'any key' || holds(key, access)) return;
  throw new AppError('forbidden', `this needs a key with the scope ${access}`, { required_scope: access });
}

/** First whether the key reaches every machine behind every id, then whether each id names something. */
export function checkIds(reader: Reader, raw: RawInput, key: Key, { state, lookups }: AccessRooms): void {
  const found = reader.ids(raw).map(({ noun, id }) => ({ noun, id, names: lookups[noun](id) }));
  for (const { noun, id, names } of found) {
    // A machine's id counts whether it names one or not: an outsider learns nothing.
    const machines = noun === 'machine' ? [id as MachineId] : names?.machines;
    if (machines && !machines.some((machine) => reaches(key, machine, state))) {
      throw new AppError('forbidden', 'this key does not reach that machine', { [`${noun}_id`]: id });
    }
  }
  const missing = found.find(({ names }) => names === undefined);
  if (missing) {
    const code: Code = `${missing.noun}_not_found`;
    throw new AppError(code, `no such ${missing.noun.replace('_', ' ')}`, {
      [`${missing.noun}_id`]: missing.id,
    });
  }
}

/**
 * For a route that may leave its machine out: names the only one there is, whose id an outsider does not learn.
 * Throws validation_failed when the query and the body name different ones.
 */
export function implyMachine(raw: RawInput, key: Key, { state }: AccessRooms): void {
  const inQuery = raw.query.machine_id;
  const { body } = raw;
  const inBody =
    typeof body === 'object' && body !== null && 'machine_id' in body ? body.machine_id : undefined;
  if (inQuery !== undefined && inBody !== undefined && inQuery !== inBody) {
    const issues = [{ path: 'machine_id', message: 'is another one in the query' }];
    throw new AppError('validation_failed', 'body: machine_id: is another one in the query', { issues });
  }
  const [only, ...more] = state.machines.keys();
  if (inQuery !== undefined || inBody !== undefined || only === undefined || more.length > 0) return;
  // Keys of that map are the ids of machines.
  if (!reaches(key, only as MachineId, state)) {
    throw new AppError('forbidden', 'this key does not reach the machine that is registered here');
  }
  raw.query.machine_id = only;
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
