// Authorizes requests: checks the key's scope and machines, and that all ids exist. Checks again after reading the
// body, in transactions, and during long requests.

import type { Route } from '../../shared/api/route.ts';
import { allRoutes, type Caller, type Handlers, type Input } from '../../shared/api/route-table.ts';
import type { IdNoun, KeyId, MachineId } from '../../shared/api/shared-schemas.ts';
import { AppError, fieldError } from '../../shared/errors.ts';
import type { Cluster } from '../cluster/index.ts';
import { notFound } from '../find-or-not-found.ts';
import type { Keys } from '../keys/index.ts';
import { currentKey, holds, isUnlimited, reaches, rightsOf, watchRights } from '../keys/rights.ts';
import { assertConfirmed, assertLogin } from '../logins/login-validity.ts';
import { type Declared, foundBy, type Key, type State } from '../state/index.ts';
import { auditOf, type Recorder, type Recording, type Who } from './audit-request.ts';
import type { Client } from './authenticate.ts';
import type { Recall } from './idempotency.ts';
import { type FoundId, type RawInput, RequestParser, type Subject } from './parse-api-request.ts';

/** The machines of an object. A key with machine limits may use the object if it may use one of these machines. */
type Found = {
  machines?: readonly MachineId[];
  /**
   * For a schedule with tags, the key with whose rights it runs. This key may use the schedule even if no machine has
   * the tags. Undefined for all other objects.
   */
  ownKey?: KeyId;
  /** Id of the data directory with the output files of an ended command; undefined with a single broker. */
  directory?: string | undefined;
};

/**
 * Finds objects of one kind by id. Returns undefined for an unknown id. `filters` is true for an id that filters a
 * list. Such an id may belong to a removed object.
 */
interface Lookup {
  /** Finds objects that are declared or in memory. */
  present?(id: string, declared: Declared, filters: boolean): Found | undefined;
  /** Finds objects in the history. Called if `present` does not know the id. */
  stored?(id: string, filters: boolean): Promise<Found | undefined>;
}

export type Lookups = Record<IdNoun, Lookup>;

export interface AccessServices {
  state: State;
  keys: Keys;
  lookups: Lookups;
  recorder: Recorder;
  /** The brokers that share the database; undefined with a single broker. */
  cluster?: Pick<Cluster, 'isAlive'> | undefined;
}

/** A route, with the parser and services that its requests are checked with. */
export interface Guard<R extends Route> {
  route: R;
  parser: RequestParser<R>;
  /** Name of the route in the route table, e.g. `machines.update`. */
  action: string;
  services: AccessServices;
}

/** The parsers of all routes. All servers share them, because finding the ids in a schema is slow. */
const parsers = new WeakMap<Route, Pick<Guard<Route>, 'parser' | 'action'>>();

export function guardOf<R extends Route>(route: R, services: AccessServices): Guard<R> {
  return { ...parserOf(route), route, services };
}

export function parserOf(route: Route): Pick<Guard<Route>, 'parser' | 'action'> {
  const known = parsers.get(route);
  if (known) return known;
  const place = allRoutes().find((one) => one.route === route);
  if (!place) throw new Error(`${route.method} ${route.path} is not in the route table`);
  const made = { parser: new RequestParser(route), action: `${place.noun}.${place.operation}` };
  parsers.set(route, made);
  return made;
}

export const nothing: RawInput = { params: {}, query: {}, headers: {}, body: undefined };

/** What perform() needs to run one request. */
export interface RequestWork<R extends Route, T> {
  /** Returns path, query, headers and body of the request. If there is a `readRest`, the body is not included. */
  read(): RawInput;
  /** Fires when the client disconnects or its key loses the rights. */
  gone: AbortController;
  /**
   * True if the request may last long. The rights of its key are then checked again at each change of keys or
   * machines.
   */
  lasts: boolean;
  /**
   * Reads the body, or the first message of a gRPC call, into `raw`. It is called only after the ids in path and
   * query have been checked.
   */
  readRest?: ((raw: RawInput) => Promise<void>) | undefined;
  act(input: Input<R>, caller: Caller): Promise<T>;
}

/** One request of an authenticated client. perform() checks and runs REST and gRPC requests alike. */
export class AuthorizedRequest<R extends Route> {
  readonly #guard: Guard<R>;
  readonly #client: Client;
  readonly #who: Who;
  readonly #headers = new Headers();
  /** The audit record; undefined for a GET request. */
  readonly #recording: Recording | undefined;
  #raw = nothing;
  #subjects: readonly Subject[] = [];
  #stored: Stored = new Map();
  #stopWatching = (): void => {};

  constructor(guard: Guard<R>, client: Client, requestId: string) {
    const { route, action, services } = guard;
    const { address, key, login_id } = client;
    this.#guard = guard;
    this.#client = client;
    this.#who = { request_id: requestId, address, key_id: key.id, key_name: key.name, login_id };
    const about = () => auditOf(this.#subjects, this.#raw, this.#headers);
    if (route.method !== 'GET') this.#recording = services.recorder.begin(action, this.#who, about);
  }

  /** Checks, runs and records the request. When the promise settles, the audit record has been written. */
  async perform<T>({ read, gone, lasts, readRest, act }: RequestWork<R, T>): Promise<T> {
    try {
      if (this.#client.quota?.refusal) throw this.#client.quota.refusal;
      // First checks only the login and the scope of the key, before any part of the request is read.
      await this.#lookUp(nothing);
      const raw = read();
      await this.#lookUp(raw);
      if (readRest) {
        await readRest(raw);
        await this.#lookUp(raw);
      }
      // Nothing may be awaited between this check of the rights and act(), because the rights could change meanwhile.
      const { input, caller } = this.admit(raw, gone, lasts);
      const result = await act(input, caller);
      this.#stopWatching();
      await this.#recording?.settle();
      return result;
    } catch (error) {
      this.#stopWatching();
      const why: unknown = gone.signal.aborted ? gone.signal.reason : error;
      await this.#recording?.settle(why);
      throw why;
    }
  }

  /**
   * Checks the login, the scope, and all ids that have been read so far (those in the body once it is read). Throws
   * forbidden if the key may not use an id. Otherwise throws …_not_found if an id does not exist. After these checks,
   * throws confirmation_required if the route needs a recent confirmation that the login lacks.
   */
  #identify(): void {
    const { services, route } = this.#guard;
    this.#subjects = this.#find(services.state);
    this.#check(this.#subjects, services.state);
    assertConfirmed(services.state, this.#who.login_id, route);
  }

  /**
   * Checks the ids with the key's present rights, and parses the request. If `lasts`, checks again at each change of
   * keys or machines.
   */
  admit(raw: RawInput, gone: AbortController, lasts: boolean): { input: Input<R>; caller: Caller } {
    const { route, services, parser } = this.#guard;
    const { key_id } = this.#who;
    this.#raw = raw;
    this.#identify();
    if (route.impliesMachine) {
      implyMachine(raw, currentKey(services.state, key_id), services.state);
      this.#identify();
    }
    const input = parser.parse(raw);
    if (lasts) this.#stopWatching = watchRights(services.state, key_id, () => this.#checkAgain(gone));
    const caller: Caller = {
      ...this.#who,
      secure: this.#client.secure ?? false,
      isForwarded: this.#client.isForwarded ?? false,
      secret_hash: this.#client.secret_hash,
      signal: gone.signal,
      headers: this.#headers,
      ...rightsOf(services.state, key_id),
      during: (change) => rightsOf(foundBy(change) ?? services.state, key_id),
      commit: this.#commit,
    };
    return { input, caller };
  }

  /** The body as it was sent, before parsing. */
  get body(): unknown {
    return this.#raw.body;
  }

  /** Checks and parses the request again with the complete body. */
  reparse(body: unknown): Input<R> {
    this.#raw = { ...this.#raw, body };
    this.#identify();
    return this.#guard.parser.parse(this.#raw);
  }

  /**
   * Looks the ids of the request up in the history, and checks them. If the check fails, repeats it after a refresh of
   * the state, because another broker may have created the object or changed the key a moment ago. Several waiting
   * requests share one refresh. The state of a single broker is always current.
   */
  async #lookUp(raw: RawInput): Promise<void> {
    const { parser, services } = this.#guard;
    const { lookups, state, cluster } = services;
    this.#raw = raw;
    for (let isCurrent = !cluster; ; isCurrent = true) {
      this.#stored = await lookUpStored(parser.ids(raw), lookups, state);
      try {
        this.#identify();
        return;
      } catch (error) {
        if (isCurrent) throw error;
        await state.refresh();
      }
    }
  }

  #find(declared: Declared): Subject[] {
    const { parser, services } = this.#guard;
    return subjectsOf(parser.ids(this.#raw), this.#stored, services.lookups, declared);
  }

  /**
   * Checks login, scope and ids against `declared`. The key is found by its id, so a request with an API key continues
   * even if the secret of the key is replaced meanwhile.
   */
  #check(subjects: readonly Subject[], declared: Declared): void {
    const key = currentKey(declared, this.#who.key_id);
    assertLogin(declared, this.#who.login_id);
    requireScope(key, this.#guard.route);
    assertAllowed(subjects, key, declared);
  }

  #checkAgain(gone: AbortController): void {
    const { route, services } = this.#guard;
    try {
      this.#check(this.#find(services.state), services.state);
    } catch (error) {
      // A waiting request has already created its object, such as a command. The request ends only if the key has lost
      // a right, and not if a machine was removed.
      const refused = error instanceof AppError && ['unauthorized', 'forbidden'].includes(error.code);
      if (!route.waits || refused) gone.abort(error);
    }
  }

  /** Adds the audit rows to the transaction of the change. In a state transaction, first checks the rights again. */
  readonly #commit: Caller['commit'] = (journal, made, machines, more) => {
    const found = foundBy(journal);
    if (found) {
      const subjects = this.#find(found);
      this.#check(subjects, found);
      this.#subjects = subjects;
    }
    this.#recording?.commit(journal, made, machines, more);
  };
}

/** True if a key has the scope that a route needs. */
export function mayCall(key: Key, { access }: Route): boolean {
  return access === 'everybody' || access === 'any key' || holds(key, access);
}

function requireScope(key: Key, route: Route): void {
  if (mayCall(key, route)) return;
  throw new AppError('forbidden', `this key lacks the scope ${route.access}: use a key that has it`, {
    required_scope: route.access,
  });
}

/** Objects that a request names and the history contains, by noun and id; undefined for an unknown id. */
type Stored = ReadonlyMap<string, Found | undefined>;

/**
 * Looks these ids up in the history, before the request runs. Later checks, for example inside a transaction, cannot
 * wait for the history.
 */
async function lookUpStored(ids: readonly FoundId[], lookups: Lookups, declared: Declared): Promise<Stored> {
  const found = new Map<string, Found | undefined>();
  for (const { noun, id, filters } of ids) {
    const { present, stored } = lookups[noun];
    if (stored) found.set(`${noun} ${id}`, present?.(id, declared, filters) ?? (await stored(id, filters)));
  }
  return found;
}

/** Returns each id of a request, together with the machines of the object that has this id. */
function subjectsOf(
  ids: readonly FoundId[],
  stored: Stored,
  lookups: Lookups,
  declared: Declared,
): Subject[] {
  return ids.map((found) => {
    const { noun, id, filters } = found;
    const names = lookups[noun].present?.(id, declared, filters) ?? stored.get(`${noun} ${id}`);
    // An unknown machine id is checked like a known one, so that the answer does not reveal which ids exist.
    const machines = noun === 'machine' ? [id as MachineId] : names?.machines;
    return { ...found, exists: names !== undefined, machines, ownKey: names?.ownKey };
  });
}

/**
 * Throws forbidden if a request names an object, and the key may use none of the object's machines. Otherwise throws
 * …_not_found if one of the objects does not exist.
 */
function assertAllowed(subjects: readonly Subject[], key: Key, declared: Declared): void {
  for (const { noun, id, machines, ownKey } of subjects) {
    if (isUnlimited(key) || key.id === ownKey) continue;
    if (machines && !machines.some((machine) => reaches(key, machine, declared))) {
      const of = noun === 'machine' ? 'machine' : `any machine of ${noun.replace('_', ' ')}`;
      throw new AppError('forbidden', `this key is not allowed to use ${of} ${id.slice(0, 200)}`, {
        [`${noun}_id`]: id,
      });
    }
  }
  const missing = subjects.find(({ exists }) => !exists);
  if (missing) throw notFound(missing.noun, missing.id);
}

/**
 * If only one machine exists, adds its id to a request without machine_id. Throws forbidden if the key may not use this
 * machine, and validation_failed if body and query name different machines.
 */
function implyMachine(raw: RawInput, key: Key, declared: Declared): void {
  const inQuery = raw.query.machine_id;
  const { body } = raw;
  const inBody =
    typeof body === 'object' && body !== null && 'machine_id' in body ? body.machine_id : undefined;
  if (inQuery !== undefined && inBody !== undefined && inQuery !== inBody) {
    throw fieldError('body', 'machine_id', 'differs from machine_id in the query: send only one of them');
  }
  const [only] = declared.machines.size === 1 ? declared.machines.values() : [];
  if (inQuery !== undefined || inBody !== undefined || only === undefined) return;
  if (!reaches(key, only.id, declared)) {
    throw new AppError(
      'forbidden',
      'a request without machine_id is for the broker’s only machine, which this key is not allowed to use: use another key',
    );
  }
  raw.query.machine_id = only.id;
}

export type Handler = (input: unknown, caller: Caller) => unknown;

export function handlerOf(handlers: Handlers, noun: string, operation: string): Handler {
  // The cast is safe: the type Handlers has the shape of the route table.
  const operations = handlers[noun as keyof Handlers] as Record<string, Handler>;
  const handler = operations[operation];
  if (!handler) throw new Error(`the route ${noun}.${operation} has no handler`);
  return handler;
}

/** Creates the Recall function of a route. It calls `operation` to get the present state of the created object. */
export function createRecall(
  handlers: Handlers,
  noun: string,
  operation: string,
  services: AccessServices,
): Recall {
  const { state, lookups } = services;
  const route = allRoutes().find((one) => one.noun === noun && one.operation === operation)?.route;
  const [param] = Object.keys(route?.params ?? {});
  const parser = route && guardOf(route, services).parser;
  return async (id, caller, first) => {
    if (!parser || param === undefined)
      throw new Error(
        `the route table has no route ${noun}.${operation} with an id in its path. This route must answer repeated requests (same Idempotency-Key): add it, or set "again" of the repeated route to another operation`,
      );
    const params = { [param]: id };
    const ids = parser.ids({ ...nothing, params });
    const subjects = subjectsOf(ids, await lookUpStored(ids, lookups, state), lookups, state);
    const machines = subjects.flatMap((subject) => subject.machines ?? []);
    if (first !== undefined && machines.every((machine) => caller.reaches(machine))) return first;
    assertAllowed(subjects, currentKey(state, caller.key_id), state);
    return handlerOf(handlers, noun, operation)(params, caller);
  };
}
