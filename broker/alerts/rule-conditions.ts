// Decides whether the condition of an alert rule holds now. It uses the last reports, links and schedule runs, and the
// current machines, schedules and keys.
import type { MachineId } from '../../shared/api/shared-schemas.ts';
import { iso, monotonic, now } from '../../shared/clock.ts';
import { remoteFileSystems } from '../../shared/network-file-system-types.ts';
import { isOlder, version } from '../../shared/version.ts';
import type { Cluster } from '../cluster/index.ts';
import { machinesOfSchedule, reaches } from '../keys/rights.ts';
import type { Presence } from '../presence/index.ts';
import { percentOf, type Report } from '../presence/metrics-report.ts';
import type { MachineFacts } from '../presence/stored-facts-and-metrics.ts';
import type { ScheduleRecords, ScheduleRun } from '../schedules/run-records.ts';
import type { AlertRule, State } from '../state/index.ts';
import type { Subject } from './alert-records.ts';
import { isAboutBroker } from './rule-handlers.ts';

/** A certificate of the broker: the one of the REST API, or the one of the broker's own certificate authority. */
export interface Certificate {
  id: 'tls' | 'authority';
  /** Time at which the certificate expires, in milliseconds since 1970. */
  expires: number;
}

export interface ConditionServices {
  state: State;
  presence: Presence;
  machineFacts: MachineFacts;
  scheduleRuns: ScheduleRecords;
  certificates(): Promise<Certificate[]>;
  /** The owners of machines and tasks if several brokers share a database; otherwise undefined. */
  cluster: Pick<Cluster, 'claims' | 'owns'> | undefined;
}

/**
 * Name of the task to evaluate rules about keys and certificates, and to resolve alerts about removed machines. Only
 * one of several brokers claims this task.
 */
export const brokerRules = 'broker-rules';

export interface Observation {
  /**
   * True if the condition holds, false if it does not. Undefined leaves the alert as it is, for example because the
   * broker does not know the present value, or because the value is between `recover` and `above`.
   */
  holds: boolean | undefined;
  /** Milliseconds for which the condition has held already, as far as is known. */
  since?: number;
  value: number | null;
  message: string;
}

const unclear: Observation = { holds: undefined, value: null, message: '' };
const fine: Observation = { holds: false, value: null, message: '' };
/**
 * Milliseconds for which a machine may be without a link after this broker started or took over the machine. The
 * machine does not count as offline meanwhile, because it needs time to link again.
 */
export const returnMs = 60_000;

export class Conditions {
  readonly #services: ConditionServices;
  readonly #started = monotonic();
  /** Time at which this broker took over a machine from another broker, in milliseconds of the monotonic clock. */
  readonly #adoptedAt = new Map<string, number>();
  /**
   * The last ended run of each schedule on each machine. Skipped and cancelled runs do not count. Undefined until a
   * rule about schedules exists.
   */
  #runs: Map<string, ScheduleRun> | undefined;
  /** Settles when `#runs` has been read. */
  #loading: Promise<void> | undefined;
  #certificates: readonly Certificate[] = [];

  constructor(services: ConditionServices) {
    this.#services = services;
  }

  /** Reads the data that a kind of rule needs. Runs of schedules are not read again if they are in memory. */
  async load(kind: AlertRule['kind']): Promise<void> {
    if (kind === 'certificate') this.#certificates = await this.#services.certificates();
    if (kind !== 'schedule') return;
    this.#runs ??= new Map();
    // Rules that are evaluated at the same time share one read.
    this.#loading ??= this.#readRuns(this.#scheduled());
    await this.#loading.catch((error: unknown) => {
      this.#loading = undefined;
      throw error;
    });
  }

  /** Called when this broker has become the owner of these machines. Reads the last runs of their schedules. */
  async adopt(machineIds: readonly string[]): Promise<void> {
    for (const id of machineIds) this.#adoptedAt.set(id, monotonic());
    if (!this.#runs) return;
    // The former owner has recorded runs that this broker has not seen, so the runs of these machines are read again.
    const adopted = new Set(machineIds);
    for (const [key, { machine_id }] of this.#runs) if (adopted.has(machine_id)) this.#runs.delete(key);
    await this.#readRuns(this.#scheduled().filter(({ machineId }) => adopted.has(machineId)));
  }

  async #readRuns(scheduled: { id: string; machineId: MachineId }[]): Promise<void> {
    const on = scheduled.map(({ id, machineId }) => ({ schedule_id: id, machine_id: machineId }));
    const runs = await this.#services.scheduleRuns.lastOutcomes(on);
    // A run that ended during this read is already in #runs. It is newer than the row that was read, so it stays.
    for (const run of runs) if (!this.#runs?.has(keyOfRun(run))) this.#runs?.set(keyOfRun(run), run);
  }

  drop(machineId: string): void {
    this.#adoptedAt.delete(machineId);
  }

  /** True if another broker evaluates the rules about a subject. */
  isElsewhere({ machineId }: Subject): boolean {
    const { cluster, state } = this.#services;
    if (!cluster) return false;
    const isOfMachine = machineId !== null && state.machines.has(machineId);
    return isOfMachine ? !cluster.owns(machineId) : !cluster.claims.has(brokerRules);
  }

  /** Stores the outcome of a run in memory. Runs that were skipped or cancelled, or have not ended, are ignored. */
  ran(run: ScheduleRun): void {
    if (['skipped', 'cancelled', 'running'].includes(run.status)) return;
    // A run may end after a run that began later. The later one stays the last run, unless it only seems to be later
    // because the clock was ahead.
    const last = this.#runs?.get(keyOfRun(run))?.decided_at ?? 0;
    if (last > run.decided_at && last <= now()) return;
    this.#runs?.set(keyOfRun(run), run);
  }

  subjects(rule: AlertRule): Subject[] {
    const { machines, keys } = this.#services.state;
    if (rule.kind === 'certificate') return this.#certificates.map(({ id }) => ({ id, machineId: null }));
    if (rule.kind === 'key') return [...keys.keys()].map((id) => ({ id, machineId: null }));
    const all =
      rule.kind === 'schedule'
        ? this.#scheduled()
        : [...machines.values()].map(({ id }) => ({ id, machineId: id }));
    return all.filter((one) => this.covers(rule, one));
  }

  /** Returns all pairs of a schedule and one of its machines. */
  #scheduled(): { id: string; machineId: MachineId }[] {
    const { state } = this.#services;
    return [...state.schedules.values()].flatMap((one) =>
      machinesOfSchedule(one, state).map((machineId) => ({ id: one.id, machineId })),
    );
  }

  /** Returns true if the subject exists and the rule watches it. */
  covers(rule: AlertRule, subject: Subject): boolean {
    const { machineId } = subject;
    if (!this.exists(rule.kind, subject)) return false;
    return machineId === null ? isAboutBroker(rule.kind) : reaches(rule, machineId, this.#services.state);
  }

  exists(kind: AlertRule['kind'], { id, machineId }: Subject): boolean {
    const { machines, schedules, keys } = this.#services.state;
    if (kind === 'certificate') return true;
    if (kind === 'key') return keys.has(id);
    const machine = machineId === null ? undefined : machines.get(machineId);
    if (kind !== 'schedule' || !machine) return machine !== undefined;
    const schedule = schedules.get(id);
    if (!schedule?.tags) return schedule?.machine_id === machineId;
    return schedule.tags.every((tag) => machine.tags.includes(tag));
  }

  observe(rule: AlertRule, subject: Subject): Observation {
    if (this.isElsewhere(subject)) return unclear;
    if (rule.kind === 'certificate') return this.#certificate(rule, subject);
    if (rule.kind === 'key') return this.#key(rule, subject);
    if (rule.kind === 'schedule') return this.#schedule(subject);
    if (subject.machineId === null) return unclear;
    if (rule.kind === 'offline') return this.#offline(subject.machineId);
    if (rule.kind === 'agent_outdated') return this.#agent(subject.machineId);
    return this.#measured(rule, subject.machineId);
  }

  #nameOf(machineId: MachineId): string {
    return this.#services.state.machines.get(machineId)?.name ?? machineId;
  }

  #offline(machineId: MachineId): Observation {
    const { presence, machineFacts } = this.#services;
    if (presence.online(machineId)) return fine;
    const running = monotonic() - (this.#adoptedAt.get(machineId) ?? this.#started);
    // The machine counts as offline at the earliest `returnMs` after this broker started or took over the machine. The
    // reason is that this broker did not see whether the machine had a link before the start or takeover.
    const since = Math.min(machineFacts.silence(machineId), running);
    const message = `${this.#nameOf(machineId)} is offline`;
    return { holds: true, since: Math.min(since, running - returnMs), value: null, message };
  }

  #agent(machineId: MachineId): Observation {
    const { presence, machineFacts } = this.#services;
    const found = machineFacts.of(machineId)?.agent_version;
    if (found === undefined || !presence.online(machineId)) return unclear;
    const message = `the agent of ${this.#nameOf(machineId)} has version ${found}, which is older than version ${version} of the broker`;
    return { holds: isOlder(found, version), value: null, message };
  }

  #measured(rule: AlertRule, machineId: MachineId): Observation {
    const { presence, machineFacts } = this.#services;
    const report = machineFacts.allowedReport(machineId);
    if (!report || !presence.online(machineId)) return unclear;
    const { above, recover, kind } = rule;
    if (above === null || recover === null) return unclear;
    const measured = measure(rule, report);
    if (!measured) return unclear;
    const value = Math.round(measured.value * 100) / 100;
    const unit = kind === 'load' ? '' : ' %';
    const what = `${measured.what} of ${this.#nameOf(machineId)}`;
    const message = `${what} is ${value}${unit}, above ${above}${unit}`;
    return { holds: value > above ? true : value <= recover ? false : undefined, value, message };
  }

  #schedule({ id, machineId }: Subject): Observation {
    const schedule = this.#services.state.schedules.get(id);
    const run = this.#runs?.get(`${id} ${machineId}`);
    if (!schedule || !run || machineId === null) return unclear;
    if (run.status === 'completed') return fine;
    const name = `schedule ${schedule.name} on ${this.#nameOf(machineId)}`;
    if (run.status === 'missed') return { holds: true, value: null, message: `${name} did not run` };
    const why = run.reason ?? (run.status === 'failed' ? `exit code ${run.exit_code ?? -1}` : run.status);
    return { holds: true, value: run.exit_code, message: `${name} failed: ${why}` };
  }

  #key({ before }: AlertRule, { id }: Subject): Observation {
    const key = this.#services.state.keys.get(id);
    if (!key?.expires_at) return fine;
    const left = Date.parse(key.expires_at) - now();
    // A key that has already expired opens no new alert, and its open alert stays open.
    if (left <= 0) return unclear;
    const message = `API key ${key.name} expires at ${key.expires_at}`;
    return { holds: left <= (before ?? 0), value: null, message };
  }

  #certificate({ before }: AlertRule, { id }: Subject): Observation {
    const certificate = this.#certificates.find((one) => one.id === id);
    if (!certificate) return unclear;
    const name = id === 'tls' ? 'the TLS certificate of the REST API' : 'the broker’s certificate authority';
    const message = `${name} expires at ${iso(certificate.expires)}`;
    return { holds: certificate.expires - now() <= (before ?? 0), value: null, message };
  }
}

interface Measured {
  what: string;
  value: number;
}

/** Returns the value that a rule watches; undefined if the report does not contain it. */
function measure({ kind, mount }: AlertRule, report: Report): Measured | undefined {
  if (kind === 'cpu') return { what: 'CPU usage', value: report.cpu_usage };
  if (kind === 'load') return { what: 'load average', value: report.load_average[0] ?? 0 };
  if (kind === 'memory') return { what: 'memory usage', value: percentOf(report.memory) };
  if (mount !== null) return measureDisks(mount, report);
  // An agent leaves out the file system of `/` while it cannot measure it.
  return report.disk.total > 0 ? { what: 'disk usage', value: percentOf(report.disk) } : undefined;
}

/**
 * Returns the usage of the file system that is mounted at `mount`; for `*`, of the fullest file system. With `*`, file
 * servers do not count, except at `/`. A full file server would open an alert for each machine that has mounted it.
 */
function measureDisks(mount: string, { disks }: Report): Measured | undefined {
  const fitting = disks.filter((one) =>
    mount === '*' ? one.mount === '/' || !remoteFileSystems.test(one.filesystem) : one.mount === mount,
  );
  const used = fitting.flatMap(({ mount: at, space }) => (space ? [{ at, value: percentOf(space) }] : []));
  const [fullest] = used.toSorted((a, b) => b.value - a.value);
  return fullest && { what: `disk usage at ${fullest.at}`, value: fullest.value };
}

const keyOfRun = ({ schedule_id, machine_id }: ScheduleRun): string => `${schedule_id} ${machine_id}`;
