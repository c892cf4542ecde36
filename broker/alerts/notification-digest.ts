// Collects alert steps (an alert was opened, repeated or resolved) into one notification for each channel. The
// notification also reports times in which the broker was down.
import type { EventType } from '../../shared/api/events.ts';
import { after, every, iso, monotonic, now } from '../../shared/clock.ts';
import type { Logger } from '../../shared/logger.ts';
import type { DeliveryQueue } from '../deliveries/delivery-queue.ts';
import type { DeliveryStore } from '../deliveries/delivery-store.ts';
import type { Events } from '../event-log.ts';
import {
  type History,
  type HistoryTransaction,
  jsonIn,
  type Row,
  textIn,
} from '../history/history-database.ts';
import type { Presence } from '../presence/index.ts';
import type { MachineFacts } from '../presence/stored-facts-and-metrics.ts';
import type { AlertChannel, State } from '../state/index.ts';
import type { ChannelReceivers } from './deliver-to-channels.ts';
import type { Notice, Notification } from './notification-formats.ts';

export interface DigestTimes {
  /**
   * A notification is sent when this many milliseconds have passed without a further alert step (opened, repeated or
   * resolved).
   */
  quietMs: number;
  /** Maximum time in milliseconds that an alert step waits to be sent together with further steps. */
  longestMs: number;
  /**
   * No new notification is made for this many milliseconds after the broker starts. This leaves time for machines to
   * link and for rules to be evaluated.
   */
  startMs: number;
  /** Minimum duration in milliseconds of a broker downtime that is reported. */
  downMs: number;
}

export const defaultTimes: DigestTimes = {
  quietMs: 10_000,
  longestMs: 60_000,
  startMs: 90_000,
  downMs: 120_000,
};

interface DigestServices {
  state: State;
  history: History;
  events: Events;
  presence: Presence;
  machineFacts: MachineFacts;
  receivers: ChannelReceivers;
  store: DeliveryStore;
  queue: DeliveryQueue<AlertChannel>;
  /** Defined if several brokers share the database. */
  cluster: unknown;
}

const tables = [
  `CREATE TABLE alert_notices (event_id TEXT UNIQUE, down_from INTEGER, down_until INTEGER);
  CREATE TABLE alert_marks (name TEXT PRIMARY KEY, at INTEGER NOT NULL) WITHOUT ROWID`,
  // `channel_ids` has the channels that the rule had when the alert step was written. The rule may be changed or
  // removed before the notification is made. The JSON is the same as in the table `alerts`.
  'ALTER TABLE alert_notices ADD COLUMN channel_ids TEXT',
];

/** A notification lists at most this number of alerts, and at most this number of missing machines. */
const mostListed = 100;
/** Maximum number of alert steps (opened, repeated or resolved) that one transaction reads. */
const mostNotices = 20_000;
const markMs = 30_000;
const retryMs = 5_000;
const steps: Readonly<Record<string, Notice['step']>> = {
  'alert.opened': 'opened',
  'alert.repeated': 'repeated',
  'alert.resolved': 'resolved',
};

export class Digest {
  readonly #services: DigestServices;
  readonly #times: DigestTimes;
  readonly #log: Logger;
  #earliest = Number.POSITIVE_INFINITY;
  /** Latest time to send the waiting alert steps, in milliseconds of the monotonic clock. Undefined if none waits. */
  #latest: number | undefined;
  #cancel = (): void => {};
  #stopMarks = (): void => {};
  readonly #stopListening: () => void;

  private constructor(services: DigestServices, times: DigestTimes, log: Logger) {
    this.#services = services;
    this.#times = times;
    this.#log = log;
    const { events, state, store, queue } = services;
    // The transaction that opens, repeats or resolves an alert also writes a notice for the next notification. A crash
    // therefore loses no notice.
    events.within(({ id, type, data }) => {
      if (!steps[type] || state.alert_channels.size === 0) return undefined;
      const insert = `INSERT INTO alert_notices (event_id, channel_ids)
        VALUES (?, (SELECT channel_ids FROM alerts WHERE id = ?)) ON CONFLICT DO NOTHING`;
      return (transaction) => transaction.run(insert, id, String(data.alert_id));
    });
    // Alert steps of other brokers start the timer of this broker too. If the other broker is killed before it sends a
    // notification, this broker sends it.
    this.#stopListening = events.listen(Object.keys(steps) as EventType[], () => {
      if (state.alert_channels.size > 0) this.#startTimer();
    });
    // The transaction that writes a notification also writes its delivery.
    events.within(({ id, type, timestamp, data }, machineId) => {
      if (type !== 'alert.notified') return undefined;
      const channelId = String(data.channel_id);
      return (transaction) => {
        transaction.committed(() => queue.wake(channelId));
        return store.request(channelId, { id, type, machineId, at: Date.parse(timestamp) }, transaction);
      };
    });
  }

  static async open(services: DigestServices, times: DigestTimes, log: Logger): Promise<Digest> {
    await services.history.migrate('alert_notices', tables);
    return new Digest(services, times, log);
  }

  /** Records how long the broker was down, and begins to send notifications. */
  async start(): Promise<void> {
    const { history, state } = this.#services;
    this.#earliest = monotonic() + this.#times.startMs;
    const at = now();
    const waiting = await history.write(async (transaction) => {
      const mark = await transaction.get("SELECT at FROM alert_marks WHERE name = 'alive'");
      const from = mark && Number(mark.at);
      transaction.put('alert_marks', 'name', { name: 'alive', at });
      if (from !== undefined && at - from > this.#times.downMs && state.alert_channels.size > 0)
        transaction.run('INSERT INTO alert_notices (down_from, down_until) VALUES (?, ?)', from, at);
      return await transaction.get('SELECT 1 AS n FROM alert_notices LIMIT 1');
    });
    if (waiting) this.#startTimer();
    this.#stopMarks = every(markMs, () => {
      this.#mark();
      if (this.#services.cluster) void this.#lookForOthers();
    });
  }

  /**
   * If the database has notices and no timer runs, starts the timer. An ended broker may have left these notices
   * unsent.
   */
  async #lookForOthers(): Promise<void> {
    const waiting = await this.#services.history
      .get('SELECT 1 AS n FROM alert_notices LIMIT 1')
      .catch(() => undefined);
    if (waiting && this.#latest === undefined) this.#startTimer();
  }

  stop(): void {
    this.#stopListening();
    this.#stopMarks();
    this.#cancel();
  }

  /** Records that the broker is alive. A failed write is only logged, because the next one follows soon. */
  #mark(): void {
    const { history } = this.#services;
    const row = { name: 'alive', at: now() };
    history
      .write((transaction) => transaction.put('alert_marks', 'name', row))
      .catch((error: unknown) => {
        this.#log.warn(
          { err: error },
          'could not store the time at which this broker was last alive; trying again in 30 s. If the broker crashes before that, the downtime that it later reports to alert channels is too long',
        );
      });
  }

  #startTimer(): void {
    const at = monotonic();
    this.#latest ??= at + this.#times.longestMs;
    const due = Math.max(this.#earliest, Math.min(at + this.#times.quietMs, this.#latest));
    this.#cancel();
    // Before start(), `#earliest` is infinite, so `due` is infinite too and no timer is set. start() finds the notices
    // in the database and sets the timer.
    if (Number.isFinite(due)) this.#cancel = after(Math.max(0, due - at), () => void this.#send());
  }

  async #send(): Promise<void> {
    this.#latest = undefined;
    try {
      await this.#services.history.write((transaction) => this.#notify(transaction));
    } catch (error) {
      this.#log.error({ err: error }, 'notifications of alerts could not be written; trying again in 5 s');
      this.#cancel = after(retryMs, () => void this.#send());
    }
  }

  /** Makes one notification for each channel from the alert steps in the table `alert_notices`. Deletes these rows. */
  async #notify(transaction: HistoryTransaction): Promise<void> {
    const { events, receivers } = this.#services;
    const rows = await transaction.all(
      `SELECT n.rowid AS number, n.down_from, n.down_until, n.channel_ids, e.type, e.machine_id, e.data FROM alert_notices n
       LEFT JOIN events e ON e.id = n.event_id ORDER BY n.rowid LIMIT ?`,
      mostNotices,
    );
    const last = rows.at(-1);
    if (!last) return;
    transaction.run('DELETE FROM alert_notices WHERE rowid <= ?', last.number ?? 0);
    const addressed = rows.flatMap((row) =>
      noticeIn(row).map((notice) => ({ notice, channelIds: channelsIn(row) })),
    );
    const downtimes = rows.flatMap(downtimeIn);
    for (const channel of receivers.byId.values()) {
      if (!receivers.isEnabled(channel)) continue;
      const wanted = addressed
        .filter(({ channelIds }) => channelIds === null || channelIds.includes(channel.id))
        .map(({ notice }) => notice);
      const made = this.#notification(channel, wanted, downtimes);
      if (made) events.emit(transaction, 'alert.notified', this.#machineOf(made), made);
    }
    if (rows.length === mostNotices) transaction.committed(() => this.#startTimer());
  }

  /**
   * Returns the notification for a channel; undefined if it would contain nothing that the key of the channel may read.
   */
  #notification(
    channel: AlertChannel,
    wanted: Notice[],
    downtimes: Notification['downtimes'],
  ): Notification | undefined {
    const { receivers } = this.#services;
    const counts = { opened: 0, repeated: 0, resolved: 0 };
    for (const { step } of wanted) counts[step] += 1;
    const all = {
      channel_id: channel.id,
      counts,
      alerts: wanted,
      downtimes,
      missing: this.#missing(downtimes),
    };
    const readable = receivers.readable(channel, all);
    if (readable.alerts.length + downtimes.length === 0) return undefined;
    return { ...readable, alerts: readable.alerts.slice(0, mostListed) };
  }

  /** Returns the machines that were linked when the broker went down, and are not linked now. */
  #missing(downtimes: Notification['downtimes']): Notification['missing'] {
    const { state, presence, machineFacts } = this.#services;
    const [first] = downtimes;
    if (!first) return [];
    const from = Date.parse(first.from) - 60_000;
    const away = [...state.machines.values()].filter(
      ({ id }) => !presence.online(id) && (machineFacts.of(id)?.last_seen ?? 0) >= from,
    );
    return away.slice(0, mostListed).map(({ id, name }) => ({ machine_id: id, machine_name: name }));
  }

  /**
   * Returns the machine of a notification that is about one machine only; otherwise undefined. The name of a removed
   * machine is empty, because emit() knows it.
   */
  #machineOf({ alerts, downtimes }: Notification): { id: string; name: string } | undefined {
    const ids = new Set(alerts.map(({ machine_id }) => machine_id));
    const [id] = ids;
    if (ids.size !== 1 || id === null || id === undefined || downtimes.length > 0) return undefined;
    return this.#services.state.machines.get(id) ?? { id, name: '' };
  }
}

function noticeIn(row: Row): Notice[] {
  const step = row.type === null ? undefined : steps[textIn(row, 'type')];
  // A row has no event if it is about a downtime, or if its event was deleted because of its age.
  if (step === undefined) return [];
  const data = jsonIn(row, 'data') as Record<'alert_id' | 'rule_id' | 'name' | 'message', string>;
  const { alert_id, rule_id, name, message } = data;
  const machine_id = row.machine_id === null ? null : textIn(row, 'machine_id');
  return [{ step, alert_id, rule_id, name, machine_id, message }];
}

/** Returns the ids of the channels that are notified of a step of an alert; null for all channels. */
function channelsIn(row: Row): readonly string[] | null {
  // SQL NULL: an older broker wrote the step and recorded no channels. The cast is safe: only AlertRecords writes the
  // texts.
  return row.channel_ids === null ? null : (jsonIn(row, 'channel_ids') as string[] | null);
}

function downtimeIn({ down_from, down_until }: Row): Notification['downtimes'] {
  if (down_from === null || down_from === undefined) return [];
  return [{ from: iso(Number(down_from)), until: iso(Number(down_until)) }];
}
