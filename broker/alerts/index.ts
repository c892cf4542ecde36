// Alerts: watches machines, schedules and expiry dates by rules, and serves the alerts that these rules open.

import type { Caller, Handlers } from '../../shared/api/route-table.ts';
import { AppError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import type { Cluster } from '../cluster/index.ts';
import { DeliveryQueue, type RetrySettings } from '../deliveries/delivery-queue.ts';
import type { Deliveries } from '../deliveries/index.ts';
import type { RightsOf } from '../deliveries/key-rights-types.ts';
import type { Events } from '../event-log.ts';
import { notFound } from '../find-or-not-found.ts';
import type { History } from '../history/history-database.ts';
import { type Alert, AlertRecords, toJson } from './alert-records.ts';
import { ChannelHandlers } from './channel-handlers.ts';
import { ChannelReceivers } from './deliver-to-channels.ts';
import { Monitor } from './evaluate-rules.ts';
import { Windows } from './maintenance-windows.ts';
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

/**
 * Creates the tables of alerts if they are missing, and the objects that use them. Alerts are deleted `keepMs`
 * milliseconds after they were resolved.
 */
export async function createAlerts(services: AlertServices, settings: AlertSettings, log: Logger) {
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
  const windows = new Windows(state);
  const monitor = new Monitor(services, records, windows, log);
  cluster?.join(monitor);
  cluster?.claims.join({ names: () => [brokerRules], claimed: () => void monitor.claimed() });
  return {
    records,
    queue,
    handlers: {
      alertRules: ruleHandlers(state),
      alertChannels: new ChannelHandlers({ ...services, receivers, queue }),
      maintenanceWindows: windows.handlers,
      alerts: alertHandlers(records, monitor),
    },
    /** Starts to evaluate rules and to send waiting notifications. */
    async start(): Promise<void> {
      await digest.start();
      await queue.start();
      await monitor.start();
    },
    /**
     * Stops evaluating rules and making notifications. The broker calls this before it closes its links. Otherwise the
     * closed links could open alerts.
     */
    stop(): void {
      monitor.stop();
      digest.stop();
    },
  };
}

function alertHandlers(records: AlertRecords, monitor: Monitor): Handlers['alerts'] {
  return {
    async list(input, caller) {
      const { items, total } = await records.page(input, caller);
      return { items: items.map(toJson), total };
    },
    get: async ({ alert_id }, caller) => toJson(visible(await records.find(alert_id), alert_id, caller)),
    async acknowledge({ alert_id, note = null }, caller) {
      visible(await records.find(alert_id), alert_id, caller);
      const alert = visible(await records.acknowledge(alert_id, note, caller), alert_id, caller);
      if (alert.status !== 'acknowledged') {
        const message = `alert ${alert_id} is ${alert.status}, so there is nothing to acknowledge`;
        throw new AppError('conflict', message, { alert_id });
      }
      monitor.acknowledged(alert);
      return toJson(alert);
    },
  };
}

/**
 * Returns the alert. Throws alert_not_found if there is none, and forbidden if it is about the broker and the caller's
 * key is limited to some machines.
 */
function visible(alert: Alert | undefined, alert_id: string, caller: Caller): Alert {
  if (!alert) throw notFound('alert', alert_id);
  if (alert.machine_id !== null || caller.reachable() === undefined) return alert;
  const message = `alert ${alert_id} is about the broker: use a key that is not limited to some machines`;
  throw new AppError('forbidden', message, { alert_id });
}
