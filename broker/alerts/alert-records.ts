// Stores alerts in the history database, one row for each alert. A change of an alert (opened, repeated, resolved) and
// its event are written in one transaction.

import { alerts as routes } from '../../shared/api/alerts.ts';
import type { EventType } from '../../shared/api/events.ts';
import type { Api, Caller, Input, Journal, Page, Reply } from '../../shared/api/route-table.ts';
import type { AlertId, MachineId, RuleId, WindowId } from '../../shared/api/shared-schemas.ts';
import { iso, now } from '../../shared/clock.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import type { Events } from '../event-log.ts';
import type { History, HistoryTransaction, Row, RowReader } from '../history/history-database.ts';
import { type CountedTable, createCounts } from '../history/row-counts.ts';
import { allOf, filtersOf, pageOfRows, reachableOnly } from '../list-pages-and-filters.ts';
import type { AlertRule, State } from '../state/index.ts';

type Served = Reply<Api['alerts']['get']>;
type Times = 'created_at' | 'opened_at' | 'acknowledged_at' | 'repeated_at' | 'resolved_at';
export type Reason = NonNullable<Served['reason']>;

/** An alert as the history stores it; times are in milliseconds since 1970. */
export interface Alert extends Omit<Served, Times> {
  id: AlertId;
  rule_id: RuleId;
  machine_id: MachineId | null;
  /**
   * Name of the machine when the alert was created. Events of the alert contain this name once the machine is removed.
   * Null in rows of older brokers.
   */
  machine_name: string | null;
  created_at: number;
  opened_at: number | null;
  window_id: WindowId | null;
  acknowledged_at: number | null;
  repeated_at: number | null;
  resolved_at: number | null;
}

/** The subject of an alert: a machine, schedule, API key or certificate. */
export interface Subject {
  /** Id of a machine, schedule or key, or the name of a certificate. */
  id: string;
  machineId: MachineId | null;
}

const counted: CountedTable = {
  ...{ table: 'alerts', time: 'created_at', number: 'rowid', columns: ['rule_id', 'kind', 'status'] },
};
const columns =
  'id, rule_id, name, kind, machine_id, machine_name, subject, status, message, value, created_at, opened_at, window_id, acknowledged_at, acknowledged_by, note, repeats, repeated_at, resolved_at, reason';
const tables = [
  `CREATE TABLE alerts (
    id TEXT NOT NULL UNIQUE, rule_id TEXT NOT NULL, name TEXT NOT NULL, kind TEXT NOT NULL, machine_id TEXT,
    subject TEXT NOT NULL, status TEXT NOT NULL, message TEXT NOT NULL, value REAL, created_at INTEGER NOT NULL,
    opened_at INTEGER, window_id TEXT,
    acknowledged_at INTEGER, acknowledged_by TEXT, note TEXT, repeats INTEGER NOT NULL, repeated_at INTEGER,
    resolved_at INTEGER, reason TEXT
  );
  CREATE UNIQUE INDEX alerts_open ON alerts (rule_id, subject) WHERE resolved_at IS NULL;
  CREATE INDEX alerts_by_time ON alerts (created_at);
  CREATE INDEX alerts_by_rule ON alerts (rule_id, created_at);
  CREATE INDEX alerts_by_machine ON alerts (machine_id, created_at);
  CREATE INDEX alerts_by_status ON alerts (status, created_at);
  ${createCounts(counted)}`,
  // A schedule that selects machines by tags can have an open alert for each machine, so the index includes the
  // machine.
  `DROP INDEX alerts_open;
  CREATE UNIQUE INDEX alerts_open ON alerts (rule_id, subject, coalesce(machine_id, '')) WHERE resolved_at IS NULL`,
  // `channel_ids` names the channels to notify of the alert's last step (opened, repeated or resolved), as JSON:
  // - a list of ids: these channels
  // - the JSON value null: all channels
  // - SQL NULL: not recorded, because an older broker wrote the step
  'ALTER TABLE alerts ADD COLUMN channel_ids TEXT',
  'ALTER TABLE alerts ADD COLUMN machine_name TEXT',
];
/** SQL that sets the channels of an alert's step. If the value is NULL, the channels of the previous step stay. */
const withChannels = 'channel_ids = coalesce(?, channel_ids)';
const channelsOf = (rule: AlertRule | undefined): string | null =>
  rule ? JSON.stringify(rule.channel_ids) : null;

interface RecordContext {
  state: Pick<State, 'machines'>;
  history: History;
  events: Events;
}

export class AlertRecords {
  readonly #context: RecordContext;
  readonly #history: History;

  private constructor(context: RecordContext) {
    this.#context = context;
    this.#history = context.history;
  }

  /** Creates the table if it is missing. Alerts are deleted `keepMs` milliseconds after they were resolved. */
  static async open(context: RecordContext, keepMs: number): Promise<AlertRecords> {
    const { history } = context;
    await history.migrate('alerts', tables);
    history.count(counted);
    history.retain({ table: 'alerts', column: 'resolved_at', keepMs, where: 'resolved_at IS NOT NULL' });
    return new AlertRecords(context);
  }

  /**
   * Returns the unresolved alerts: all of them, or only alerts about these machines. With `ORDER BY rowid`, SQLite
   * would read the whole table. With the plus sign before `rowid`, SQLite uses the index `alerts_open`.
   */
  async unresolved(machineIds?: readonly string[]): Promise<Alert[]> {
    const [where, values] = allOf([['resolved_at IS NULL'], reachableOnly(machineIds)]);
    const sql = `SELECT ${columns} FROM alerts WHERE ${where} ORDER BY +rowid`;
    const rows = await this.#history.all(sql, ...values);
    return rows.map(fromRow);
  }

  async find(id: string, reader: RowReader = this.#history): Promise<Alert | undefined> {
    const row = await reader.get(`SELECT ${columns} FROM alerts WHERE id = ?`, id);
    return row && fromRow(row);
  }

  /**
   * True if the history has an alert that this rule opened, or that this maintenance window held back. The rule or
   * window may have been removed since.
   */
  async has(column: 'rule_id' | 'window_id', id: string): Promise<boolean> {
    const sql = `SELECT 1 AS n FROM alerts WHERE ${column} = ? LIMIT 1`;
    return (await this.#history.get(sql, id)) !== undefined;
  }

  /**
   * Opens an alert, or stores it as held if a maintenance window holds it back. Returns the existing alert if this rule
   * and subject already have an unresolved one.
   */
  create(
    rule: AlertRule,
    subject: Subject,
    what: Pick<Alert, 'message' | 'value' | 'window_id'>,
  ): Promise<Alert> {
    const at = now();
    const isHeld = what.window_id !== null;
    const alert: Alert = {
      ...{ id: newId('alert') as AlertId, rule_id: rule.id, name: rule.name, kind: rule.kind },
      ...{ machine_id: subject.machineId, machine_name: this.#nameOf(subject), subject: subject.id, ...what },
      ...{
        status: isHeld ? 'held' : 'open',
        created_at: at,
        opened_at: isHeld ? null : at,
        acknowledged_at: null,
        acknowledged_by: null,
        note: null,
      },
      ...{ repeats: 0, repeated_at: null, resolved_at: null, reason: null },
    };
    const names = columns.split(', ');
    const insert = `INSERT INTO alerts (${columns}, channel_ids) VALUES (${names.map(() => '?').join(', ')}, ?)
      ON CONFLICT DO NOTHING RETURNING id`;
    const values = names.map((name) => Reflect.get(alert, name) as string | number | null);
    const same = `SELECT ${columns} FROM alerts WHERE rule_id = ? AND subject = ?
      AND coalesce(machine_id, '') = ? AND resolved_at IS NULL`;
    return this.#write(alert, async (transaction) => {
      if (await transaction.get(insert, ...values, channelsOf(rule))) {
        if (!isHeld) this.#emit('alert.opened', alert, transaction);
        return alert;
      }
      const row = await transaction.get(same, rule.id, subject.id, subject.machineId ?? '');
      return row ? fromRow(row) : alert;
    });
  }

  /** Opens a held alert. Returns undefined if the stored alert is no longer held. */
  release(held: Alert, rule: AlertRule): Promise<Alert | undefined> {
    const change = `UPDATE alerts SET status = 'open', opened_at = ?, ${withChannels}
      WHERE id = ? AND status = 'held' RETURNING ${columns}`;
    return this.#write(held, async (transaction) => {
      const row = await transaction.get(change, now(), channelsOf(rule), held.id);
      const alert = row && fromRow(row);
      if (alert) this.#emit('alert.opened', alert, transaction);
      return alert;
    });
  }

  /**
   * Resolves an alert that is not resolved yet. Emits alert.resolved, but not for a held alert, because alert.opened
   * was not emitted for it either. The event goes to the channels of `rule`. Without `rule`, it goes to the channels of
   * the alert's previous step.
   */
  resolve(alert: Alert, reason: Reason, rule?: AlertRule): Promise<void> {
    const change = `UPDATE alerts SET status = 'resolved', resolved_at = ?, reason = ?, ${withChannels}
      WHERE id = ? AND resolved_at IS NULL RETURNING ${columns}`;
    return this.#write(alert, async (transaction) => {
      const row = await transaction.get(change, now(), reason, channelsOf(rule), alert.id);
      if (row && row.opened_at !== null) this.#emit('alert.resolved', fromRow(row), transaction);
    });
  }

  /** Counts a repeat of an alert. Returns the stored alert, or undefined if the alert is no longer open. */
  repeat(alert: Alert, rule: AlertRule): Promise<Alert | undefined> {
    const { id, repeats } = alert;
    const change = `UPDATE alerts SET repeats = repeats + 1, repeated_at = ?, ${withChannels}
      WHERE id = ? AND status = 'open' AND repeats = ? RETURNING ${columns}`;
    const same = `SELECT ${columns} FROM alerts WHERE id = ? AND status = 'open'`;
    return this.#write(alert, async (transaction) => {
      const row = await transaction.get(change, now(), channelsOf(rule), id, repeats);
      if (row) this.#emit('alert.repeated', fromRow(row), transaction);
      // The update changes no row if another broker has already counted this repeat.
      const stored = row ?? (await transaction.get(same, id));
      return stored && fromRow(stored);
    });
  }

  /**
   * Acknowledges an open alert. If the alert is acknowledged already, a call with a different note replaces the stored
   * note, key and time, and emits no event. Returns the alert as it is afterwards; undefined if it does not exist.
   */
  acknowledge(id: string, note: string | null, caller: Caller): Promise<Alert | undefined> {
    const change = `UPDATE alerts SET status = 'acknowledged', acknowledged_at = ?, acknowledged_by = ?, note = ?
      WHERE id = ? AND status = ? RETURNING ${columns}`;
    return this.#history.write(async (transaction) => {
      const before = await this.find(id, transaction);
      const isOpen = before?.status === 'open';
      const hasNewNote = before?.status === 'acknowledged' && note !== null && note !== before.note;
      if (!isOpen && !hasNewNote) return before;
      const row = await transaction.get(change, now(), caller.key_id, note, id, before.status);
      if (!row) return await this.find(id, transaction);
      const alert = fromRow(row);
      if (isOpen) this.#emit('alert.acknowledged', alert, transaction);
      caller.commit(transaction, { alert_id: alert.id });
      return alert;
    });
  }

  async page(input: Input<Api['alerts']['list']>, caller: Caller): Promise<Page<Alert>> {
    const { items, total } = await pageOfRows(
      this.#history,
      { table: 'alerts', columns, counted, tie: ['rowid'], findBy: ['rule_id', 'machine_id', 'status'] },
      [reachableOnly(caller.reachable()), ...filtersOf(routes.list, input)],
      input,
    );
    return { items: items.map(fromRow), total };
  }

  /** Writes a change of an alert in one transaction. Fails if another broker now owns the machine of the alert. */
  #write<T>({ machine_id }: Alert, change: (transaction: HistoryTransaction) => Promise<T>): Promise<T> {
    return this.#history.write((transaction) => {
      // A removed machine has no owner, so its owner is not checked.
      if (machine_id !== null && this.#context.state.machines.has(machine_id)) transaction.about(machine_id);
      return change(transaction);
    });
  }

  #nameOf({ machineId }: Subject): string | null {
    return machineId === null ? null : (this.#context.state.machines.get(machineId)?.name ?? null);
  }

  #emit(type: EventType, alert: Alert, transaction: Journal): void {
    const { id: alert_id, rule_id, name, kind, subject, status, message, value, reason } = alert;
    const { machine_id, machine_name } = alert;
    const machine =
      machine_id === null
        ? undefined
        : (this.#context.state.machines.get(machine_id) ?? { id: machine_id, name: machine_name ?? '' });
    const data = { alert_id, rule_id, name, kind, subject, status, message, value, reason };
    this.#context.events.emit(transaction, type, machine, data);
  }
}

export function toJson({ machine_name: _, ...alert }: Alert): Served {
  const text = (at: number | null): string | null => (at === null ? null : iso(at));
  return {
    ...alert,
    created_at: iso(alert.created_at),
    opened_at: text(alert.opened_at),
    acknowledged_at: text(alert.acknowledged_at),
    repeated_at: text(alert.repeated_at),
    resolved_at: text(alert.resolved_at),
  };
}

/** Converts a row of the table `alerts`, whose columns are the fields of Alert. */
function fromRow(row: Row): Alert {
  return row as unknown as Alert;
}
