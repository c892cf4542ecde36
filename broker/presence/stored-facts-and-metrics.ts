// Machine facts: host name, versions, last report and last contact of each machine,
// and the history of its metrics.
import { isDeepStrictEqual } from 'node:util';
import { z } from 'zod';
import type { Metrics__Output } from '../../proto/types/farhand/agent/v1/Metrics.ts';
import { label } from '../../shared/api/shared-schemas.ts';
import { every, monotonic, nextTurn, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import type { Logger } from '../../shared/logger.ts';
import {
  type History,
  type HistoryTransaction,
  jsonIn,
  type OutboxEntry,
  type Row,
  textIn,
} from '../history/history-database.ts';
import type { Installation, LastUpgrade } from './installation-report.ts';
import { LastHour } from './metrics-last-hour.ts';
import { percentOf, type Report, reportOf } from './metrics-report.ts';

const hostSchema = z.object({
  hostname: label(1, 255),
  os: label(1, 64),
  arch: label(1, 64),
  agent_version: label(1, 64),
  capabilities: z.array(label(1, 64)).max(64),
});

export interface Facts extends z.output<typeof hostSchema> {
  ip: string;
  /** Time of the machine's last message, in milliseconds since 1970. */
  last_seen: number;
  report: Report | undefined;
  /** Absent for agents whose version does not support upgrades by the broker. */
  installation?: Installation | undefined;
}

interface FactsEntry extends OutboxEntry {
  kind: 'machine_facts';
  machine_id: string;
  facts: Omit<Facts, 'report'>;
}

const tables = [
  `CREATE TABLE machine_facts (
    machine_id TEXT PRIMARY KEY, facts TEXT NOT NULL, last_seen INTEGER NOT NULL, report TEXT
  ) WITHOUT ROWID;
  CREATE TABLE metrics (
    machine_id TEXT NOT NULL, at INTEGER NOT NULL, cpu_usage REAL NOT NULL,
    memory_used REAL NOT NULL, memory_total REAL NOT NULL, disk_used REAL NOT NULL, disk_total REAL NOT NULL,
    load_average REAL NOT NULL
  );
  CREATE UNIQUE INDEX metrics_by_machine ON metrics (machine_id, at);
  CREATE INDEX metrics_by_time ON metrics (at)`,
];

/** Creates the first facts of a machine that joins, as an outbox entry. Commit the entry together with the machine. */
export function firstFacts(
  machineId: string,
  host: Omit<Facts, 'last_seen' | 'report' | 'capabilities'>,
): FactsEntry {
  const facts = { ...host, capabilities: [], last_seen: now() };
  return { kind: 'machine_facts', machine_id: machineId, facts };
}

const metricsPoint = [
  'cpu_usage',
  'memory_used',
  'memory_total',
  'disk_used',
  'disk_total',
  'load_average',
] as const;
/** Averages of the metrics over one interval, which begins at `at`. */
export type MetricsPoint = Record<'at' | (typeof metricsPoint)[number], number>;

const flushMs = 60_000;
const sampleMs = 300_000;
const keepMs = 48 * 3_600_000;
/** Milliseconds between two reads of the facts of machines that other brokers own. */
const othersMs = 15_000;
const hourMs = 3_600_000;
/** Number of machines whose rows are written in one transaction. A transaction takes some 5 ms. */
const rowsAtOnce = 250;

/**
 * Stores the facts of all machines. Samples the metrics of each online machine every 5 minutes, and deletes samples
 * after two days.
 */
export class MachineFacts {
  readonly #lastHour = new LastHour();
  readonly #history: History;
  readonly #facts: Map<string, Facts>;
  readonly #heardAt = new Map<string, number>();
  /**
   * `#unsaved`: machines whose newest facts are only in memory. `#unsampled`: machines whose last report is not yet in
   * a sample of the metrics.
   */
  readonly #unsaved = new Set<string>();
  readonly #unsampled = new Set<string>();
  readonly #stops: (() => void)[];
  readonly #watchers = new Set<(machineId: string) => void>();
  readonly #upgradeWatchers = new Set<(machineId: string) => void>();
  #version = 0;
  #isClosed = false;

  private constructor(history: History, facts: Map<string, Facts>) {
    this.#history = history;
    this.#facts = facts;
    history.onEntry('machine_facts', ({ machine_id, facts }: FactsEntry, transaction) => {
      const insert = `INSERT INTO machine_facts (machine_id, facts, last_seen) VALUES (?, ?, ?)
        ON CONFLICT DO NOTHING`;
      transaction.run(insert, machine_id, JSON.stringify(facts), facts.last_seen);
      transaction.committed(() => {
        if (!this.#facts.has(machine_id)) this.#set(machine_id, { ...facts, report: undefined });
      });
    });
    // A failed write is ignored here: the history logs it, and the next write includes the same machines.
    this.#stops = [
      every(flushMs, () => void this.#flush().catch(() => {})),
      every(sampleMs, () => void this.#sample().catch(() => {})),
    ];
  }

  /** Opens the tables, and reads the facts of all machines. */
  static async open(history: History): Promise<MachineFacts> {
    await history.migrate('machines', tables);
    history.retain({ table: 'metrics', column: 'at', keepMs });
    const rows = await history.all('SELECT machine_id, facts, report FROM machine_facts');
    const facts = new Map(rows.map((row) => [textIn(row, 'machine_id'), factsIn(row)]));
    const made = new MachineFacts(history, facts);
    await made.#fillHour();
    return made;
  }

  /** After a restart, fills the metrics of the last hour from the stored samples. */
  async #fillHour(): Promise<void> {
    const samples = await this.#history.all(
      'SELECT machine_id, at, cpu_usage, memory_used AS used, memory_total AS total FROM metrics WHERE at >= ?',
      now() - hourMs,
    );
    for (const row of samples) {
      const machineId = textIn(row, 'machine_id');
      if (!this.#facts.has(machineId)) continue;
      const memory = percentOf({ used: Number(row.used), total: Number(row.total) });
      this.#lastHour.fill(machineId, now() - Number(row.at), sampleMs, Number(row.cpu_usage), memory);
    }
  }

  /** Every 15 s, reads the facts of machines that other brokers own. Those brokers store reports once a minute. */
  followOthers(log: Logger): void {
    const recent = 'SELECT machine_id, facts, report FROM machine_facts WHERE last_seen >= ?';
    let isFailing = false;
    const read = async (): Promise<void> => {
      try {
        this.#setOthers(await this.#history.all(recent, now() - 3 * flushMs));
        isFailing = false;
      } catch (err) {
        if (!isFailing && !this.#isClosed)
          log.error(
            { err },
            'could not read the reports of machines that other brokers own; trying again every 15 s',
          );
        isFailing = true;
      }
    };
    this.#stops.push(every(othersMs, () => void read()));
  }

  /**
   * Reads the stored facts of machines that other brokers own. These facts are current, because brokers store a changed
   * fact at once.
   */
  async readOthers(machineIds: readonly string[]): Promise<void> {
    const elsewhere = machineIds.filter((id) => !this.#history.owns(id));
    if (elsewhere.length === 0) return;
    const sql = `SELECT machine_id, facts, report FROM machine_facts
      WHERE machine_id IN (SELECT value FROM json_each(?))`;
    this.#setOthers(await this.#history.all(sql, JSON.stringify(elsewhere)));
  }

  #setOthers(rows: readonly Row[]): void {
    for (const row of rows) {
      const id = textIn(row, 'machine_id');
      const facts = this.#history.owns(id) ? undefined : factsIn(row);
      if (facts && facts.last_seen >= (this.of(id)?.last_seen ?? 0)) this.#set(id, facts);
    }
  }

  /** A number that changes whenever the host name, operating system or architecture of a machine changes. */
  get version(): number {
    return this.#version;
  }

  of(machineId: string): Facts | undefined {
    return this.#facts.get(machineId);
  }

  /** Returns the last report of a machine; undefined if there is none, or if its owner does not allow metrics. */
  allowedReport(machineId: string): Report | undefined {
    const facts = this.of(machineId);
    return facts?.capabilities.includes('metrics') ? facts.report : undefined;
  }

  /**
   * Throws permission_denied unless the machine's owner allows each of these capabilities, according to the machine's
   * last hello.
   */
  assertAllows(machine_id: string, capabilities: readonly string[]): void {
    const allowed = this.of(machine_id)?.capabilities ?? [];
    const capability = capabilities.find((one) => !allowed.includes(one));
    // The broker does not know the capabilities of a machine that was never linked, so it refuses nothing here. The
    // agent itself checks the call.
    if (allowed.length === 0 || capability === undefined) return;
    const message = `the owner of machine ${machine_id} does not allow ${capability}: see --allow of its agent`;
    throw new AppError('permission_denied', message, { machine_id, capability });
  }

  /** Milliseconds since the last message of the machine. */
  silence(machineId: string): number {
    const heardAt = this.#heardAt.get(machineId);
    if (heardAt !== undefined) return Math.round(monotonic() - heardAt);
    return Math.max(0, now() - (this.of(machineId)?.last_seen ?? now()));
  }

  /**
   * Stores the facts and report of a hello. Resolves when changed facts are on disk; the report follows within a
   * minute. Throws validation_failed for invalid facts.
   */
  async hello(
    machineId: string,
    { ip, installation, ...host }: Omit<Facts, 'last_seen' | 'report'>,
    metrics: Metrics__Output | null | undefined,
  ): Promise<void> {
    const parsed = hostSchema.safeParse(host);
    if (!parsed.success) throw new AppError('validation_failed', z.prettifyError(parsed.error));
    const before = this.of(machineId);
    const report = reportOf(metrics) ?? before?.report;
    const facts = { ...parsed.data, ip, last_seen: now(), report, ...(installation && { installation }) };
    this.#set(machineId, facts);
    this.#addToHour(machineId);
    this.#heardAt.set(machineId, monotonic());
    this.#unsaved.add(machineId);
    // Unchanged facts wait for the next regular write. After a restart of the broker, all machines reconnect at once.
    // One commit for each of them would then take longer than all other work.
    if (before && isDeepStrictEqual(factsWithoutReport(before), factsWithoutReport(facts))) return;
    await this.#history.write((transaction) => this.#save(machineId, transaction));
  }

  /** Records that a machine sent a message, with or without a report. An invalid report is ignored. */
  heard(machineId: string, metrics?: Metrics__Output | null): void {
    const before = this.of(machineId);
    if (!before) return;
    const report = reportOf(metrics);
    this.#facts.set(machineId, { ...before, ...(report && { report }), last_seen: now() });
    this.#heardAt.set(machineId, monotonic());
    this.#unsaved.add(machineId);
    if (!report) return;
    this.#unsampled.add(machineId);
    this.#addToHour(machineId);
    for (const watcher of this.#watchers) watcher(machineId);
  }

  /**
   * Records the outcome of an upgrade that a machine reports after its hello. The outcome is stored at once, not at the
   * next regular write.
   */
  upgraded(machineId: string, last_upgrade: LastUpgrade): void {
    const before = this.of(machineId);
    if (!before?.installation || isDeepStrictEqual(before.installation.last_upgrade, last_upgrade)) return;
    this.#facts.set(machineId, { ...before, installation: { ...before.installation, last_upgrade } });
    this.#unsaved.add(machineId);
    // History logs a failure, and the next regular write stores the facts.
    this.#history.write((transaction) => this.#save(machineId, transaction)).catch(() => {});
    for (const watcher of this.#upgradeWatchers) watcher(machineId);
  }

  /** Calls `watcher` after each upgraded(). Call the returned function to stop. */
  watchUpgrades(watcher: (machineId: string) => void): () => void {
    this.#upgradeWatchers.add(watcher);
    return () => void this.#upgradeWatchers.delete(watcher);
  }

  /**
   * Deletes the last hour of metrics of a removed machine. Its facts remain, so that lists of past commands and events
   * can still be filtered by its id.
   */
  remove(machineId: string): void {
    this.#heardAt.delete(machineId);
    this.#lastHour.remove(machineId);
  }

  /** Calls `watcher` after each report. Call the returned function to stop. */
  watch(watcher: (machineId: string) => void): () => void {
    this.#watchers.add(watcher);
    return () => void this.#watchers.delete(watcher);
  }

  /** Returns CPU and memory of the last hour. All values are null if the machine's owner does not allow metrics. */
  lastHour(machineId: string): ReturnType<LastHour['of']> {
    return this.#lastHour.of(this.allowedReport(machineId) ? machineId : undefined);
  }

  #addToHour(machineId: string): void {
    const report = this.allowedReport(machineId);
    if (report) this.#lastHour.add(machineId, report.cpu_usage, percentOf(report.memory));
  }

  /** Returns averages of the metrics for each interval of `stepMs` milliseconds, oldest first. */
  async metrics(machineId: string, since: number, until: number, stepMs: number): Promise<MetricsPoint[]> {
    const averages = metricsPoint.map((column) => `avg(${column}) AS ${column}`).join(', ');
    const rows = await this.#history.all(
      // SQLite binds numbers as reals. Without the casts, the division would not round down.
      `SELECT (at / CAST(?1 AS BIGINT)) * CAST(?1 AS BIGINT) AS at, ${averages}
       FROM metrics WHERE machine_id = ?2 AND at >= ?3 AND at < ?4 GROUP BY at / CAST(?1 AS BIGINT) ORDER BY at`,
      ...[stepMs, machineId, since, until],
    );
    // The columns are the fields of MetricsPoint, and all are numbers.
    return rows as unknown as MetricsPoint[];
  }

  #set(machineId: string, facts: Facts): void {
    const before = this.of(machineId);
    const { hostname, os, arch } = facts;
    if (before?.hostname !== hostname || before.os !== os || before.arch !== arch) this.#version += 1;
    this.#facts.set(machineId, facts);
  }

  async close(): Promise<void> {
    this.#isClosed = true;
    for (const stop of this.#stops) stop();
    // A failure is ignored, because the history has logged it and the other parts of the broker must be closed too.
    await this.#flush().catch(() => {});
  }

  #flush(): Promise<void> {
    return this.#writeSlices(this.#unsaved, (id, transaction) => this.#save(id, transaction));
  }

  #save(machine_id: string, transaction: HistoryTransaction): void {
    const facts = this.of(machine_id);
    // Several brokers may share the database. Only the broker that owns a machine has the newest facts of the machine.
    // So only this broker stores them.
    if (!facts || !this.#history.owns(machine_id)) return;
    transaction.about(machine_id);
    const { report, ...host } = facts;
    transaction.put('machine_facts', 'machine_id', {
      ...{ machine_id, facts: JSON.stringify(host), last_seen: facts.last_seen },
      report: report ? JSON.stringify(report) : null,
    });
  }

  async #sample(): Promise<void> {
    const insert = 'INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING';
    await this.#writeSlices(this.#unsampled, (id, transaction) => {
      const report = this.of(id)?.report;
      if (!report) return;
      const { cpu_usage, memory, disk, load_average } = report;
      const used = [cpu_usage, memory.used, memory.total, disk.used, disk.total, load_average[0] ?? 0];
      transaction.run(insert, id, now(), ...used);
    });
  }

  /**
   * Writes the machines in `ids` in small transactions, so that no request waits long. Removes each machine from `ids`,
   * and adds it again if its write fails.
   */
  async #writeSlices(
    ids: Set<string>,
    write: (id: string, transaction: HistoryTransaction) => void,
  ): Promise<void> {
    const machines = [...ids];
    for (let at = 0; at < machines.length; at += rowsAtOnce) {
      const slice = machines.slice(at, at + rowsAtOnce);
      for (const id of slice) ids.delete(id);
      const written = this.#history.write((transaction) => {
        for (const id of slice) write(id, transaction);
      });
      await written.catch((error: unknown) => {
        for (const id of slice) ids.add(id);
        throw error;
      });
      await nextTurn();
    }
  }
}

/** Returns the facts without `last_seen` and `report`, which change with most messages. */
function factsWithoutReport({ last_seen, report, ...facts }: Facts): Omit<Facts, 'last_seen' | 'report'> {
  return facts;
}

/** Converts a row to facts. The casts are safe: only brokers write this JSON. */
function factsIn(row: Row): Facts {
  const facts = jsonIn(row, 'facts') as Omit<Facts, 'report'>;
  return { ...facts, report: row.report === null ? undefined : (jsonIn(row, 'report') as Report) };
}
