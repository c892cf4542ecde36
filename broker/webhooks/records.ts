// Deliveries in history: the queue of each webhook is a part of its table, however long it is.
import { createHash } from 'node:crypto';
import type { Api, Reply } from '../../shared/api/index.ts';
import type { WebhookId } from '../../shared/api/route.ts';
import { iso, monotonic, now } from '../../shared/clock.ts';
import { type History, jsonIn, type Row, textIn } from '../history.ts';
import { rowsSince } from '../numbers.ts';
import { allOf } from '../paging.ts';
import type { Outcome } from './send.ts';
import type { Message } from './sign.ts';

type Shown = Reply<Api['webhooks']['deliveries']>['items'][number];
type Last = NonNullable<Reply<Api['webhooks']['get']>['last_delivery']>;

/** A delivery that may be attempted now, with its event. */
export interface Due {
  id: string;
  message: Message;
  machineId: string | null;
  /** Attempts since it was last asked for. */
  tries: number;
  dueAt: number;
}

/** An event that a webhook is to get. */
export interface Told {
  id: string;
  type: string;
  machineId: string | null;
  at: number;
}

/** How an attempt went, and what comes of it: another one at that time, or none. */
export interface Result {
  due: Due;
  webhookId: WebhookId;
  outcome: Outcome;
  next: number | null;
}

// What waits is found by its partial index; a delivery's id is made of what it is for, so that it is there once.
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
];

const digits = '0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz';
/** Attempts that are remembered of one delivery. */
const mostAttempts = 20;

export interface Records {
  /**
   * The time that due times are in: wall time when the broker started, and monotonic since, so that a wait lasts as long
   * as it should however the clock is set meanwhile.
   */
  now(): number;
  /** Inside a transaction, as all that follow but `due`, `find` and the like. */
  insert(webhookId: WebhookId, told: Told): void;
  /** Asks now for one that failed, waits, or was never asked for. Tells whether it did. */
  again(webhookId: WebhookId, told: Told): boolean;
  /** Asks now for one again, however it is. */
  redo(id: string): void;
  /** Writes how an attempt went. */
  save(result: Result): void;
  /** As the last one of its webhook. */
  remember(result: Result): void;
  /** Gives up some that wait; tells how many. */
  giveUp(webhookId: WebhookId, reason: string, limit: number): number;
  /** Gives up some that wait and are none of these types, or about none of these machines; tells how many. */
  narrow(
    webhookId: WebhookId,
    types: readonly string[],
    machines: readonly string[] | null,
    limit: number,
  ): number;
  /** What waits is due then at the latest. */
  hasten(webhookId: WebhookId, at: number): void;
  /** Gives up one, if it waits. */
  refuse(id: string, reason: string): void;
  trip(webhookId: WebhookId, armed: number): void;
  /** Ids of those that are due, those that wait longest first. */
  due(webhookId: WebhookId, until: number, limit: number): string[];
  /** When the next one is due. */
  nextDue(webhookId: WebhookId, after: number): number | undefined;
  load(id: string): Due | undefined;
  find(id: string): { row: Row; told: Told } | undefined;
  exists(id: string): boolean;
  /** Events from a place in the log on, in its order, and where the next ones are. */
  eventsFrom(place: Place, limit: number): { events: Told[]; next: Place | undefined };
  lastOf(webhookId: WebhookId): Last | null;
  /** How often each webhook was armed when it failed too often. */
  trips(): Map<string, number>;
  /** A row as REST lists it; with `answers`, what the receivers answered. */
  shown(row: Row, answers: boolean): Shown;
}

/** Where one is in the log of events: after this number, among what is not older. */
export interface Place {
  after: number;
  since: Date;
}

/** Opens the tables; deliveries go with their events, after `keepMs`. */
export function openRecords(history: History, keepMs: number): Records {
  history.migrate('webhooks', tables);
  history.retain({ table: 'webhook_deliveries', column: 'created_at', keepMs });
  const insertion = `INSERT INTO webhook_deliveries
    (id, webhook_id, event_id, type, machine_id, created_at, status, tries, due_at, attempts)
    VALUES (?, ?, ?, ?, ?, ?, 'pending', 0, ?, '[]') ON CONFLICT (id) DO`;

  const withAttempt = `attempts = json_insert(iif(json_array_length(attempts) < ${mostAttempts}, attempts,
    json_remove(attempts, '$[0]')), '$[#]', json(?))`;

  const startedAt = now() - monotonic();
  const steadyNow = (): number => Math.round(startedAt + monotonic());

  function put(text: string, webhookId: WebhookId, told: Told): boolean {
    const { changes } = history
      .sql(text)
      .run(idOf(webhookId, told), webhookId, told.id, told.type, told.machineId, told.at, steadyNow());
    return Number(changes) > 0;
  }

  return {
    now: steadyNow,
    insert: (webhookId, told) => void put(`${insertion} NOTHING`, webhookId, told),
    again: (webhookId, told) =>
      put(
        `${insertion} UPDATE SET status = 'pending', reason = NULL, tries = 0, due_at = excluded.due_at
         WHERE status = 'failed' OR due_at > excluded.due_at`,
        webhookId,
        told,
      ),
    // Another time than before tells save() of it.
    redo(id) {
      history
        .sql(
          `UPDATE webhook_deliveries SET status = 'pending', reason = NULL, tries = 0,
             due_at = ?1 + (due_at IS ?1) WHERE id = ?2`,
        )
        .run(steadyNow(), id);
    },
    save({ due, outcome, next }) {
      const { delivered, answer } = outcome;
      const attempt = attemptOf(outcome);
      const text = JSON.stringify(answer === null ? attempt : { ...attempt, answer });
      const status = delivered ? 'delivered' : next === null ? 'failed' : 'pending';
      const reason = status === 'failed' ? 'attempts_failed' : null;
      const { changes } = history
        .sql(
          `UPDATE webhook_deliveries SET status = ?, reason = ?, tries = ?, due_at = ?, ${withAttempt}
           WHERE id = ? AND ifnull(due_at, ?7) = ?7`,
        )
        .run(status, reason, due.tries + 1, next, text, due.id, due.dueAt);
      // Somebody asked for it again meanwhile: that stands.
      if (changes === 0) {
        history.sql(`UPDATE webhook_deliveries SET ${withAttempt} WHERE id = ?`).run(text, due.id);
      }
    },
    remember({ webhookId, due, outcome }) {
      const { id: event_id, type } = due.message;
      const what = { delivery_id: due.id, event_id, type, delivered: outcome.delivered };
      const last: Last = { ...what, ...attemptOf(outcome) };
      history
        .sql(
          `INSERT INTO webhook_marks (webhook_id, last) VALUES (?, ?)
           ON CONFLICT (webhook_id) DO UPDATE SET last = excluded.last`,
        )
        .run(webhookId, JSON.stringify(last));
    },
    giveUp: (webhookId, reason, limit) =>
      Number(
        history
          .sql(
            `UPDATE webhook_deliveries SET status = 'failed', reason = ?, due_at = NULL WHERE rowid IN (
               SELECT rowid FROM webhook_deliveries WHERE webhook_id = ? AND due_at IS NOT NULL LIMIT ?)`,
          )
          .run(reason, webhookId, limit).changes,
      ),
    narrow: (webhookId, types, machines, limit) =>
      Number(
        history
          .sql(
            `UPDATE webhook_deliveries SET status = 'failed', reason = 'not_subscribed', due_at = NULL WHERE rowid IN (
               SELECT rowid FROM webhook_deliveries WHERE webhook_id = ?1 AND due_at IS NOT NULL
                 AND (type NOT IN (SELECT value FROM json_each(?2))
                   OR ?3 IS NOT NULL AND ifnull(machine_id, '') NOT IN (SELECT value FROM json_each(?3))) LIMIT ?4)`,
          )
          .run(webhookId, JSON.stringify(types), machines && JSON.stringify(machines), limit).changes,
      ),
    hasten(webhookId, at) {
      history
        .sql('UPDATE webhook_deliveries SET due_at = ?1 WHERE webhook_id = ?2 AND due_at > ?1')
        .run(at, webhookId);
    },
    refuse(id, reason) {
      history
        .sql(
          "UPDATE webhook_deliveries SET status = 'failed', reason = ?, due_at = NULL WHERE id = ? AND due_at IS NOT NULL",
        )
        .run(reason, id);
    },
    trip(webhookId, armed) {
      history
        .sql(
          `INSERT INTO webhook_marks (webhook_id, tripped) VALUES (?, ?)
           ON CONFLICT (webhook_id) DO UPDATE SET tripped = excluded.tripped`,
        )
        .run(webhookId, armed);
    },
    due: (webhookId, until, limit) =>
      history
        .sql('SELECT id FROM webhook_deliveries WHERE webhook_id = ? AND due_at <= ? ORDER BY due_at LIMIT ?')
        .all(webhookId, until, limit)
        .map((row) => textIn(row, 'id')),
    nextDue(webhookId, after) {
      const next = history
        .sql('SELECT min(due_at) AS at FROM webhook_deliveries WHERE webhook_id = ? AND due_at > ?')
        .get(webhookId, after)?.at;
      return next === null || next === undefined ? undefined : Number(next);
    },
    load(id) {
      const row = history
        .sql(
          `SELECT d.id, d.event_id, d.type, d.machine_id, d.tries, d.due_at, e.created_at, e.data
           FROM webhook_deliveries d JOIN events e ON e.id = d.event_id WHERE d.id = ? AND d.due_at IS NOT NULL`,
        )
        .get(id);
      return row && dueOf(row);
    },
    find(id) {
      const row = history.sql('SELECT * FROM webhook_deliveries WHERE id = ?').get(id);
      return row && { row, told: toldOf({ ...row, id: row.event_id ?? null }) };
    },
    exists: (id) => history.sql('SELECT 1 FROM webhook_deliveries WHERE id = ?').get(id) !== undefined,
    eventsFrom({ since, after }, limit) {
      const [where, values] = allOf([rowsSince(since, after)]);
      const rows = history
        .sql(`SELECT seq, id, type, machine_id, created_at FROM events WHERE ${where} ORDER BY seq LIMIT ?`)
        .all(...values, limit);
      const last = rows.length === limit ? rows.at(-1) : undefined;
      return { events: rows.map(toldOf), next: last && { since, after: Number(last.seq) } };
    },
    lastOf(webhookId) {
      const row = history.sql('SELECT last FROM webhook_marks WHERE webhook_id = ?').get(webhookId);
      // Written by remember(), which takes no other shape.
      return row?.last ? (jsonIn(row, 'last') as Last) : null;
    },
    trips: () =>
      new Map(
        history
          .sql('SELECT webhook_id, tripped FROM webhook_marks WHERE tripped IS NOT NULL')
          .all()
          .map((row) => [textIn(row, 'webhook_id'), Number(row.tripped)]),
      ),
    shown: (row, answers) => shownDelivery(row, answers, now() - steadyNow()),
  };
}

/** The same for the same two, whenever it is made. It begins with the time, so that new ones lie side by side on disk. */
function idOf(webhookId: string, told: Told): string {
  const hash = createHash('sha256').update(`${webhookId} ${told.id}`).digest();
  let time = '';
  for (let rest = told.at; time.length < 8; rest = Math.floor(rest / 62)) time = digits[rest % 62] + time;
  return `dlv_${time}${[...hash.subarray(0, 14)].map((byte) => digits[byte % 62]).join('')}`;
}

function attemptOf({ at, status_code, duration, error }: Outcome) {
  return { at: iso(at), status_code, duration, error };
}

/** The very bytes that every attempt sends: `data` is kept as the text it was written as. */
function dueOf(row: Row): Due {
  const [id, type] = [textIn(row, 'event_id'), textIn(row, 'type')];
  const head = JSON.stringify({ id, type, timestamp: iso(Number(row.created_at)) });
  const body = Buffer.from(`${head.slice(0, -1)},"data":${textIn(row, 'data')}}`);
  return {
    id: textIn(row, 'id'),
    message: { id, type, deliveryId: textIn(row, 'id'), body },
    machineId: row.machine_id === null ? null : textIn(row, 'machine_id'),
    tries: Number(row.tries),
    dueAt: Number(row.due_at),
  };
}

function toldOf(row: Row): Told {
  const machineId = row.machine_id === null ? null : textIn(row, 'machine_id');
  return { id: textIn(row, 'id'), type: textIn(row, 'type'), machineId, at: Number(row.created_at) };
}

/** `drift`: milliseconds by which the wall clock is ahead of the time that due times are in. */
function shownDelivery(row: Row, answers: boolean, drift: number): Shown {
  const attempts = jsonIn(row, 'attempts') as Shown['attempts'];
  return {
    id: textIn(row, 'id'),
    webhook_id: textIn(row, 'webhook_id'),
    event_id: textIn(row, 'event_id'),
    type: textIn(row, 'type'),
    status: textIn(row, 'status') as Shown['status'],
    reason: row.reason === null ? null : textIn(row, 'reason'),
    attempts: answers ? attempts : attempts.map(({ answer: _, ...rest }) => rest),
    created_at: iso(Number(row.created_at)),
    next_attempt_at: row.due_at === null ? null : iso(Number(row.due_at) + drift),
  };
}
