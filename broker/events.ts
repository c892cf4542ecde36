// What happened: typed events, committed with the change that caused them, kept in history.

import { type EventType, readableTypes, events as routes } from '../shared/api/events.ts';
import type { Api, Caller, Handlers, Input, Journal, SentEvent } from '../shared/api/index.ts';
import { iso, now } from '../shared/clock.ts';
import { AppError } from '../shared/errors.ts';
import { newId } from '../shared/ids.ts';
import { Wake } from '../shared/pace.ts';
import { type Entry, type History, type HistoryTransaction, jsonIn, type Row, textIn } from './history.ts';
import { openNumbers, renumbered, rowsSince } from './numbers.ts';
import { allOf, type Condition, filtersOf, pageOfRows, reachableOnly } from './paging.ts';

export interface Event {
  id: string;
  type: EventType;
  /** ISO 8601. */
  timestamp: string;
  data: Record<string, unknown>;
}

interface EventEntry extends Entry {
  kind: 'event';
  event: Event;
  machine_id: string | null;
}

export interface Events {
  handlers: Handlers['events'];
  /** Records an event with the transaction, or outbox, that causes it. */
  emit(
    journal: Journal,
    type: EventType,
    machine: { id: string; name: string } | undefined,
    data: Event['data'],
  ): void;
  /** Calls back inside the very transaction that records an event: what it writes is committed with it. */
  within(recorder: (event: Event, machineId: string | null, transaction: HistoryTransaction) => void): void;
  /** Calls back after an event is on disk; the result stops it. */
  listen(listener: (event: Event) => void): () => void;
  /** Ends whoever follows. */
  stop(): void;
}

type FollowInput = Input<Api['events']['stream']>;

const tables = [
  `CREATE TABLE events (
    id TEXT NOT NULL UNIQUE, type TEXT NOT NULL, created_at INTEGER NOT NULL, machine_id TEXT, data TEXT NOT NULL
  );
  CREATE INDEX events_by_time ON events (created_at);
  CREATE INDEX events_by_machine ON events (machine_id, created_at)`,
  // Numbers that are never used again, for those who follow: a rowid begins anew when the table has been empty.
  `ALTER TABLE events RENAME TO events_before;
  CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, type TEXT NOT NULL, created_at INTEGER NOT NULL,
    machine_id TEXT, data TEXT NOT NULL
  );
  INSERT INTO events (id, type, created_at, machine_id, data)
    SELECT id, type, created_at, machine_id, data FROM events_before ORDER BY rowid;
  DROP TABLE events_before;
  CREATE INDEX events_by_time ON events (created_at);
  CREATE INDEX events_by_machine ON events (machine_id, created_at)`,
  // Each index, and the table of numbers, is a page more that every command writes.
  `ALTER TABLE events RENAME TO events_before;
  CREATE TABLE events (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, type TEXT NOT NULL, created_at INTEGER NOT NULL,
    machine_id TEXT, data TEXT NOT NULL
  );
  INSERT INTO events
    SELECT number, id, type, created_at, machine_id, data FROM ${renumbered('events_before', 'seq')};
  DROP TABLE events_before;
  CREATE INDEX events_by_machine ON events (machine_id)`,
];

/** Read at once by whoever follows: what a slow reader holds in memory. */
const batch = 100;

/** What machines or callers without end could fill the disk with; the oldest go, whatever their age. */
const mostRows = 1_000_000;

/** Opens the event room; events older than `keepMs` go. */
export function openEvents(history: History, keepMs: number, keepRows = mostRows): Events {
  history.migrate('events', tables);
  history.retain({ table: 'events', column: 'created_at', keepMs, keepRows, ordered: true });
  const numbers = openNumbers(history, 'events');
  const listeners = new Set<(event: Event) => void>();
  const recorders: Parameters<Events['within']>[0][] = [];
  const happened = new Wake();
  let stopped = false;

  history.onEntry('event', ({ event, machine_id }: EventEntry, transaction: HistoryTransaction) => {
    const at = Date.parse(event.timestamp);
    const { changes } = history
      .sql('INSERT INTO events VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING')
      .run(numbers.next(at), event.id, event.type, at, machine_id, JSON.stringify(event.data));
    if (changes === 0) return;
    for (const record of recorders) record(event, machine_id, transaction);
    transaction.committed(() => {
      for (const listener of listeners) listener(event);
      happened.wake();
    });
  });

  /** Where a follower begins: after an event that it may read, or after all there are. */
  function begin({ last_event_id }: FollowInput, caller: Caller): number {
    if (last_event_id === undefined) return numbers.last;
    const [where, values] = allOf([['id = ?', last_event_id], ...readableOnly(caller)]);
    const seq = history.sql(`SELECT seq FROM events WHERE ${where}`).get(...values)?.seq;
    if (seq !== undefined) return Number(seq);
    throw new AppError(
      'range_not_satisfiable',
      'no such event is kept: what came after it may be gone; list events, then follow without it',
      { last_event_id },
    );
  }

  function newestId(caller: Caller): string | undefined {
    const [where, values] = allOf(readableOnly(caller));
    const row = history.sql(`SELECT id FROM events WHERE ${where} ORDER BY seq DESC LIMIT 1`).get(...values);
    return row && textIn(row, 'id');
  }

  /** From the table and at the reader's own pace, so that a slow one costs nothing. */
  async function* follow(from: number, input: FollowInput, caller: Caller): AsyncGenerator<SentEvent<Event>> {
    for (let position = from; ; ) {
      const top = numbers.last;
      const [where, values] = allOf([
        ['seq > ?', position],
        ...readableOnly(caller),
        input.machine_id && ['machine_id = ?', input.machine_id],
        input.types && ['type IN (SELECT value FROM json_each(?))', JSON.stringify(input.types)],
      ]);
      const rows = history
        .sql(`SELECT * FROM events WHERE ${where} ORDER BY seq LIMIT ${batch}`)
        .all(...values);
      for (const row of rows) {
        caller.signal.throwIfAborted();
        const event = eventOf(row);
        yield { event: event.type, data: event, id: event.id };
      }
      position = rows.length < batch ? top : Number(rows.at(-1)?.seq);
      caller.signal.throwIfAborted();
      if (stopped) throw new AppError('unavailable', 'the broker stops: come back');
      if (numbers.last === position) await happened.wait(caller.signal);
    }
  }

  return {
    emit(journal, type, machine, data) {
      const about = machine && { machine_id: machine.id, machine_name: machine.name };
      const event: Event = { id: newId('event'), type, timestamp: iso(now()), data: { ...about, ...data } };
      const entry: EventEntry = { kind: 'event', event, machine_id: machine?.id ?? null };
      journal.append(entry);
    },
    within: (recorder) => void recorders.push(recorder),
    listen(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
    stop() {
      stopped = true;
      happened.wake();
    },
    handlers: {
      list(input, caller: Caller) {
        const page = pageOfRows(
          history,
          { table: 'events', columns: '*' },
          [
            ...readableOnly(caller),
            input.machine_id && ['machine_id = ?', input.machine_id],
            ...filtersOf(routes.list, input, { since: rowsSince(input.since) }),
          ],
          { ...input, sort: input.sort.replace('created_at', 'seq') },
          'seq',
        );
        return { items: page.items.map(eventOf), total: page.total };
      },
      // What happens from this moment on is told, however late it is read.
      stream(input, caller) {
        const from = begin(input, caller);
        // For whoever loses the connection before anything was told.
        const last = input.last_event_id ?? newestId(caller);
        if (last) caller.headers.set('X-Last-Event-Id', last);
        return follow(from, input, caller);
      },
    },
  };
}

/** The conditions that leave only what a caller may read: types, and machines. */
export function readableOnly(caller: Pick<Caller, 'may' | 'reachable'>): Condition[] {
  const types = JSON.stringify(readableTypes(caller.may));
  return [['type IN (SELECT value FROM json_each(?))', types], reachableOnly(caller.reachable())];
}

function eventOf(row: Row): Event {
  return {
    id: textIn(row, 'id'),
    type: textIn(row, 'type') as EventType,
    timestamp: iso(Number(row.created_at)),
    // Written by emit(), which takes no other shape.
    data: jsonIn(row, 'data') as Event['data'],
  };
}
