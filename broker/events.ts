// What happened: typed events, committed with the change that caused them, kept in history.

import type { EventType } from '../shared/api/events.ts';
import type { Caller, Handlers, Journal } from '../shared/api/index.ts';
import { iso, now } from '../shared/clock.ts';
import { newId } from '../shared/ids.ts';
import { type Entry, type History, type HistoryTransaction, jsonIn, type Row, textIn } from './history.ts';
import { pageOfRows, reachableOnly } from './paging.ts';

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
}

const tables = [
  `CREATE TABLE events (
    id TEXT NOT NULL UNIQUE, type TEXT NOT NULL, created_at INTEGER NOT NULL, machine_id TEXT, data TEXT NOT NULL
  );
  CREATE INDEX events_by_time ON events (created_at);
  CREATE INDEX events_by_machine ON events (machine_id, created_at)`,
];

/** Opens the event room; events older than `keepMs` go. */
export function openEvents(history: History, keepMs: number): Events {
  history.migrate('events', tables);
  history.retain({ table: 'events', column: 'created_at', keepMs });
  const listeners = new Set<(event: Event) => void>();
  const recorders: Parameters<Events['within']>[0][] = [];

  history.onEntry('event', ({ event, machine_id }: EventEntry, transaction: HistoryTransaction) => {
    const { changes } = history
      .sql('INSERT OR IGNORE INTO events (id, type, created_at, machine_id, data) VALUES (?, ?, ?, ?, ?)')
      .run(event.id, event.type, Date.parse(event.timestamp), machine_id, JSON.stringify(event.data));
    if (changes === 0) return;
    for (const record of recorders) record(event, machine_id, transaction);
    transaction.committed(() => {
      for (const listener of listeners) listener(event);
    });
  });

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
    handlers: {
      list(input, caller: Caller) {
        const page = pageOfRows(
          history,
          { table: 'events', columns: '*' },
          [
            reachableOnly(caller.reachable()),
            input.type && ['type = ?', input.type],
            input.machine_id && ['machine_id = ?', input.machine_id],
            input.since && ['created_at >= ?', input.since.getTime()],
          ],
          input,
          // Several may happen in one millisecond: a start comes before its end.
          'rowid',
        );
        return { items: page.items.map(eventOf), total: page.total };
      },
    },
  };
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
