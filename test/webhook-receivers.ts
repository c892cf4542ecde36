// Receivers of webhooks: HTTP servers on loopback that answer as the test chooses, and record the requests.
import { EventEmitter, once } from 'node:events';
import { createServer, type IncomingHttpHeaders, type IncomingMessage, type ServerResponse } from 'node:http';
import type { Events } from '../broker/event-log.ts';
import type { History } from '../broker/history/history-database.ts';
import type { Tuning } from '../broker/start/index.ts';
import type { EventType } from '../shared/api/events.ts';
import { listenOnLoopback } from './listen-on-loopback.ts';
import { startFarhand, type TestSystem } from './start-farhand.ts';

export interface Received {
  headers: IncomingHttpHeaders;
  body: Buffer;
  /** Time of arrival, in milliseconds of performance.now(). */
  at: number;
}

export interface Receiver {
  url: string;
  port: number;
  got: Received[];
  /** Returns the types of the received events, in order. */
  types(): string[];
  /** Resolves when this many requests have arrived. */
  heard(count: number): Promise<Received[]>;
}

type Answer = (response: ServerResponse, request: IncomingMessage, count: number) => void;

/** Starts a receiver, which answers 200 by default. Closes it at the end of the test. */
export async function startReceiver(answer: Answer = (response) => response.end()): Promise<Receiver> {
  const got: Received[] = [];
  const arrived = new EventEmitter();
  const server = createServer((request, response) => {
    const chunks: Buffer[] = [];
    request.on('data', (chunk: Buffer) => chunks.push(chunk));
    request.on('end', () => {
      got.push({ headers: request.headers, body: Buffer.concat(chunks), at: performance.now() });
      answer(response, request, got.length);
      arrived.emit('one');
    });
  });
  const port = await listenOnLoopback(server);
  return {
    url: `http://127.0.0.1:${port}/hook?x=1`,
    port,
    got,
    types: () => got.map(({ headers }) => String(headers['x-service-event'])),
    async heard(count) {
      while (got.length < count) await once(arrived, 'one');
      return got;
    },
  };
}

/** Answers with these statuses one after another, then always with the last one. */
export function answering(...statuses: number[]): Answer {
  return (response, _request, count) => {
    response.statusCode = statuses[Math.min(count, statuses.length) - 1] ?? 200;
    response.end(`answer ${count}`);
  };
}

const machine = { id: 'mach_of_no_agent_at_all00', name: 'web 🚀\u2028one' };

export interface WebhookSystem extends TestSystem {
  /** Records an event. Resolves when it is on disk. */
  happen(
    type: EventType,
    data?: Record<string, unknown>,
    about?: { id: string; name: string },
  ): Promise<void>;
  history: History;
  events: Events;
}

/** Starts a broker whose webhooks may call loopback, and are retried within milliseconds. */
export async function startWebhookSystem(
  options: { flags?: string[]; dataDir?: string; tuning?: Tuning } = {},
): Promise<WebhookSystem> {
  const stores: { history?: History; events?: Events } = {};
  const flags = [
    '--webhook-allow',
    '127.0.0.0/8',
    '--webhook-retry',
    '50ms,100ms,200ms',
    ...(options.flags ?? []),
  ];
  const system = await startFarhand({
    ...options,
    flags,
    tuning: { ...options.tuning, onStores: (given) => void Object.assign(stores, given) },
  });
  const { history, events } = stores as Required<typeof stores>;
  return {
    ...system,
    history,
    events,
    happen: (type, data = {}, about = machine) =>
      history.write((transaction) => events.emit(transaction, type, about, data)),
  };
}
