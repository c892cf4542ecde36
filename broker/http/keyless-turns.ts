// When requests begin: those with a good key at once, the others by turns.
import type { IncomingMessage, ServerResponse } from 'node:http';
import type { Duplex } from 'node:stream';

export interface Beginner {
  begin(request: IncomingMessage, response: ServerResponse): void;
  /** The last answer of each connection. */
  answering: WeakMap<Duplex, ServerResponse>;
}

/** Each takes 0.1 ms. */
export const keylessPerTurn = 16;

/**
 * Begins requests. Of those without a good key so many in each turn of the event loop, and on each connection one after
 * another: however many come, a request with a key waits for a few of them only.
 */
export function beginner(
  handle: (request: IncomingMessage, response: ServerResponse) => Promise<void>,
  hasKey: (request: IncomingMessage) => boolean,
): Beginner {
  const answering = new WeakMap<Duplex, ServerResponse>();
  const waiting: (() => void)[] = [];
  let due = false;
  const schedule = (): void => {
    if (due || waiting.length === 0) return;
    due = true;
    setImmediate(turn);
  };
  const turn = (): void => {
    due = false;
    for (const begin of waiting.splice(0, keylessPerTurn)) begin();
    schedule();
  };
  const take = (request: IncomingMessage, response: ServerResponse): void => {
    const before = answering.get(request.socket);
    answering.set(request.socket, response);
    const begin = (): void => {
      if (!request.socket.destroyed) void handle(request, response);
    };
    const queue = (): void => {
      waiting.push(begin);
      schedule();
    };
    if (hasKey(request)) begin();
    else if (before && !before.closed) before.once('close', queue);
    else queue();
  };
  return { begin: take, answering };
}
