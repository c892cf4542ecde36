// Stores deliveries in the database of the history: a row for each event that is sent to a webhook or an alert channel,
// with its attempts and next due time. A `webhookId` can also be the id of an alert channel.
import { createHash } from 'node:crypto';
import type { Api, Reply } from '../../shared/api/route-table.ts';
import { iso, monotonic, now } from '../../shared/clock.ts';
import { timedId } from '../../shared/ids-and-secrets.ts';
import {
  type History,
  type HistoryTransaction,
  jsonIn,
  type Row,
  type RowReader,
  textIn,
} from '../history/history-database.ts';
import { type CountedTable, createCounts } from '../history/row-counts.ts';
import { rowsSince } from '../history/time-ordered-table.ts';
import { allOf } from '../list-pages-and-filters.ts';
import type { Outcome } from './attempt-delivery.ts';

type Serialized = Reply<Api['webhooks']['deliveries']>['items'][number];
type Last = NonNullable<Reply<Api['webhooks']['get']>['last_delivery']>;

/** The properties of an event that decide whether a webhook may receive the event. */
export interface EventKind {
  type: string;
  machineId: string | null;
}

/** An event to be sent to a webhook. */
export interface EventReference extends EventKind {
  id: string;
  at: number;
}

/** A delivery that waits for an attempt. */
export interface Delivery extends EventKind {
  id: string;
  rowid: number;
  eventId: string;
  /** The event as JSON, the same bytes at every attempt; undefined if the event was deleted. */
  body: Buffer | undefined;
  /** Number of attempts since the delivery was created, or since a client last asked to send it again. */
  tries: number;
  dueAt: number;
}

export interface Attempted {
  webhookId: string;
  /**
   * The webhook's `armed` when the attempt began: the number of updates that had enabled the webhook. If an update
   * enables the webhook during the attempt, its `armed` increases, and a failure of the attempt is ignored.
   */
  armed: number;
  delivery: Delivery;
  outcome: Outcome;
  /** When the next attempt is due; null if there is none. */
  next: number | null;
}

const countedDeliveries: CountedTable = {
  ...{ table: 'webhook_deliveries', time: 'created_at', number: 'rowid' },
  ...{ columns: ['webhook_id', 'type', 'status'], scope: 'webhook_id' },
};
/** The parameters with which pageOfRows() reads pages of deliveries. */
export const deliveryRows = {
  ...{ table: 'webhook_deliveries', columns: '*', counted: countedDeliveries },
  tie: ['rowid'],
};
const tables = [
  `CREATE TABLE webhook_deliveries (
    id TEXT NOT NULL UNIQUE, webhook_id TEXT NOT NULL, event_id TEXT NOT NULL, type TEXT NOT NULL, machine_id TEXT,
    created_at INTEGER NOT NULL, status TEXT NOT NULL, reason TEXT, tries INTEGER NOT NULL, due_at INTEGER,
    attempts TEXT NOT NULL
  );
  CREATE INDEX webhook_deliveries_due ON webhook_deliveries (webhook_id, due_at) WHERE due_at IS NOT NULL;
  CREATE INDEX webhook_deliveries_of ON webhook_deliveries (webhook_id, created_at);
  CREATE INDEX webhook_deliveries_by_time ON webhook_deliveries (created_at);
  CREATE TABLE webhook_marks (webhook_id TEXT PRIMARY KEY, tripped INTEGER, last TEXT) WITHOUT ROWID`,
  `CREATE INDEX webhook_deliveries_by_status ON webhook_deliveries (webhook_id, status, created_at);
  CREATE INDEX webhook_deliveries_by_type ON webhook_deliveries (webhook_id, type, created_at);
  CREATE INDEX webhook_deliveries_by_event ON webhook_deliveries (webhook_id, event_id, created_at)`,
  createCounts(countedDeliveries),
];

/** Maximum number of attempts that are stored for one delivery; older ones are removed. */
const maxAttempts = 20;
/** SQL that appends an attempt to the JSON array of attempts. */
const withAttempt = `attempts = substr(attempts, 1, length(attempts) - 1) ||
  CASE WHEN attempts = '[]' THEN '' ELSE ',' END || ? || ']'`;

export class DeliveryStore {
  readonly #history: History;
  readonly #startedAt = now() - monotonic();
  /**
   * A webhook fails when all attempts of one delivery have failed. This map has the ids of failed webhooks, each with
   * the webhook's `armed` at that time. The webhook stays disabled until an update enables it, which increases `armed`.
   */
  readonly #failed = new Map<string, number>();

  private constructor(history: History) {
    this.#history = history;
  }

  /** Opens the tables. Deletes deliveries whose event is older than `keepMs` milliseconds. */
  static async open(history: History, keepMs: number): Promise<DeliveryStore> {
    await history.migrate('webhooks', tables);
    history.count(countedDeliveries);
    history.retain({ table: 'webhook_deliveries', column: 'created_at', keepMs });
    const store = new DeliveryStore(history);
    await store.readFailed();
    return store;
  }

  /** Reads the list of failed webhooks from the database, because other brokers may have recorded failures. */
  async readFailed(): Promise<void> {
    const marks = 'SELECT webhook_id, tripped FROM webhook_marks WHERE tripped IS NOT NULL';
    for (const row of await this.#history.all(marks))
      this.#failed.set(textIn(row, 'webhook_id'), Number(row.tripped));
  }

  /**
   * Returns the number of the newest row, and the ids of the receivers in all rows after row number `last`. Rows of
   * other brokers are included. Without `last`, `ids` is empty.
   */
  async since(last?: number): Promise<{ ids: string[]; last: number }> {
    if (last === undefined) {
      const row = await this.#history.get('SELECT coalesce(max(rowid), 0) AS n FROM webhook_deliveries');
      return { ids: [], last: Number(row?.n) };
    }
    const some =
      'SELECT webhook_id, max(rowid) AS n FROM webhook_deliveries WHERE rowid > ? GROUP BY webhook_id';
    const rows = await this.#history.all(some, last);
    return {
      ids: rows.map((row) => textIn(row, 'webhook_id')),
      last: Math.max(last, ...rows.map(({ n }) => Number(n))),
    };
  }

  /**
   * Returns the wall time at the broker's start plus the monotonic time since then. Changes of the wall clock therefore
   * change no delay.
   */
  now(): number {
    return Math.round(this.#startedAt + monotonic());
  }

  /**
   * Makes the delivery of this event to this webhook due now. Creates the delivery if there is none. Changes an
   * existing delivery only if it has failed or is due later. With `anyStatus`, changes it in any status. Returns false
   * if nothing changed.
   */
  async request(
    webhookId: string,
    event: EventReference,
    transaction: HistoryTransaction,
    anyStatus = false,
  ): Promise<boolean> {
    // saveAttempt() compares the due time with the one before the attempt. If it has changed, the delivery was
    // requested again during the attempt. So the new due time must differ from the old one. If both are the same
    // millisecond, 1 ms is added.
    const changed = await transaction.get(
      `INSERT INTO webhook_deliveries
         (id, webhook_id, event_id, type, machine_id, created_at, status, tries, due_at, attempts)
       VALUES (?1, ?2, ?3, ?4, ?5, ?6, 'pending', 0, ?7, '[]')
       ON CONFLICT (id) DO UPDATE SET status = 'pending', reason = NULL, tries = 0, due_at = CASE WHEN webhook_deliveries.due_at = ?7 THEN CAST(?7 AS BIGINT) + 1 ELSE ?7 END
       WHERE ?8 OR webhook_deliveries.status = 'failed' OR webhook_deliveries.due_at > ?7 RETURNING id`,
      ...[idOf(webhookId, event), webhookId, event.id, event.type, event.machineId, event.at],
      ...[this.now(), Number(anyStatus)],
    );
    return changed !== undefined;
  }

  /** Stores an attempt. Returns the status of the delivery after it. */
  async saveAttempt({ delivery, outcome, next }: Attempted, transaction: HistoryTransaction) {
    const { delivered, answer } = outcome;
    const attempt = attemptOf(outcome);
    const text = JSON.stringify(answer === null ? attempt : { ...attempt, answer });
    const status = delivered ? 'delivered' : next === null ? 'failed' : 'pending';
    const changed = await transaction.get(
      `UPDATE webhook_deliveries SET status = ?, reason = ?, tries = ?, due_at = ?, ${withAttempt}
       WHERE id = ? AND coalesce(due_at, ?7) = ?7 RETURNING attempts`,
      ...[status, status === 'failed' ? 'attempts_failed' : null, delivery.tries + 1, next, text],
      ...[delivery.id, delivery.dueAt],
    );
    // The UPDATE above changes no row if the due time has changed: the delivery was requested again during the attempt.
    // Then only the attempt is stored, and the delivery remains due.
    const again = `UPDATE webhook_deliveries SET ${withAttempt} WHERE id = ? RETURNING attempts`;
    const row = changed ?? (await transaction.get(again, text, delivery.id));
    const attempts = row ? (jsonIn(row, 'attempts') as unknown[]) : [];
    if (attempts.length > maxAttempts) {
      const newest = JSON.stringify(attempts.slice(-maxAttempts));
      transaction.run('UPDATE webhook_deliveries SET attempts = ? WHERE id = ?', newest, delivery.id);
    }
    return changed ? status : 'pending';
  }

  /** Stores an attempt as the most recent attempt of its webhook. */
  saveLast(
    { webhookId: webhook_id, delivery: { id, eventId, type }, outcome }: Attempted,
    transaction: HistoryTransaction,
  ): void {
    const { delivered } = outcome;
    const last: Last = { delivery_id: id, event_id: eventId, type, delivered, ...attemptOf(outcome) };
    transaction.put('webhook_marks', 'webhook_id', { webhook_id, last: JSON.stringify(last) });
  }

  async last(webhookId: string): Promise<Last | null> {
    const row = await this.#history.get('SELECT last FROM webhook_marks WHERE webhook_id = ?', webhookId);
    // The cast is safe: saveLast() stores only this shape.
    return row?.last ? (jsonIn(row, 'last') as Last) : null;
  }

  /**
   * Stores that a webhook has failed: all attempts of one delivery failed. The webhook is disabled until it is enabled
   * again. `armed` is the number of times that it has been enabled.
   */
  saveFailed(webhook_id: string, armed: number, transaction: HistoryTransaction): void {
    transaction.put('webhook_marks', 'webhook_id', { webhook_id, tripped: armed });
    transaction.committed(() => this.#failed.set(webhook_id, armed));
  }

  hasFailed(webhookId: string, armed: number): boolean {
    return this.#failed.get(webhookId) === armed;
  }

  /** Marks a waiting delivery as failed. */
  fail(id: string, reason: string, transaction: HistoryTransaction): void {
    const change = "status = 'failed', reason = ?, due_at = NULL";
    transaction.run(
      `UPDATE webhook_deliveries SET ${change} WHERE id = ? AND due_at IS NOT NULL`,
      reason,
      id,
    );
  }

  /** Limits the due times of the webhook's waiting deliveries: a later due time becomes `at`. */
  limitDue(webhookId: string, at: number, transaction: HistoryTransaction): void {
    transaction.run(
      'UPDATE webhook_deliveries SET due_at = ?1 WHERE webhook_id = ?2 AND due_at > ?1',
      at,
      webhookId,
    );
  }

  /**
   * Returns at most `limit` waiting deliveries in the order of their due times, beginning after the delivery `after`.
   */
  async waiting(
    webhookId: string,
    limit: number,
    after?: Delivery,
    reader: RowReader = this.#history,
  ): Promise<Delivery[]> {
    const rows = await reader.all(
      `SELECT d.rowid, d.id, event_id, d.type, d.machine_id, d.created_at, tries, due_at, data
       FROM webhook_deliveries d LEFT JOIN events ON events.id = event_id
       WHERE webhook_id = ? AND due_at IS NOT NULL AND (due_at, d.rowid) > (?, ?)
       ORDER BY due_at, d.rowid LIMIT ?`,
      ...[webhookId, after?.dueAt ?? 0, after?.rowid ?? 0, limit],
    );
    return rows.map(deliveryOf);
  }

  async find(
    id: string,
    reader: RowReader = this.#history,
  ): Promise<{ row: Row; event: EventReference } | undefined> {
    const row = await reader.get('SELECT * FROM webhook_deliveries WHERE id = ?', id);
    return row && { row, event: { ...referenceOf(row), id: textIn(row, 'event_id') } };
  }

  /**
   * Returns events since a time, in the order of the event log, and the sequence number after which the next
   * page begins.
   */
  async eventsSince(
    since: Date,
    limit: number,
    after: number | undefined,
    transaction: HistoryTransaction,
  ): Promise<{ events: EventReference[]; next: number | undefined }> {
    const [where, values] = allOf([rowsSince(since, after)]);
    const rows = await transaction.all(
      `SELECT seq, id, type, machine_id, created_at FROM events WHERE ${where} ORDER BY seq LIMIT ?`,
      ...[...values, limit],
    );
    const last = rows.length === limit ? rows.at(-1) : undefined;
    return { events: rows.map(referenceOf), next: last && Number(last.seq) };
  }

  /** Converts a row for REST. With `withAnswers`, the result also contains the answers of the receivers. */
  serialize(row: Row, withAnswers: boolean): Serialized {
    const attempts = jsonIn(row, 'attempts') as Serialized['attempts'];
    // Clients get due times by the wall clock. The stored due times follow this.now(), which ignores changes of the
    // wall clock since the broker's start.
    const drift = now() - this.now();
    return {
      id: textIn(row, 'id'),
      webhook_id: textIn(row, 'webhook_id'),
      event_id: textIn(row, 'event_id'),
      type: textIn(row, 'type'),
      status: textIn(row, 'status') as Serialized['status'],
      reason: row.reason === null ? null : textIn(row, 'reason'),
      attempts: withAnswers ? attempts : attempts.map(({ answer: _, ...rest }) => rest),
      created_at: iso(Number(row.created_at)),
      next_attempt_at: row.due_at === null ? null : iso(Number(row.due_at) + drift),
    };
  }
}

/**
 * Returns the id of a delivery, always the same for one webhook and one event. Ids begin with the event's time, so that
 * new ids are next to each other in the index.
 */
function idOf(webhookId: string, event: EventReference): string {
  const hash = createHash('sha256').update(`${webhookId} ${event.id}`).digest();
  return timedId('delivery', event.at, hash);
}

function attemptOf({ at, status_code, duration, error }: Outcome) {
  return { at: iso(at), status_code, duration, error };
}

function deliveryOf(row: Row): Delivery {
  const { at, ...event } = referenceOf(row);
  const eventId = textIn(row, 'event_id');
  const head = JSON.stringify({ id: eventId, type: event.type, timestamp: iso(at) });
  // `data` is sent as the text that is stored, without parsing, so that its bytes never change.
  const body =
    row.data === null ? undefined : Buffer.from(`${head.slice(0, -1)},"data":${textIn(row, 'data')}}`);
  const [rowid, tries, dueAt] = [Number(row.rowid), Number(row.tries), Number(row.due_at)];
  return { ...event, rowid, eventId, body, tries, dueAt };
}

function referenceOf(row: Row): EventReference {
  const machineId = row.machine_id === null ? null : textIn(row, 'machine_id');
  return { id: textIn(row, 'id'), type: textIn(row, 'type'), machineId, at: Number(row.created_at) };
}
