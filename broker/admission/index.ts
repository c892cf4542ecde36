// The way of every request to its handler, whatever carries it: who, may they, does it exist, is it well-formed.
import { allRoutes, type Caller, type Handlers, type Input } from '../../shared/api/index.ts';
import type { MachineId, Route } from '../../shared/api/route.ts';
import { AppError } from '../../shared/errors.ts';
import { holds, localKey, reachable, reaches } from '../keys.ts';
import type { Key, State } from '../state/index.ts';
import {
  type AccessRooms,
  type Asker,
  authenticate,
  checkIds,
  implyMachine,
  judgeAgain,
  requireScope,
} from './access.ts';
import { type RawInput, type Reader, readerOf } from './input.ts';
import { type About, type Recording, tellingOf, unrecorded, type Who } from './recording.ts';
import { replayed } from './replay.ts';

export type { Asker, RawInput };

/** The entrance of one route. */
export interface Entrance<I> {
  /** Key and scope, before anything else is looked at. Throws unauthorized or forbidden. */
  knock(asker: Asker, requestId: string): Visit<I>;
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
    knock(asker, requestId) {
      const key = route.access === 'everybody' ? localKey : authenticate(asker, rooms.keys);
      const who = { request_id: requestId, address: asker.address, key_id: key.id, key_name: key.name };
      const visit = visitOf({ route, reader, action }, who, key, rooms);
      try {
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

function visitOf<R extends Route>(
  { route, reader, action }: Known<R>,
  who: Who,
  key: Key,
  rooms: AccessRooms,
): Visit<Input<R>> {
  const open = route.access === 'everybody';
  let about: About = { machines: [], what: {} };
  let answer: Headers | undefined;
  const recording = changes(route)
    ? rooms.recorder.begin(action, who, () => told(about, answer))
    : unrecorded;
  const look = (raw: RawInput): void => {
    if (recording !== unrecorded) about = aboutOf(reader, raw, rooms.lookups);
  };
  // The schemas of the route are what Input is derived from.
  const parse = (raw: RawInput): Input<R> => reader.parse(raw) as Input<R>;
  const judge = (raw: RawInput): Key => {
    // By its id: a new secret ends nothing that was let in with the one before.
    const current = rooms.keys.current(key.id);
    requireScope(current, route);
    checkIds(reader, raw, current, rooms);
    return current;
  };
  return {
    identify(raw) {
      look(raw);
      if (!open) checkIds(reader, raw, key, rooms);
    },
    admit(raw, { gone, lasts }) {
      look(raw);
      const current = changes(route) ? judge(raw) : key;
      if (route.impliesMachine) {
        implyMachine(raw, current, rooms);
        look(raw);
      }
      const input = parse(raw);
      const again = (): void => void judge(raw);
      const leave = lasts && !open ? judgeAgain(current, rooms.state, again, ender(route, gone)) : () => {};
      const caller = callerOf(current, who, gone.signal, recording, rooms.state);
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
function aboutOf(reader: Reader, raw: RawInput, lookups: AccessRooms['lookups']): About {
  const subjects = reader.subjects(raw);
  // Of the noun machine: its id, whether it names one or not.
  const named = subjects
    .filter(({ noun }) => noun === 'machine')
    .map(({ id }) => id.slice(0, 200) as MachineId);
  const behind = subjects.flatMap(({ noun, id }) => lookups[noun](id)?.machines ?? []);
  const machine_ids = [...new Set(named)];
  const what = tellingOf(reader, raw);
  return {
    machines: [...new Set([...named, ...behind])],
    what: machine_ids.length > 1 ? { ...what, machine_ids } : what,
  };
}

function callerOf(key: Key, who: Who, signal: AbortSignal, { commit }: Recording, state: State): Caller {
  // As it is at that moment: whoever lasts may be limited meanwhile.
  const present = (): Key => state.keys.get(key.id) ?? key;
  return {
    ...who,
    key_id: key.id,
    signal,
    headers: new Headers(),
    may: (scope) => holds(present(), scope),
    reaches: (machine) => reaches(present(), machine, state),
    reachable: () => reachable(present(), state),
    commit,
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

/** Gets one of a noun by its id, as a repeat is answered with it. */
export function getterOf(
  handlers: Handlers,
  noun: string,
  operation = 'get',
): (id: string, caller: Caller) => unknown {
  return (id, caller) => handlerOf(handlers, noun, operation)({ [idParamOf(noun, operation)]: id }, caller);
}

/** What the route that gets one of a noun calls its id. */
function idParamOf(noun: string, operation: string): string {
  const get = allRoutes().find((one) => one.noun === noun && one.operation === operation);
  const [name] = Object.keys(get?.route.params ?? {});
  if (name === undefined) throw new Error(`no ${noun}.${operation} to answer a repeat with`);
  return name;
}
