// The way of every request to its handler, whatever carries it: who, may they, does it exist, is it well-formed.
import { allRoutes, type Caller, type Handlers, type Input } from '../../shared/api/index.ts';
import type { Route } from '../../shared/api/route.ts';
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
import { type RawInput, readerOf } from './input.ts';

export type { Asker, RawInput };

/** The entrance of one route. */
export interface Entrance<I> {
  /** Key and scope, before anything else is looked at. Throws unauthorized or forbidden. */
  knock(asker: Asker): Visit<I>;
}

/** One request that has shown a good key. */
export interface Visit<I> {
  /** Every id, those of a body only if it is there already. Throws forbidden, then …_not_found. */
  identify(raw: RawInput): void;
  /**
   * All of it once more, for a body may take its time, and then the schemas. With `lasts` the key is judged again until
   * the result is left, and `gone` fires when it may no longer.
   */
  admit(raw: RawInput, request: { id: string; gone: AbortController; lasts: boolean }): Admitted<I>;
  /** A body that came late, parsed as the first one was. */
  reparse(raw: RawInput): I;
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
  // The schemas of the route are what Input is derived from.
  const parse = (raw: RawInput): Input<R> => reader.parse(raw) as Input<R>;
  const open = route.access === 'everybody';
  return {
    knock(asker) {
      const knock = (): Key => {
        const key = authenticate(asker, rooms.keys);
        requireScope(key, route);
        return key;
      };
      const key = open ? undefined : knock();
      return {
        identify(raw) {
          if (key) checkIds(reader, raw, key, rooms);
        },
        admit(raw, { id, gone, lasts }) {
          const judge = (): Key => {
            const current = knock();
            checkIds(reader, raw, current, rooms);
            return current;
          };
          const current = key && route.method !== 'GET' ? judge() : (key ?? localKey);
          if (route.impliesMachine) implyMachine(raw, current, rooms);
          const input = parse(raw);
          const leave = key && lasts ? judgeAgain(current, rooms.state, judge, ender(route, gone)) : () => {};
          return { input, caller: callerOf(current, asker, { id, signal: gone.signal }, rooms.state), leave };
        },
        reparse: parse,
      };
    },
  };
}

function callerOf(
  key: Key,
  { address }: Asker,
  { id, signal }: { id: string; signal: AbortSignal },
  state: State,
): Caller {
  return {
    key_id: key.id,
    key_name: key.name,
    request_id: id,
    address,
    signal,
    headers: new Headers(),
    may: (scope) => holds(key, scope),
    reaches: (machine) => reaches(key, machine, state),
    reachable: () => reachable(key, state),
    made: () => {},
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
