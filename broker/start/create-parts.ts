// Creates the parts of a broker, each after the parts that it depends on, and registers how each is closed.
import { join } from 'node:path';
import type { Handlers } from '../../shared/api/route-table.ts';
import type { MachineId } from '../../shared/api/shared-schemas.ts';
import type { Logger } from '../../shared/logger.ts';
import { Quota } from '../../shared/quota.ts';
import { createPackages, removeUnfinishedUploads } from '../agent-packages/index.ts';
import { createAlerts, type DigestTimes, defaultTimes } from '../alerts/index.ts';
import { createAudit } from '../audit-log.ts';
import { createBackups } from '../backup.ts';
import { type Authority, authorityFiles, loadAuthority } from '../ca-and-broker-certificates.ts';
import { createTrustedProxies } from '../client-address.ts';
import type { Cluster } from '../cluster/index.ts';
import type { OtherBrokers, Owners } from '../cluster/peers/owner-interfaces.ts';
import { createCommands } from '../commands/command-handlers.ts';
import { savedCommandHandlers } from '../commands/saved-command-handlers.ts';
import type { ConnectionLimits } from '../connection-limiter.ts';
import type { RetrySettings } from '../deliveries/delivery-queue.ts';
import { createDeliveries, type Deliveries, type DeliverySettings } from '../deliveries/index.ts';
import { vaultFile } from '../deliveries/secret-encryption.ts';
import { Events } from '../event-log.ts';
import { fileHandlers } from '../files/file-handlers.ts';
import type { History } from '../history/history-database.ts';
import { createMetrics, type Status, serviceHandlers } from '../http/info-health-metrics-and-docs.ts';
import { Inventories } from '../inventory/index.ts';
import { JoinTokens } from '../join-tokens-and-enrolment.ts';
import { Keys } from '../keys/index.ts';
import { machinesOfSchedule, mayRun, mayWatch, rightsIn, whileAttachable } from '../keys/rights.ts';
import type { Pings } from '../link/http2-ping-client-and-answer-connections.ts';
import type { LinkSettings } from '../link/link-times-and-limits.ts';
import { LiveUpdates } from '../live/index.ts';
import { Logins } from '../logins/index.ts';
import { machineHandlers } from '../machines/machine-handlers.ts';
import { recordMachineEvents } from '../machines/online-offline-events.ts';
import { prometheusHandlers } from '../machines/prometheus-targets-and-metrics.ts';
import { tagHandlers } from '../machines/tag-handlers.ts';
import { Presence } from '../presence/index.ts';
import { MachineFacts } from '../presence/stored-facts-and-metrics.ts';
import { createAuditRecorder } from '../request-checks/audit-request.ts';
import type { Lookups } from '../request-checks/authorize-and-perform.ts';
import { Idempotency } from '../request-checks/idempotency.ts';
import { createRateLimits } from '../request-checks/rate-limits.ts';
import { ScheduleRecords } from '../schedules/run-records.ts';
import { Schedules } from '../schedules/schedule-handlers.ts';
import { Sessions } from '../sessions/session-handlers.ts';
import type { BrokerSettings } from '../settings-schema.ts';
import type { Declared, Schedule, State } from '../state/index.ts';
import { Upgrades } from '../upgrades/upgrade-handlers.ts';
import { createWebhooks, type Webhooks } from '../webhooks/index.ts';
import { createPeerClients } from './create-peer-clients.ts';
import { followDeliveries, followOthers } from './follow-other-brokers.ts';
import { assertAuthority, createStores, type StoreOpening } from './open-state-and-history.ts';
import { expiryDates } from './rest-api-certificate.ts';

/**
 * Settings for tests and benchmarks: shorter times, other name resolution, and access to the stores before the start.
 */
export interface Tuning {
  link?: Partial<LinkSettings>;
  proofMs?: number;
  pings?: Pings;
  resolve?: NonNullable<DeliverySettings['resolve']>;
  onStores?(stores: { state: State; history: History; events: Events }): void;
  stalledMs?: number;
  /** Directory of the built console. */
  console?: string;
  /** Limits of the HTTP port: the number of connections, and the time for the headers of a first request. */
  connections?: ConnectionLimits;
  silentMs?: number;
  /** Delays of notifications about alerts. */
  alerts?: Partial<DigestTimes>;
  certificateMs?: number;
  /**
   * For tests of several brokers without a shared database: the owners of machines, and the address of the peer port.
   */
  cluster?: { owners: Owners; listen: { host: string; port: number } };
}

export type Closers = StoreOpening['closers'];

/** The stores that all kinds of resources share. */
interface Stores {
  state: State;
  history: History;
  events: Events;
  presence: Presence;
  machineFacts: MachineFacts;
  /** The other brokers on the same database; undefined with a single broker. */
  cluster: Cluster | undefined;
  others: OtherBrokers | undefined;
}

type Nouns = Awaited<ReturnType<typeof createNouns>> & { deliveries: Deliveries; webhooks: Webhooks };
export type Parts = Awaited<ReturnType<typeof createParts>>;

export interface Opening extends StoreOpening {
  tuning: Tuning;
  status: Status;
  /** Returns the URL at which clients reach this broker; empty until the broker listens. */
  publicUrl(): string;
}

/**
 * Maximum total size, in bytes, of the file contents in memory that wait to be sent as JSON. Each byte of content needs
 * about five bytes of memory.
 */
const maxContents = 64 * 1024 * 1024;

/** Creates all parts. Throws StartError if the data directory cannot be used. */
export async function createParts(opening: Opening) {
  const { settings, closers, status, publicUrl, log } = opening;
  const stored = await createStores(opening);
  const { state, history, untouched, cluster, countTogether, started } = stored;
  const remedy =
    settings.peer_listen && 'run farhand-broker cluster join to get the missing file from another broker';
  const authority = await loadAuthority(settings.data_dir, untouched, remedy);
  await assertAuthority(authority, stored);
  const events = await Events.open(history, settings.keep_events, cluster !== undefined);
  const deliveries = await deliveriesOf(opening, history);
  const webhooks = webhooksOf(opening, { state, history, events, claims: cluster?.claims }, deliveries);
  const machineFacts = await MachineFacts.open(history);
  closers.push(() => machineFacts.close());
  const owners = opening.tuning.cluster?.owners ?? cluster;
  const peerClients = owners && (await createPeerClients(opening, authority, owners));
  const others = peerClients?.others;
  const stores = { state, history, events, presence: new Presence(), machineFacts, cluster, others };
  closers.push(await recordMachineEvents(stores, log));
  // An earlier broker process may have left entries in the outbox. createNouns() writes them to the history. Some of
  // them belong in the tables of events, machine facts and idempotency, so these tables are created first.
  const idempotency = await Idempotency.open(history, cluster?.brokerId);
  const nouns = { ...(await createNouns(opening, stores, authority, deliveries)), deliveries, webhooks };
  const recorder = createAuditRecorder({ history, record: nouns.audit.record }, log);
  closers.push(() => recorder.close());
  const metrics = createMetrics(() => ({ online: stores.presence.count, registered: state.machines.size }));
  const isAway = (): boolean => !history.connection.isReady || (cluster?.isCutOff ?? false);
  const service = {
    ...serviceHandlers(status, authority, publicUrl, metrics, isAway),
    ...prometheusHandlers({ ...stores, publicUrl }),
  };
  if (cluster) {
    followOthers(cluster, stores, log);
    cluster.follow(() => idempotency.release());
    await followDeliveries(cluster, deliveries, [webhooks.queue, nouns.alerts.queue]);
  }
  await started?.();
  await cluster?.start();
  const handlers = { ...handlersOf({ ...stores, ...nouns }, log), service };
  const proxies = createTrustedProxies(settings.trusted_proxy);
  return {
    ...stores,
    ...nouns,
    ...{ owners, peerClients },
    authority,
    idempotency,
    recorder,
    metrics,
    handlers,
    lookups: lookupsOf(stores, nouns),
    backups: await createBackups(settings.data_dir, stores, [...authorityFiles, vaultFile]),
    proxies,
    rates: createRateLimits({ limit: settings.rate_limit, isShared: proxies.isShared, countTogether }),
  };
}

async function deliveriesOf({ settings, tuning, closers }: Opening, history: History): Promise<Deliveries> {
  const deliveries = await createDeliveries(history, {
    directory: settings.data_dir,
    allow: settings.webhook_allow,
    keepMs: settings.keep_events,
    resolve: tuning.resolve,
  });
  closers.push(() => deliveries.sender.close());
  return deliveries;
}

/** Alert channels get at least 10 attempts per delivery. Unlike a webhook, a channel is never disabled by failures. */
function retryOfAlerts({ webhook_attempts, webhook_retry }: BrokerSettings): RetrySettings {
  return { attempts: Math.max(10, webhook_attempts), waits: webhook_retry };
}

function webhooksOf(
  { settings, tuning, closers, log }: Opening,
  stores: Pick<Stores, 'state' | 'history' | 'events'> & { claims: Cluster['claims'] | undefined },
  deliveries: Deliveries,
): Webhooks {
  const retry = { attempts: settings.webhook_attempts, waits: settings.webhook_retry };
  const webhooks = createWebhooks({ ...stores, rightsOf: rightsIn(stores.state) }, deliveries, retry, log);
  closers.push(() => webhooks.queue.close());
  tuning.onStores?.(stores);
  return webhooks;
}

async function createNouns(
  { settings, tuning, status, publicUrl, closers, log }: Opening,
  stores: Stores,
  authority: Authority,
  deliveries: Deliveries,
) {
  const { state, history, events } = stores;
  const keepMs = settings.keep_history;
  const logins = new Logins(state, log);
  closers.push(() => logins.close());
  const keys = await Keys.open(state, history, (caller) => logins.ofCaller(caller), log);
  closers.push(() => keys.close());
  const uploads = join(settings.data_dir, 'packages');
  await removeUnfinishedUploads(uploads);
  const packages = createPackages(settings.packages, uploads, () => ({ ...status, url: publicUrl() }));
  const joinTokens = new JoinTokens({ state, events, fingerprint: authority.fingerprint, packages });
  const audit = await createAudit(history, settings.keep_audit);
  const records = await ScheduleRecords.open(stores, keepMs);
  const commandServices = { ...stores, mayRun: mayRun(state), ended: records.ended };
  const output = { directory: join(settings.data_dir, 'output'), keepMs, keepBytes: settings.keep_output };
  const inventories = await Inventories.open(stores, log);
  // The outbox may have changes of an earlier broker process that the history lacks. They must reach the history
  // before a command ends or a schedule runs.
  await state.drainTo((entries) =>
    history.applyOutbox(entries).catch((error: unknown) => {
      log.error({ err: error }, 'changes in state.json could not be written to history.db; trying again');
      throw error;
    }),
  );
  const commands = await createCommands(commandServices, output, log);
  closers.push(() => commands.close());
  const sessionServices = { ...stores, audit: audit.record, whileAttachable: whileAttachable(state) };
  const sessions = await Sessions.open(sessionServices, { keepMs, publicUrl }, log);
  const schedules = await Schedules.open(
    {
      ...{ ...commandServices, commands, records, rightsOf: rightsIn(state) },
      mayWatch: mayWatch(state),
      machinesOf: (one) => machinesOfSchedule(one, state),
    },
    log,
  );
  // With --local no agent can connect, so schedules wait for the next start without --local.
  if (settings.local) schedules.stop();
  const live = new LiveUpdates({ ...stores, commands });
  const certificates = () => expiryDates(settings, authority);
  const alerts = await createAlerts(
    { ...stores, deliveries, rightsOf: rightsIn(state), scheduleRuns: records, certificates },
    { keepMs, retry: retryOfAlerts(settings), times: { ...defaultTimes, ...tuning.alerts } },
    log,
  );
  closers.push(() => alerts.queue.close());
  const upgrades = await Upgrades.open({ ...stores, packages, rightsOf: rightsIn(state) }, keepMs, log);
  return {
    ...{ keys, logins, live, inventories, packages, joinTokens, commands, schedules, sessions },
    ...{ alerts, audit, upgrades, scheduleRuns: records },
  };
}

function handlersOf(parts: Stores & Nouns, log: Logger): Omit<Handlers, 'service'> {
  const contents = new Quota(
    maxContents,
    'the broker is already sending too many files as JSON; try again later',
  );
  const { cluster, history } = parts;
  return {
    brokers: {
      async list(input) {
        if (!cluster) return { items: [], total: 0 };
        // This code is loaded only here, because a single broker does not need it.
        const { listBrokers } = await import('../cluster/list-brokers.ts');
        return listBrokers(input, history, cluster.brokerId);
      },
    },
    machines: machineHandlers({ ...parts, brokerOf: (id) => cluster?.brokerOf(id) }),
    inventory: parts.inventories.handlers,
    tags: tagHandlers(parts.state),
    packages: parts.packages.handlers,
    joinTokens: parts.joinTokens.handlers,
    files: fileHandlers({ ...parts, log, contents }),
    commands: parts.commands.handlers,
    batches: parts.commands.batches.handlers,
    savedCommands: savedCommandHandlers(parts.state),
    upgrades: parts.upgrades.handlers,
    schedules: parts.schedules.handlers,
    sessions: parts.sessions.handlers,
    events: parts.events.handlers,
    keys: parts.keys.handlers,
    logins: parts.logins.handlers,
    live: parts.live.handlers,
    webhooks: parts.webhooks.handlers,
    ...parts.alerts.handlers,
    audit: parts.audit.handlers,
  };
}

function lookupsOf(stores: Stores, nouns: Nouns): Lookups {
  const { alerts, commands, deliveries, scheduleRuns, sessions, upgrades } = nouns;
  return {
    // A list can also be filtered by the id of a removed machine, because its facts are still stored.
    machine: {
      present: (id, { machines }, filters) =>
        machines.has(id) || (filters && stores.machineFacts.of(id)) ? {} : undefined,
    },
    command: {
      present: (id) => belongingTo(commands.machineOfOpen(id)),
      // A list can also be filtered by the id of a deleted command, because the schedule run still has this id.
      async stored(id, filters) {
        const { machine, directory } = (await commands.whereIs(id)) ?? {};
        const found = belongingTo(machine ?? (filters ? await scheduleRuns.machineOfCommand(id) : undefined));
        return found && { ...found, directory };
      },
    },
    upgrade: { stored: async (id) => belongingTo(...(await upgrades.machinesOf(id))) },
    batch: { stored: async (id) => belongingTo(...(await commands.batches.machinesOf(id))) },
    schedule: {
      present: (id, declared) => foundSchedule(declared.schedules.get(id), declared),
      stored: async (id) => belongingTo(...(await scheduleRuns.machinesOf(id))),
    },
    saved_command: { present: (id, { saved_commands }) => saved_commands.get(id) && {} },
    run: { stored: async (id) => belongingTo((await scheduleRuns.find(id))?.machine_id) },
    session: {
      present: (id) => belongingTo(sessions.machineOf.open(id)),
      stored: async (id) => belongingTo(await sessions.machineOf.stored(id)),
    },
    key: { present: (id, { keys }) => keys.get(id) && {} },
    login: { present: (id, { logins }) => logins.get(id) && {} },
    join_token: { present: (id, { join_tokens }) => join_tokens.get(id) && {} },
    webhook: { present: (id, declared) => declared.webhooks.get(id) && {} },
    delivery: { stored: async (id) => (await deliveries.store.find(id)) && {} },
    window: {
      present: (id, { maintenance_windows }) => {
        const window = maintenance_windows.get(id);
        return window && (belongingTo(...(window.tags ? [] : (window.machine_ids ?? []))) ?? {});
      },
      stored: async (id, filters) =>
        filters && (await alerts.records.has('window_id', id)) ? {} : undefined,
    },
    channel: { present: (id, { alert_channels }) => alert_channels.get(id) && {} },
    alert: {
      stored: async (id) => {
        const alert = await alerts.records.find(id);
        // An alert about the broker has no machine.
        return alert?.machine_id === null ? {} : belongingTo(alert?.machine_id);
      },
    },
    rule: {
      present: (id, { alert_rules }) => {
        const rule = alert_rules.get(id);
        return rule && (belongingTo(...(rule.tags ? [] : (rule.machine_ids ?? []))) ?? {});
      },
      stored: async (id, filters) => (filters && (await alerts.records.has('rule_id', id)) ? {} : undefined),
    },
  };
}

function foundSchedule(schedule: Schedule | undefined, declared: Declared) {
  if (!schedule) return undefined;
  const machines = machinesOfSchedule(schedule, declared);
  return schedule.tags ? { machines, ownKey: schedule.requested_by } : { machines };
}

function belongingTo(...machines: (MachineId | undefined)[]): { machines: MachineId[] } | undefined {
  const known = machines.filter((machine) => machine !== undefined);
  return known.length === 0 ? undefined : { machines: known };
}
