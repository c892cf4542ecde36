// What machines told of themselves: host facts, last report, last seen, and the bounded history of metrics.
import { z } from 'zod';
import type { Metrics__Output } from '../../proto/types/farhand/agent/v1/Metrics.ts';
import { label } from '../../shared/api/route.ts';
import { every, latestInstant, monotonic, now } from '../../shared/clock.ts';
import { AppError } from '../../shared/errors.ts';
import { type Entry, type History, jsonIn, type Row, textIn } from '../history.ts';

const amount = z.number().min(0).max(Number.MAX_SAFE_INTEGER);
const space = z.object({ total: amount, used: amount, free: amount });
const disk = space.extend({ available: amount.optional() });
const absent = { total: 0, used: 0, free: 0 };

/** A report as it may come over the link: sizes and numbers are checked once, here. */
const reportSchema = z.object({
  recorded_at_ms: z.number().min(0).max(latestInstant),
  uptime_s: amount,
  cpu_usage: z.number().min(0).max(100),
  cpu_cores: amount,
  memory: space.nullish().transform((value) => value ?? absent),
  disk: disk.nullish().transform((value) => value ?? absent),
  load_average: z.array(amount).max(3),
  disks: z
    .array(z.object({ mount: z.string().max(4096), filesystem: z.string().max(255), space: disk.nullish() }))
    .max(256),
  network: z
    .array(z.object({ name: z.string().max(255), received_bytes: amount, sent_bytes: amount }))
    .max(256),
  agent_rss: amount,
  agent_uptime_s: amount,
});
/** With the machine's clock minus ours when it came; an older broker stored none. */
export type Report = z.output<typeof reportSchema> & { clock_offset_ms?: number };

const hostSchema = z.object({
  hostname: label(1, 255),
  os: label(1, 64),
  arch: label(1, 64),
  agent_version: label(1, 64),
  capabilities: z.array(label(1, 64)).max(64),
});

/** What is known of a machine without asking it. */
export interface Facts extends z.output<typeof hostSchema> {
  ip: string;
  /** Milliseconds since 1970. */
  last_seen: number;
  report: Report | undefined;
}

interface FactsEntry extends Entry {
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

/** The facts a machine enrols with, to be committed with the machine itself. */
export function firstFacts(
  machineId: string,
  host: Omit<Facts, 'last_seen' | 'report' | 'capabilities'>,
): Entry {
  const entry: FactsEntry = {
    kind: 'machine_facts',
    machine_id: machineId,
    facts: { ...host, capabilities: [], last_seen: now() },
  };
  return entry;
}

export interface Vitals {
  of(machineId: string): Facts | undefined;
  /** Milliseconds since the last byte was heard. */
  silence(machineId: string): number;
  /** A hello: facts and, with it, the first report. Throws AppError validation_failed. */
  hello(
    machineId: string,
    host: Omit<Facts, 'last_seen' | 'report'>,
    report: Metrics__Output | null | undefined,
  ): Promise<void>;
  /** Any sign of life, with or without a report. A report that breaks the contract is dropped. */
  heard(machineId: string, report?: Metrics__Output | null): void;
  /** Averages per step, oldest first. */
  metrics(machineId: string, since: number, until: number, stepMs: number): MetricsPoint[];
  /** Writes what is only in memory. */
  flush(): Promise<void>;
  close(): Promise<void>;
}

export interface MetricsPoint {
  at: number;
  cpu_usage: number;
  memory_used: number;
  memory_total: number;
  disk_used: number;
  disk_total: number;
  load_average: number;
}

const flushMs = 60_000;

/** Opens the vitals: a sample of each online machine every `sampleMs`, kept for `keepMs`. */
export function openVitals(history: History, { sampleMs = 300_000, keepMs = 48 * 3_600_000 } = {}): Vitals {
  history.migrate('machines', tables);
  history.retain({ table: 'metrics', column: 'at', keepMs });
  const known = load(history);
  const heardAt = new Map<string, number>();
  const dirty = new Set<string>();
  const toSample = new Set<string>();

  history.onEntry('machine_facts', ({ machine_id, facts }: FactsEntry, transaction) => {
    history
      .sql('INSERT OR IGNORE INTO machine_facts (machine_id, facts, last_seen) VALUES (?, ?, ?)')
      .run(machine_id, JSON.stringify(facts), facts.last_seen);
    transaction.committed(() => {
      if (!known.has(machine_id)) known.set(machine_id, { ...facts, report: undefined });
    });
  });

  function save(machineId: string): void {
    const facts = known.get(machineId);
    if (!facts) return;
    const { report, last_seen, ...host } = facts;
    history
      .sql('INSERT OR REPLACE INTO machine_facts (machine_id, facts, last_seen, report) VALUES (?, ?, ?, ?)')
      .run(
        machineId,
        JSON.stringify({ ...host, last_seen }),
        last_seen,
        report ? JSON.stringify(report) : null,
      );
  }

  async function flush(): Promise<void> {
    const machines = [...dirty];
    dirty.clear();
    if (machines.length > 0) await history.write(() => machines.forEach(save));
  }

  async function sample(): Promise<void> {
    const machines = [...toSample];
    toSample.clear();
    if (machines.length === 0) return;
    await history.write(() => {
      for (const id of machines) savePoint(history, id, known.get(id));
    });
  }

  // A missed write is not lost: the facts stay dirty in memory and history logs its own failures.
  const stopFlushing = every(flushMs, () => void flush().catch(() => {}));
  const stopSampling = every(sampleMs, () => void sample().catch(() => {}));

  function note(machineId: string, change: Partial<Facts>): void {
    const before = known.get(machineId);
    if (!before) return;
    known.set(machineId, { ...before, ...change, last_seen: now() });
    heardAt.set(machineId, monotonic());
    dirty.add(machineId);
  }

  return {
    of: (machineId) => known.get(machineId),
    silence: (machineId) => silenceOf(heardAt.get(machineId), known.get(machineId)),
    async hello(machineId, { ip, ...host }, report) {
      const parsed = hostSchema.safeParse(host);
      if (!parsed.success) throw new AppError('validation_failed', z.prettifyError(parsed.error));
      const before = known.get(machineId)?.report;
      known.set(machineId, { ...parsed.data, ip, last_seen: now(), report: reportOf(report) ?? before });
      heardAt.set(machineId, monotonic());
      await history.write(() => save(machineId));
    },
    heard(machineId, metrics) {
      const report = reportOf(metrics);
      note(machineId, report ? { report } : {});
      if (report) toSample.add(machineId);
    },
    metrics: (machineId, since, until, stepMs) => pointsOf(history, machineId, since, until, stepMs),
    flush,
    async close() {
      stopFlushing();
      stopSampling();
      await flush();
    },
  };
}

function load(history: History): Map<string, Facts> {
  const rows = history.sql('SELECT machine_id, facts, report FROM machine_facts').all();
  return new Map(rows.map((row) => [textIn(row, 'machine_id'), factsIn(row)]));
}

/** A row as save() wrote it. */
function factsIn(row: Row): Facts {
  const facts = jsonIn(row, 'facts') as Omit<Facts, 'report'>;
  return { ...facts, report: row.report === null ? undefined : (jsonIn(row, 'report') as Report) };
}

function reportOf(metrics: Metrics__Output | null | undefined): Report | undefined {
  const report = metrics ? reportSchema.safeParse(metrics).data : undefined;
  return report && { ...report, clock_offset_ms: report.recorded_at_ms - now() };
}

function silenceOf(heardAt: number | undefined, facts: Facts | undefined): number {
  if (heardAt !== undefined) return Math.round(monotonic() - heardAt);
  return Math.max(0, now() - (facts?.last_seen ?? now()));
}

function savePoint(history: History, machineId: string, facts: Facts | undefined): void {
  const report = facts?.report;
  if (!report) return;
  history
    .sql('INSERT OR IGNORE INTO metrics VALUES (?, ?, ?, ?, ?, ?, ?, ?)')
    .run(
      machineId,
      now(),
      report.cpu_usage,
      report.memory.used,
      report.memory.total,
      report.disk.used,
      report.disk.total,
      report.load_average[0] ?? 0,
    );
}

function pointsOf(
  history: History,
  machineId: string,
  since: number,
  until: number,
  stepMs: number,
): MetricsPoint[] {
  const rows = history
    .sql(
      // Numbers are bound as reals, and a division of those would not round down.
      `SELECT (at / CAST(?1 AS INTEGER)) * CAST(?1 AS INTEGER) AS at, avg(cpu_usage) AS cpu_usage,
         avg(memory_used) AS memory_used, avg(memory_total) AS memory_total,
         avg(disk_used) AS disk_used, avg(disk_total) AS disk_total, avg(load_average) AS load_average
       FROM metrics WHERE machine_id = ?2 AND at >= ?3 AND at < ?4 GROUP BY at / CAST(?1 AS INTEGER) ORDER BY at`,
    )
    .all(stepMs, machineId, since, until);
  // The columns are those of MetricsPoint, all of them numbers.
  return rows as unknown as MetricsPoint[];
}
