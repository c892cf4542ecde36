// The event log: stores each event in the transaction of the change that caused it, lists and streams events, and
// passes them to listeners.
import { type EventType, eventTypes, readableTypes, events as routes } from '../shared/api/events.ts';
import type { Api, Caller, Handlers, Input, Journal, SentEvent } from '../shared/api/route-table.ts';
import { iso, now } from '../shared/clock.ts';
import { AppError } from '../shared/errors.ts';
import { newId } from '../shared/ids-and-secrets.ts';
import { Wake } from '../shared/wait-for-change.ts';
import {
  type History,
  type HistoryTransaction,
  jsonIn,
  type OutboxEntry,
  type Row,
  textIn,
} from './history/history-database.ts';
import { type CountedTable, createCounts } from './history/row-counts.ts';
import { OrderedTable } from './history/time-ordered-table.ts';
import { allOf, type Condition, reachableOnly } from './list-pages-and-filters.ts';

export interface Event {
  id: string;
  type: EventType;
  /** Time in ISO 8601. */
  timestamp: string;
  data: Record<string, unknown>;
}

interface EventEntry extends OutboxEntry {
  kind: 'event';
  event: Event;
  machine_id: string | null;
}

/**
 * Called for each event. Returns undefined, or a function that writes other rows in the event's transaction, such as
 * deliveries to webhooks.
 */
type Recorder = (
  event: Event,
  machineId: string | null,
) => ((transaction: HistoryTransaction) => unknown) | undefined;
type StreamInput = Input<Api['events']['stream']>;

const counted: CountedTable = {
  ...{ table: 'events', time: 'created_at', number: 'seq', columns: ['type'] },
};
// The table has few indexes, because commands store many events and each index costs one more database page per
// event.
const tables = [
  `CREATE TABLE events (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, type TEXT NOT NULL, created_at INTEGER NOT NULL,
    machine_id TEXT, data TEXT NOT NULL
  );
  CREATE INDEX events_by_machine ON events (machine_id)`,
  'CREATE INDEX events_by_type ON events (type)',
  // The new index events_by_machine also has the columns by which GET /events filters. The events of one machine can
  // then be filtered without reading their rows.
  `DROP INDEX events_by_machine;
  CREATE INDEX events_by_machine ON events (machine_id, seq, type, created_at);
  ${createCounts(counted)}`,
];

/** Maximum number of removed machines whose names are in memory. */
const mostRemovedNames = 1_000;
const lastRemovals = `SELECT * FROM events WHERE type = 'machine.removed' ORDER BY seq DESC LIMIT ${mostRemovedNames}`;
/** Number of rows that a stream reads at a time, which limits the memory for a slow client. */
const batch = 100;

export class Events {
  readonly #history: History;
  readonly #table: OrderedTable;
  readonly #listeners = new Map<(event: Event) => void, readonly EventType[]>();
  readonly #recorders: Recorder[] = [];
  readonly #added = new Wake();
  /** Aborted to end all open event streams. */
  #streams = new AbortController();
  /** Sequence number of the last event that refresh() has read. */
  #heard: number;
  /**
   * Ids of this broker's own events. Listeners have received them already, so refresh() skips them. Undefined with a
   * single broker.
   */
  readonly #own: Set<string> | undefined;
  /**
   * Names, by id, of the machines that were removed last. After a machine is removed, its commands and sessions end.
   * The events about these ends contain the machine's name.
   */
  readonly #removedNames = new Map<string, string>();

  private constructor(history: History, table: OrderedTable, isShared: boolean) {
    this.#history = history;
    this.#table = table;
    this.#heard = table.last;
    this.#own = isShared ? new Set() : undefined;
    history.onEntry('event', (entry: EventEntry, transaction: HistoryTransaction) =>
      this.#insert(entry, transaction),
    );
  }

  /**
   * Opens the table. Deletes events older than `keepMs`, and the oldest if there are too many. `isShared`: other
   * brokers write to the same table.
   */
  static async open(history: History, keepMs: number, isShared = false): Promise<Events> {
    const options = { keepMs, findBy: ['id', 'machine_id', 'type'] };
    const events = new Events(history, await OrderedTable.open(history, counted, tables, options), isShared);
    const removals = await history.all(lastRemovals);
    for (const row of removals.reverse()) events.#noteRemoval(eventOf(row));
    return events;
  }

  readonly handlers: Handlers['events'] = {
    list: async (input, caller) => {
      const conditions = [...readableOnly(caller), onMachine(input.machine_id)];
      const { items, total } = await this.#table.page(routes.list, conditions, input);
      return { items: items.map(eventOf), total };
    },
    // The starting point is fixed when the request arrives, not when the client reads the first event. So the client
    // misses no event in between.
    stream: async (input, caller) => {
      const from = await this.#start(input, caller);
      // A client that loses the connection before the first event can resume from this id.
      const last = input.last_event_id ?? (await this.#newestId(from, caller));
      if (last) caller.headers.set('X-Last-Event-Id', last);
      return this.#follow(from, input, caller);
    },
  };

  /** Records an event in the transaction of the change that causes it. */
  emit(
    journal: Journal,
    type: EventType,
    machine: { id: string; name: string } | undefined,
    data: Event['data'],
  ): void {
    const machine_name = machine && (machine.name || this.#removedNames.get(machine.id) || '');
    const about = machine && { machine_id: machine.id, machine_name };
    const event: Event = { id: newId('event'), type, timestamp: iso(now()), data: { ...about, ...data } };
    this.#noteRemoval(event);
    const entry: EventEntry = { kind: 'event', event, machine_id: machine?.id ?? null };
    journal.append(entry);
  }

  #noteRemoval({ type, data: { machine_id, machine_name } }: Event): void {
    if (type !== 'machine.removed') return;
    this.#removedNames.set(String(machine_id), String(machine_name));
    const [oldest = ''] = this.#removedNames.keys();
    if (this.#removedNames.size > mostRemovedNames) this.#removedNames.delete(oldest);
  }

  /**
   * Calls `recorder` for each event. If `recorder` returns a function, that function writes in the event's transaction,
   * so that its writes and the event are committed together.
   */
  within(recorder: Recorder): void {
    this.#recorders.push(recorder);
  }

  /** Calls `listener` with each event of these types once it is on disk. Call the returned function to stop. */
  listen(types: readonly EventType[], listener: (event: Event) => void): () => void {
    this.#listeners.set(listener, types);
    return () => this.#listeners.delete(listener);
  }

  #notify(event: Event): void {
    for (const [listener, types] of this.#listeners) if (types.includes(event.type)) listener(event);
  }

  /** Reads the events that other brokers have committed, and passes them to listeners and event streams. */
  async refresh(): Promise<void> {
    const next = `SELECT * FROM events WHERE seq > ? ORDER BY seq LIMIT ${batch}`;
    for (let rows: Row[] = [], from = -1; from !== this.#heard; ) {
      from = this.#heard;
      rows = await this.#history.all(next, from);
      for (const row of rows) {
        this.#heard = Number(row.seq);
        this.#table.advance(this.#heard);
        const event = eventOf(row);
        this.#noteRemoval(event);
        if (!this.#own?.delete(event.id)) this.#notify(event);
      }
      if (rows.length > 0) this.#added.wake();
    }
  }

  /** Streams all events from now on that the caller may read. */
  follow(caller: Caller): AsyncIterable<SentEvent<Event>> {
    return this.#follow(this.#table.last, {}, caller);
  }

  /** Ends all open event streams with this error. */
  endStreams(error: unknown): void {
    this.#streams.abort(error);
    this.#streams = new AbortController();
    this.#added.wake();
  }

  /** Ends all open event streams and those that begin later. */
  stop(): void {
    this.#streams.abort(new AppError('unavailable', 'the broker is stopping: connect again'));
    this.#added.wake();
  }

  async #insert({ event, machine_id }: EventEntry, transaction: HistoryTransaction): Promise<void> {
    const { id, type, data } = event;
    // Usually emit() has already noted the removal of a machine. After a restart, events from the outbox in state.json
    // are inserted without a call of emit(), so the removal is noted here.
    this.#noteRemoval(event);
    const created_at = Date.parse(event.timestamp);
    const row = { id, type, created_at, machine_id, data: JSON.stringify(data) };
    const records = this.#recorders.map((record) => record(event, machine_id));
    const writes = records.filter((write) => write !== undefined);
    this.#own?.add(id);
    let isNew = false;
    const added = this.#table.add(transaction, created_at, row, () => {
      isNew = true;
    });
    // If `added` rejects, the transaction itself reports the error. This empty catch only prevents an unhandled
    // rejection, because `added` is not always awaited below.
    added.catch(() => {});
    transaction.committed(() => {
      if (!isNew) return;
      this.#notify(event);
      this.#added.wake();
    });
    if (writes.length === 0) return;
    if (await added) await Promise.all(writes.map((write) => write(transaction)));
  }

  /**
   * Returns the sequence number after which a stream begins: that of the event last_event_id, or by default that of
   * the newest event.
   */
  async #start({ last_event_id }: StreamInput, caller: Caller): Promise<number> {
    if (last_event_id === undefined) return this.#own ? this.#newestOfAll() : this.#table.last;
    const [where, values] = allOf([['id = ?', last_event_id], ...readableOnly(caller)]);
    const row = await this.#history.get(`SELECT seq FROM events WHERE ${where}`, ...values);
    if (row) return Number(row.seq);
    throw new AppError(
      'range_not_satisfiable',
      `the event log has no event ${last_event_id}, so later ones may be missing too: list events, then stream without last_event_id`,
      { last_event_id },
    );
  }

  /** Reads the number of the newest event from the database, because another broker may have written that event. */
  async #newestOfAll(): Promise<number> {
    const row = await this.#history.get('SELECT max(seq) AS seq FROM events');
    return Number(row?.seq ?? 0);
  }

  /**
   * Returns the id from which a client can resume a stream that begins after `upTo`. It is the id of the newest event
   * that the caller may read and whose sequence number is at most `upTo`; undefined if there is none.
   */
  async #newestId(upTo: number, caller: Caller): Promise<string | undefined> {
    const [where, values] = allOf([['seq <= ?', upTo], ...readableOnly(caller)]);
    const newest = `SELECT id FROM events WHERE ${where} ORDER BY seq DESC LIMIT 1`;
    const row = await this.#history.get(newest, ...values);
    return row && textIn(row, 'id');
  }

  /**
   * Reads events from the table only as fast as the client does, so that no events wait in memory for a slow client.
   */
  async *#follow(from: number, input: StreamInput, caller: Caller): AsyncGenerator<SentEvent<Event>> {
    const { signal } = this.#streams;
    for (let position = from; ; ) {
      const newest = this.#table.last;
      const [where, values] = allOf([
        ['seq > ?', position],
        ...readableOnly(caller),
        onMachine(input.machine_id),
        input.types && ['type IN (SELECT value FROM json_each(?))', JSON.stringify(input.types)],
      ]);
      const next = `SELECT * FROM events WHERE ${where} ORDER BY seq LIMIT ${batch}`;
      const rows = await this.#history.all(next, ...values);
      for (const row of rows) {
        caller.signal.throwIfAborted();
        const event = eventOf(row);
        yield { event: event.type, data: event, id: event.id };
      }
      // The query also finds events that were committed after `newest` was read, so `sent` can be higher than `newest`.
      const sent = Number(rows.at(-1)?.seq ?? 0);
      // The position never decreases. At the start it can be higher than `newest`: the client may resume after an event
      // of another broker that this broker has not read yet.
      position = rows.length < batch ? Math.max(position, newest, sent) : sent;
      caller.signal.throwIfAborted();
      signal.throwIfAborted();
      if (this.#table.last <= position) await this.#added.wait(caller.signal);
    }
  }
}

/** Conditions that select only the events that a caller may read, by type and by machine. */
export function readableOnly(caller: Pick<Caller, 'may' | 'reachable'>): Condition[] {
  const types = readableTypes(caller.may);
  // The condition on types is left out if the key may read all types. Rows can then be read in order until a page is
  // full, which is fast.
  const isEveryType = types.length === eventTypes.length;
  return [
    isEveryType ? undefined : ['type IN (SELECT value FROM json_each(?))', JSON.stringify(types)],
    reachableOnly(caller.reachable()),
  ];
}

function onMachine(id: string | undefined): Condition {
  return id === undefined ? undefined : ['machine_id = ?', id];
}

function eventOf(row: Row): Event {
  return {
    id: textIn(row, 'id'),
    type: textIn(row, 'type') as EventType,
    timestamp: iso(Number(row.created_at)),
    // The cast is safe: emit() stores only objects.
    data: jsonIn(row, 'data') as Event['data'],
  };
}
