// Alerts: watches machines, schedules and expiry dates by rules, and serves the alerts that these rules open.

import type { Api, Caller, Handlers, Input } from '../../shared/api/route-table.ts';
import { AppError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Cluster } from '../cluster/owners.ts';
import { DeliveryQueue, type RetrySettings } from '../deliveries/delivery-queue.ts';
import type { Deliveries } from '../deliveries/index.ts';
import type { RightsOf } from '../deliveries/rights-of-key.ts';
import type { Events } from '../events.ts';
import type { History } from '../history/history.ts';
import type { AlertChannel } from '../state/in-memory-state.ts';
import { type Alert, AlertRecords, toJson } from './alert-records.ts';
import { ChannelHandlers } from './channel-handlers.ts';
import { ChannelReceivers } from './deliver-to-channels.ts';
import { Windows } from './maintenance-windows.ts';
import { Monitor } from './monitor.ts';
import { Digest, type DigestTimes } from './notification-digest.ts';
import { brokerRules, type ConditionServices } from './rule-conditions.ts';
import { ruleHandlers } from './rule-handlers.ts';

export { type DigestTimes, defaultTimes } from './notification-digest.ts';
export type { Certificate } from './rule-conditions.ts';

interface AlertServices extends ConditionServices {
  cluster: Cluster | undefined;
  history: History;
  events: Events;
  deliveries: Deliveries;
  rightsOf: RightsOf;
}

interface AlertSettings {
  keepMs: number;
  retry: RetrySettings;
  times: DigestTimes;
}

export class Alerts {
  readonly ruleHandlers: Handlers['alertRules'];
  readonly channelHandlers: Handlers['alertChannels'];
  readonly windowHandlers: Handlers['maintenanceWindows'];
  readonly records: AlertRecords;
  readonly #monitor: Monitor;
  readonly #digest: Digest;
  readonly queue: DeliveryQueue<AlertChannel>;

  private constructor(
    services: AlertServices,
    parts: {
      records: AlertRecords;
      digest: Digest;
      receivers: ChannelReceivers;
      queue: DeliveryQueue<AlertChannel>;
    },
    log: Logger,
  ) {
    const { records, digest, queue } = parts;
    this.ruleHandlers = ruleHandlers(services.state);
    this.channelHandlers = new ChannelHandlers({ ...services, ...parts });
    this.records = records;
    this.#digest = digest;
    this.queue = queue;
    const windows = new Windows(services.state);
    this.windowHandlers = windows.handlers;
    this.#monitor = new Monitor(services, records, windows, log);
    services.cluster?.join(this.#monitor);
    services.cluster?.claims.join({
      names: () => [brokerRules],
      claimed: () => void this.#monitor.claimed(),
    });
  }

  /**
   * Creates the tables of alerts if they are missing, and the objects that use them. Alerts are deleted `keepMs`
   * milliseconds after they were resolved.
   */
  static async open(services: AlertServices, settings: AlertSettings, log: Logger): Promise<Alerts> {
    const { state, history, deliveries, rightsOf, cluster } = services;
    const { store } = deliveries;
    const records = await AlertRecords.open(services, settings.keepMs);
    const receivers = new ChannelReceivers(state, deliveries, rightsOf);
    const queue = new DeliveryQueue(
      { state, history, store, receivers, claims: cluster?.claims },
      settings.retry,
      log,
    );
    const digest = await Digest.open({ ...services, receivers, store, queue }, settings.times, log);
    return new Alerts(services, { records, digest, receivers, queue }, log);
  }

  /** Starts to evaluate rules and to send waiting notifications. */
  async start(): Promise<void> {
    await this.#digest.start();
    await this.queue.start();
    await this.#monitor.start();
  }

  /**
   * Stops evaluating rules and making notifications. The broker calls this before it closes its links. Otherwise the
   * closed links could open alerts.
   */
  stop(): void {
    this.#monitor.stop();
    this.#digest.stop();
  }

  readonly handlers: Handlers['alerts'] = {
    list: async (input, caller) => {
      const { items, total } = await this.records.page(input, caller);
      return { items: items.map(toJson), total };
    },
    get: async ({ alert_id }, caller) => toJson(found(await this.records.find(alert_id), alert_id, caller)),
    acknowledge: (input, caller) => this.#acknowledge(input, caller),
  };

  async #acknowledge({ alert_id, note = null }: Input<Api['alerts']['acknowledge']>, caller: Caller) {
    found(await this.records.find(alert_id), alert_id, caller);
    const alert = found(await this.records.acknowledge(alert_id, note, caller), alert_id, caller);
    if (alert.status !== 'acknowledged') {
      const message = `alert ${alert_id} is ${alert.status}, so there is nothing to acknowledge`;
      throw new AppError('conflict', message, { alert_id });
    }
    this.#monitor.acknowledged(alert);
    return toJson(alert);
  }
}

/**
 * Throws if the alert does not exist. Also throws if the alert is about the broker and the caller's key is
 * limited to some machines.
 */
function found(alert: Alert | undefined, alert_id: string, caller: Caller): Alert {
  if (!alert) throw new AppError('alert_not_found', `no alert has the id ${alert_id}`, { alert_id });
  if (alert.machine_id !== null || caller.reachable() === undefined) return alert;
  const message = `alert ${alert_id} is about the broker: use a key that is not limited to some machines`;
  throw new AppError('forbidden', message, { alert_id });
}
