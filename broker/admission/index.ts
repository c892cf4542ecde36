// The way of every request to its handler, whatever carries it: who, may they, does it exist, is it well-formed.
import { allRoutes, type Caller, type Handlers, type Input } from '../../shared/api/index.ts';
import type { MachineId, Route } from '../../shared/api/route.ts';
import { AppError } from '../../shared/errors.ts';
import { currentKey, localKey, rightsOf } from '../keys/rights.ts';
import { type Declared, foundBy, type Key, type State } from '../state/index.ts';
import {
  type AccessRooms,
  implyMachine,
  judgeAgain,
  judgeSubjects,
  requireScope,
  type Subject,
  subjectsOf,
  type Visitor,
} from './access.ts';
import { type RawInput, type Reader, readerOf } from './input.ts';
import { type About, tellingOf, unrecorded, type Who } from './recording.ts';
import { type Made, replayed } from './replay.ts';

export type { RawInput };

/** The entrance of one route. */
export interface Entrance<I> {
  /** Key, rate and scope, before anything else is looked at. Throws unauthorized, rate_limited or forbidden. */
  knock(visitor: Visitor, requestId: string): Visit<I>;
}

/** One request that has shown a good key. */
export interface Visit<I> {
  /** Every id, those of a body only if it is there already. Throws forbidden, then …_not_found. */
  identify(raw: RawInput): void;
  /**
   * All of it once more, for a body may take its time, and then the schemas. With `lasts` the key is judged again until
   * the result is left, and `gone` fires when it may no longer.
   */
  admit(raw: RawInput, request: { gone: AbortController; lasts: boolean }): Admitted<I>;
  /** A body that came late, parsed as the first one was. */
  reparse(raw: RawInput): I;
  /** The request is over, or has failed: what it did is on record when this resolves. Never rejects. */
  settle(error?: unknown): Promise<void>;
}

/** A request that may do what it asks for. */
export interface Admitted<I> {
  input: I;
  caller: Caller;
  /** No longer judged. */
  leave(): void;
}

/** Makes the entrance of a route. */
export function entranceOf<R extends Route>(route: R, rooms: AccessRooms): Entrance<Input<R>> {
  const reader = readerOf(route);
  const action = actionOf(route);
  return {
    knock({ address, key: shown, quota }, requestId) {
      const key = route.access === 'everybody' ? localKey : rooms.keys.admit(shown, address);
      const who = { request_id: requestId, address, key_id: key.id, key_name: key.name };
      const visit = visitOf({ route, reader, action }, who, rooms);
      try {
        if (quota?.refusal) throw quota.refusal;
        requireScope(key, route);
      } catch (error) {
        void visit.settle(error);
        throw error;
      }
      return visit;
    },
  };
}

/** A route, and what is known of it beforehand. */
interface Known<R> {
  route: R;
  reader: Reader;
  action: string;
}

const nothing: RawInput = { params: {}, query: {}, headers: {}, body: undefined };

function visitOf<R extends Route>(
  { route, reader, action }: Known<R>,
  who: Who,
  rooms: AccessRooms,
): Visit<Input<R>> {
  const { state, lookups, recorder } = rooms;
  const open = route.access === 'everybody';
  let asked = nothing;
  let subjects: Subject[] = [];
  let answer: Headers | undefined;
  const recording = changes(route)
    ? recorder.begin(action, who, () => told(aboutOf(subjects, asked), answer))
    : unrecorded;
  const find = (raw: RawInput, declared: Declared): Subject[] =>
    subjectsOf(reader.ids(raw), lookups, declared);
  const look = (raw: RawInput): void => {
    asked = raw;
    subjects = find(raw, state);
  };
  // By its id: a new secret ends nothing that was let in with the one before.
  const judge = (named: readonly Subject[], declared: Declared): Key => {
    const key = currentKey(declared, who.key_id);
    requireScope(key, route);
    judgeSubjects(named, key, declared);
    return key;
  };
  const commit: Caller['commit'] = (journal, ...names) => {
    const found = foundBy(journal);
    if (found) {
      const named = find(asked, found);
      judge(named, found);
      subjects = named;
    }
    recording.commit(journal, ...names);
  };
  // The schemas of the route are what Input is derived from.
  const parse = (raw: RawInput): Input<R> => reader.parse(raw) as Input<R>;
  return {
    identify(raw) {
      look(raw);
      if (!open) judge(subjects, state);
    },
    admit(raw, { gone, lasts }) {
      if (changes(route)) {
        look(raw);
        judge(subjects, state);
      }
      const key = currentKey(state, who.key_id);
      if (route.impliesMachine) {
        implyMachine(raw, key, state);
        look(raw);
      }
      const input = parse(raw);
      const again = (): void => void judge(find(raw, state), state);
      const leave = lasts && !open ? judgeAgain(key, state, again, ender(route, gone)) : () => {};
      const caller = { ...callerOf(who, gone.signal, state), commit };
      answer = caller.headers;
      return { input, caller, leave };
    },
    reparse(raw) {
      look(raw);
      return parse(raw);
    },
    settle: recording.settle,
  };
}

/** Whether it does anything but read. */
function changes({ method }: Route): boolean {
  return method !== 'GET';
}

/** Its place in the table: `machines.update`. */
function actionOf(route: Route): string {
  const place = allRoutes().find((one) => one.route === route);
  if (!place) throw new Error(`${route.method} ${route.path} is not in the table`);
  return `${place.noun}.${place.operation}`;
}

/** A repeat did nothing. */
function told({ machines, what }: About, answer: Headers | undefined): About {
  return { machines, what: answer?.has(replayed) ? { ...what, replayed: true } : what };
}

/** The machines that a request is about, and what is told of it. */
function aboutOf(subjects: readonly Subject[], raw: RawInput): About {
  const single = subjects.filter(({ listed }) => !listed);
  const groups = single.flatMap(({ machines }) => (machines ? [machines.map((id) => id.slice(0, 200))] : []));
  // Cut as they may be, they are still the ids that were named.
  const machines = [...new Set(groups.flat())] as MachineId[];
  const what = tellingOf(single, raw);
  // What was done between several machines is told to whoever reaches them all.
  const between = groups.length > 1 && machines.length > 1;
  return { machines, what: between ? { ...what, machine_ids: machines } : what };
}

function callerOf(who: Who, signal: AbortSignal, state: State): Omit<Caller, 'commit'> {
  return {
    ...who,
    signal,
    headers: new Headers(),
    // As it is at that moment: whoever lasts may be limited meanwhile.
    ...rightsOf(state, who.key_id),
    during: (change) => rightsOf(foundBy(change) ?? state, who.key_id),
  };
}

/** What was made stays, and is told of, though its machine has gone meanwhile; who may not know ends the wait. */
function ender({ waits }: Route, gone: AbortController): (reason: unknown) => void {
  return (reason) => {
    const refused = reason instanceof AppError && ['unauthorized', 'forbidden'].includes(reason.code);
    if (!waits || refused) gone.abort(reason);
  };
}

export type Handler = (input: unknown, caller: Caller) => unknown;

export function handlerOf(handlers: Handlers, noun: string, operation: string): Handler {
  // The table of handlers has the shape of the table of routes: the compiler saw to that.
  const operations = handlers[noun as keyof Handlers] as Record<string, Handler>;
  const handler = operations[operation];
  if (!handler) throw new Error(`no handler for ${noun}.${operation}`);
  return handler;
}

/** What a repeat is answered with: how what was made is now, to whoever reaches it still. */
export function madeBy(
  handlers: Handlers,
  { noun, operation = 'get' }: { noun: string; operation?: string | undefined },
  { state, lookups }: AccessRooms,
): Made {
  const route = allRoutes().find((one) => one.noun === noun && one.operation === operation)?.route;
  const reader = route && readerOf(route);
  const params = (id: string): RawInput['params'] => {
    const [name] = Object.keys(route?.params ?? {});
    if (name === undefined) throw new Error(`no ${noun}.${operation} to answer a repeat with`);
    return { [name]: id };
  };
  const subjects = (id: string): Subject[] =>
    subjectsOf(reader?.ids({ ...nothing, params: params(id) }) ?? [], lookups, state);
  return {
    get(id, caller) {
      judgeSubjects(subjects(id), currentKey(state, caller.key_id), state);
      return handlerOf(handlers, noun, operation)(params(id), caller);
    },
    reachedBy: (caller, id) =>
      subjects(id).every(({ machines = [] }) => machines.every((machine) => caller.reaches(machine))),
  };
}
