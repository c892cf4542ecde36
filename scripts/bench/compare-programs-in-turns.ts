// Runs several programs that make the same copy, such as Farhand and scp, in turns. Measures their cost, and prints a
// table of the results.
import { writeFileSync } from 'node:fs';
import { dirname } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { at, cost, mebibytes, median, type Running, run } from './start-and-measure-programs.ts';

export interface CopyProgram {
  name: string;
  /** A shell command that creates the copy at `made`. This path does not exist before. */
  command: string;
  made: string;
  meter?: Meter;
}

export interface Work {
  what: string;
  /** The file or directory that every program must copy exactly. */
  source: string;
  /** Amount of work in one run, in `unit`. */
  amount: number;
  /** Unit of `amount`: MiB or files. */
  unit: string;
}

type Row = [what: string, ours: string, beside: string, ratio: string];

export class Table {
  readonly #head: Row;
  readonly #rows: Row[] = [];
  readonly #notes = new Set<string>();

  constructor(head: Row = ['what', 'Farhand', 'beside it', 'ratio']) {
    this.#head = head;
  }

  row(what: string, ours: string, beside = '', ratio = ''): void {
    this.#rows.push([what, ours, beside, ratio]);
  }

  note(text: string): void {
    this.#notes.add(text);
  }

  /** Adds a note about a failure. The bench goes on, and ends with exit code 1. */
  failure(what: string, error: unknown): void {
    const text = error instanceof Error ? error.message : String(error);
    process.exitCode = 1;
    this.note(`failed: ${what}: ${text}`);
    console.error(`failed: ${what}: ${text}`);
  }

  print(): void {
    const line = (cells: string[]): string => `| ${cells.join(' | ')} |`;
    console.log(line(this.#head));
    console.log(line(['---', '---', '---', '---']).replaceAll(' ', ''));
    for (const row of this.#rows) console.log(line(row));
    console.log();
    for (const note of this.#notes) console.log(`- ${note}`);
  }
}

/** Returns the parts of a bench that the option --only names, separated by commas. */
export function partsOf<Part extends string>(only: string, parts: Record<Part, unknown>): Part[] {
  const names = only.split(',');
  const isPart = (name: string): name is Part => Object.hasOwn(parts, name);
  if (!names.every(isPart)) throw new Error(`--only must be one or more of ${Object.keys(parts).join(',')}`);
  return names;
}

/**
 * Measures each of `ways` once in each round, by calling `once`. A way is a program, or a way to run a command. Returns
 * the results by way. A way that fails is reported, and is missing in the result.
 */
export async function inTurns<Way extends string | CopyProgram, T>(
  { runs, table }: { runs: number; table: Table },
  ways: Way[],
  what: string,
  once: (way: Way) => Promise<T>,
): Promise<Map<Way, T[]>> {
  const seen = new Map<Way, T[]>(ways.map((way) => [way, []]));
  for (let round = 0; round < runs; round += 1) {
    // Each round begins with another way, so that no way always runs first.
    const first = round % ways.length;
    for (const way of [...ways.slice(first), ...ways.slice(0, first)]) {
      if (!seen.has(way)) continue;
      try {
        seen.get(way)?.push(await once(way));
      } catch (error) {
        seen.delete(way);
        table.failure(`${what}, ${typeof way === 'string' ? way : way.name}`, error);
      }
    }
  }
  return seen;
}

/**
 * Runs all programs in turn, `runs` times. Adds a row to the table for each pair of one program of `ours` (Farhand) and
 * one of `others`.
 */
export async function race(
  table: Table,
  runs: number,
  work: Work,
  ours: CopyProgram[],
  others: CopyProgram[],
): Promise<void> {
  const programs = [...ours, ...others];
  const times = await inTurns({ runs, table }, programs, work.what, (program) => turn(work, program));
  const speed = (program: CopyProgram): number => work.amount / median(times.get(program) ?? []);
  const printed = (program: CopyProgram): string =>
    speed(program) > 0 ? `${rounded(speed(program))} ${work.unit}/s` : 'failed';
  for (const one of ours) {
    const what = `${work.what}, ${one.name}`;
    if (others.length === 0) table.row(what, printed(one));
    for (const other of others) {
      const ratio = speed(one) / speed(other);
      const rounds = ratiosOf(times.get(other), times.get(one));
      const range =
        rounds.length > 1 ? ` (${rounded(Math.min(...rounds))} to ${rounded(Math.max(...rounds))})` : '';
      const cell = ratio > 0 ? rounded(ratio) + range : '';
      table.row(what, printed(one), `${other.name}: ${printed(other)}`, cell);
    }
  }
}

function ratiosOf(dividends: number[] = [], divisors: number[] = []): number[] {
  return dividends.map((dividend, n) => dividend / (divisors[n] ?? Number.NaN));
}

async function turn(work: Work, program: CopyProgram): Promise<number> {
  // Writes the data of the previous run to the disk, so that this run does not wait for those writes.
  await run(`rm -rf ${program.made} && sync -f ${dirname(program.made)}`);
  const timing = (): Promise<{ seconds: number }> => run(program.command);
  const { seconds } = await (program.meter ? program.meter.around(timing) : timing());
  // diff fails if the copy differs from its source.
  await run(`diff -rq ${work.source} ${program.made}`);
  const speed = `${rounded(work.amount / seconds)} ${work.unit}/s`;
  console.error(`${work.what}, ${program.name}: ${seconds.toFixed(3)} s, ${speed}`);
  await run(`rm -rf ${program.made}`);
  return seconds;
}

export function rounded(value: number): string {
  if (value >= 100) return value.toFixed(0);
  if (value >= 10) return value.toFixed(1);
  return value >= 0.1 ? value.toFixed(2) : value.toPrecision(1);
}

/** Returns the median and the 99th percentile of sorted milliseconds as a text. */
export const p50AndP99 = (sorted: number[]): string =>
  `${rounded(at(sorted, 0.5))} / ${rounded(at(sorted, 0.99))} ms`;

/** Measures programs while they work: the CPU seconds of each piece of work, and the highest resident memory. */
export class Meter {
  readonly #programs: Running[];
  readonly #cpu: number[][];
  readonly #idle: number[];
  readonly #peak: number[];

  constructor(programs: Running[], idle: Map<Running, number>) {
    this.#programs = programs;
    this.#cpu = programs.map(() => []);
    this.#idle = programs.map((one) => idle.get(one) ?? Number.NaN);
    this.#peak = [...this.#idle];
  }

  async around<T>(work: () => Promise<T>): Promise<T> {
    for (const { pid } of this.#programs) writeFileSync(`/proc/${pid}/clear_refs`, '5');
    const before = this.#programs.map(({ pid }) => cost(pid).cpu);
    const done = await work();
    for (const [n, { pid }] of this.#programs.entries()) {
      this.#cpu[n]?.push(cost(pid).cpu - (before[n] ?? 0));
      this.#peak[n] = Math.max(this.#peak[n] ?? 0, mebibytes(pid, 'VmHWM'));
    }
    return done;
  }

  get used(): boolean {
    return this.#cpu.some(({ length }) => length > 0);
  }

  /** Returns, for each program, the median CPU seconds of a piece of work. */
  cpu(): number[] {
    return this.#cpu.map(median);
  }

  idle(): number[] {
    return this.#idle;
  }

  /** Returns, for each program, by how many MiB its highest memory exceeds its idle memory. */
  peak(): number[] {
    return this.#peak.map((peak, n) => peak - (this.#idle[n] ?? 0));
  }
}

/** Waits until the programs have finished starting. */
export const settle = (): Promise<void> => sleep(2_000);

/** Waits until the programs have released unused memory, which they do after 15 s at rest. */
export const rest = (): Promise<void> => sleep(30_000);
