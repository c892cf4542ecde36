// A small process that runs commands in one of the ways that the bench compares, and prints its measurements as JSON.
import { type Read, startWay, type Targets, type WayName } from './ways-to-run-a-command.ts';

/** How often to run the command `true`: `count` times in all, `width` at once. */
export interface Trues {
  count: number;
  width: number;
}

/** A command that runs once, while its whole output is read. */
export interface LongOutput {
  command: string;
}

export type Ask = { way: WayName; targets: Targets } & (Trues | LongOutput);

export interface Seen {
  /** Durations in milliseconds of the commands that succeeded. */
  times: number[];
  seconds: number;
  /** Number of commands that failed, and the reason of the first failure. */
  failed: number;
  reason: string;
}

/** If the command `true` has not ended after this number of milliseconds, it counts as failed. */
const trueTimeoutMs = 30_000;
/** If a long output has not ended after this number of milliseconds, it counts as failed. */
const longOutputTimeoutMs = 120_000;
/** Number of commands before the measurement, which open the connections and make V8 compile the code. */
const warmUp = 200;

async function trues({ way: name, targets, count, width }: Ask & Trues): Promise<Seen> {
  const way = await startWay(name, targets, width);
  const seen: Seen = { times: [], seconds: 0, failed: 0, reason: '' };
  const lanes = (total: number): Promise<unknown> => {
    let left = total;
    const lane = async (): Promise<void> => {
      while (left > 0) {
        left -= 1;
        const started = performance.now();
        try {
          await inTime(way.run('true'), trueTimeoutMs);
          seen.times.push(performance.now() - started);
        } catch (error) {
          seen.failed += 1;
          seen.reason ||= error instanceof Error ? error.message : String(error);
        }
      }
    };
    return Promise.all(Array.from({ length: width }, lane));
  };
  await lanes(warmUp + width);
  // The times of the warm-up do not count, but its failures do.
  seen.times = [];
  const started = performance.now();
  await lanes(count);
  seen.seconds = (performance.now() - started) / 1000;
  await way.close();
  return seen;
}

async function inTime<T>(answer: Promise<T>, ms: number): Promise<T> {
  const late = Promise.withResolvers<never>();
  const timer = setTimeout(() => late.reject(new Error(`no answer in ${ms} ms`)), ms);
  try {
    return await Promise.race([answer, late.promise]);
  } finally {
    clearTimeout(timer);
  }
}

async function readOutput({ way: name, targets, command }: Ask & LongOutput): Promise<Read> {
  const way = await startWay(name, targets, 1);
  await way.run('true');
  const seen = await inTime(way.read(command), longOutputTimeoutMs);
  await way.close();
  return seen;
}

try {
  const ask = JSON.parse(process.argv[2] ?? '') as Ask;
  const seen = JSON.stringify('command' in ask ? await readOutput(ask) : await trues(ask));
  // Exits explicitly: a command that got no answer may still hold a connection open, which would keep the process
  // alive.
  process.stdout.write(seen, () => process.exit());
} catch (error) {
  console.error(error instanceof Error ? error.message : error);
  process.exit(1);
}
