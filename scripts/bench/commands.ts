// Compares commands of Farhand with a local spawn, with ssh2 on one open connection, and with ssh over a master
// connection.
//
//   npx node scripts/bench/commands.ts                         two to four minutes
//   npx node scripts/bench/commands.ts --runs 1 --history 1000 a quick look
//   npx node scripts/bench/commands.ts --only latency,rate     some parts: latency, history, rate, output, steps
//
// Needs Linux. Skips ssh2 and ssh unless Debian's openssh-client and openssh-server are installed.
//
// Rules:
// - The ways to run a command take turns. Each way has a small process, which opens its connections before the
// measurement.
// - Farhand stores each command on the disks of broker and agent before it answers. The other ways store nothing.
// - p50 and rates are medians of the runs; p99 is computed from the times of all runs together.
import { mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { parseArgs } from 'node:util';
import { Farhand as Client } from '../../shared/sdk/index.ts';
import { createFloors } from './commands/least-cost-of-steps.ts';
import type { Ask, Seen, Trues } from './commands/measuring-process.ts';
import { type Read, startWay, type Targets, type WayName } from './commands/ways-to-run-a-command.ts';
import {
  inTurns,
  Meter,
  p50AndP99,
  partsOf,
  rest,
  rounded,
  settle,
  Table,
} from './compare-programs-in-turns.ts';
import {
  at,
  bench,
  cost,
  type Farhand,
  helpers,
  machineId,
  median,
  run,
  startFarhand,
  timed,
} from './start-and-measure-programs.ts';
import { startMaster, startSsh } from './start-sshd.ts';

const parts = { latency, history, rate, output, steps };
type Part = keyof typeof parts;

interface CommandsBench {
  folder: string;
  runs: number;
  /** Number of commands that the part `history` runs to fill the history before it measures. */
  kept: number;
  table: Table;
  started: Farhand;
  targets: Targets;
}

const names: Record<WayName, string> = {
  farhand: 'POST /commands',
  spawn: 'local spawn of sh -c true',
  ssh2: 'ssh2, one connection',
  master: 'ssh -S, master connection',
};
const oneByOne = 150;
/** Maps the number of commands that run at the same time to the number of all commands in a run. */
const widths = new Map([
  [1, 100],
  [8, 300],
  [32, 400],
]);
const outputBytes = 200_000_000;
const writer = 'dd if=/dev/zero bs=1000000 count=200 status=none';

async function main(folder: string): Promise<void> {
  const { runs, kept, only } = flags();
  const table = new Table();
  const ssh = await startSsh(folder, table);
  const master = ssh && (await startMaster(ssh, join(folder, 'ssh')));
  const started = await startFarhand(folder);
  const targets: Targets = {
    http: started.http,
    key: started.key,
    machine: await machineId(started, 0),
    ssh: ssh && master ? { ...ssh, master } : undefined,
  };
  await settle();
  const commandsBench: CommandsBench = { folder, runs, kept, table, started, targets };
  console.error('warming up …');
  // Warms up all three programs, so that V8 compiles the code that handles commands.
  await trues('farhand', targets, { count: 40 * oneByOne, width: 4 });
  for (const part of only) {
    console.error(`${part} …`);
    await parts[part](commandsBench).catch((error: unknown) => table.failure(part, error));
  }
  table.note(`${runs === 1 ? 'one run' : `medians of ${runs} runs`} of each measurement; run from source`);
  console.log();
  table.print();
}

function flags(): { runs: number; kept: number; only: Part[] } {
  const { values } = parseArgs({
    options: {
      runs: { type: 'string', default: '3' },
      history: { type: 'string', default: '10000' },
      only: { type: 'string', default: Object.keys(parts).join(',') },
    },
  });
  const [runs, kept] = [Number(values.runs), Number(values.history)];
  if (!(runs >= 1) || !(kept >= 1)) throw new Error('--runs and --history must be numbers of at least 1');
  return { runs: Math.floor(runs), kept: Math.floor(kept), only: partsOf(values.only, parts) };
}

// ---- Measuring each way to run a command

/** Runs commands in a small process, as `ask` describes. Returns the measurements of this process. */
async function measureInProcess<T>(ask: Ask): Promise<T> {
  const program = join(import.meta.dirname, 'commands/measuring-process.ts');
  const { output } = await run(`${process.execPath} ${program} '${JSON.stringify(ask)}'`);
  return JSON.parse(output) as T;
}

async function trues(way: WayName, targets: Targets, wanted: Trues): Promise<Seen> {
  const seen = await measureInProcess<Seen>({ way, targets, ...wanted });
  const [{ count, width }, speed] = [wanted, rounded(seen.times.length / seen.seconds)];
  console.error(`${way}: ran \`true\` ${count} times, ${width} at once: ${speed}/s, ${seen.failed} failed`);
  return seen;
}

/** Returns the ways that can run: without an sshd, only `farhand` and `spawn`. */
const reachable = ({ targets }: CommandsBench, ways: WayName[]): WayName[] =>
  ways.filter((way) => targets.ssh || way === 'farhand' || way === 'spawn');

const sorted = (times: number[]): number[] => times.toSorted((a, b) => a - b);
const p50 = (seen: Seen[]): number => median(seen.map(({ times }) => median(times)));
const p99 = (seen: Seen[]): number => at(sorted(seen.flatMap(({ times }) => times)), 0.99);
const bothOf = (seen: Seen[]): string => `${rounded(p50(seen))} / ${rounded(p99(seen))} ms`;

/**
 * Returns a text with the number of commands that got no answer or a wrong exit code, and the number of all commands.
 */
function unanswered({ table }: CommandsBench, way: WayName, seen: Seen[]): string {
  const failed = seen.reduce((sum, one) => sum + one.failed, 0);
  const total = seen.reduce((sum, one) => sum + one.times.length + one.failed, 0);
  const reason = seen.find((one) => one.reason)?.reason;
  if (reason) table.failure(names[way], new Error(`${failed} of ${total}, the first: ${reason}`));
  return `${failed} of ${total.toLocaleString('en')}`;
}

// ---- The parts

async function latency(commandsBench: CommandsBench): Promise<void> {
  const ways = reachable(commandsBench, ['farhand', 'spawn', 'ssh2', 'master']);
  const what = '`true`, one at a time: p50 / p99';
  // This part has three times as many runs as the others, because it is the shortest and its figures vary most.
  const seen = await inTurns({ ...commandsBench, runs: 3 * commandsBench.runs }, ways, what, (way) =>
    trues(way, commandsBench.targets, { count: oneByOne, width: 1 }),
  );
  const ours = seen.get('farhand') ?? [];
  for (const [way, theirs] of seen) {
    unanswered(commandsBench, way, theirs);
    if (way === 'farhand') continue;
    const ratio = `${rounded(p50(ours) / p50(theirs))} (p50)`;
    commandsBench.table.row(what, bothOf(ours), `${names[way]}: ${bothOf(theirs)}`, ratio);
  }
}

async function rate(commandsBench: CommandsBench): Promise<void> {
  const ways = reachable(commandsBench, ['farhand', 'ssh2', 'master']);
  const all = new Map<WayName, Seen[]>();
  for (const [width, count] of widths) {
    const what = `commands a second, ${width} at once`;
    const seen = await inTurns(commandsBench, ways, what, (way) =>
      trues(way, commandsBench.targets, { count, width }),
    );
    const perSecond = (way: WayName): number =>
      median((seen.get(way) ?? []).map(({ times, seconds }) => times.length / seconds));
    const ours = perSecond('farhand');
    for (const [way, theirs] of seen) {
      all.set(way, [...(all.get(way) ?? []), ...theirs]);
      const speed = perSecond(way);
      if (way !== 'farhand')
        commandsBench.table.row(
          what,
          `${rounded(ours)}/s`,
          `${names[way]}: ${rounded(speed)}/s`,
          rounded(ours / speed),
        );
    }
    if (ways.length === 1) commandsBench.table.row(what, `${rounded(ours)}/s`);
  }
  const lost = new Map([...all].map(([way, seen]) => [way, unanswered(commandsBench, way, seen)]));
  const beside = [...lost]
    .filter(([way]) => way !== 'farhand')
    .map(([way, text]) => `${names[way]}: ${text}`);
  commandsBench.table.row(
    'commands without an answer, in all rows above',
    lost.get('farhand') ?? '',
    beside.join(', '),
    '',
  );
}

async function output(commandsBench: CommandsBench): Promise<void> {
  const { table, targets, started } = commandsBench;
  await rest();
  const agents = [started.agent, ...helpers(started.agent)];
  const programs = [started.broker, ...agents];
  const meter = new Meter(programs, new Map(programs.map((one) => [one, cost(one.pid).rss])));
  const ways = reachable(commandsBench, ['farhand', 'ssh2', 'master', 'spawn']);
  const what = `output of ${outputBytes / 1e6} MB, read while it is written`;
  const seen = await inTurns(commandsBench, ways, what, (way) =>
    way === 'farhand' ? meter.around(() => streamed(way, targets)) : streamed(way, targets),
  );
  const ours = seen.get('farhand');
  const printed = (speeds: number[] | undefined): string =>
    speeds ? `${rounded(median(speeds))} MB/s` : 'failed';
  for (const [way, theirs] of seen) {
    if (way === 'farhand') continue;
    const name = way === 'spawn' ? 'a local pipe' : names[way];
    const ratio = ours ? rounded(median(ours) / median(theirs)) : '';
    table.row(what, printed(ours), `${name}: ${printed(theirs)}`, ratio);
  }
  if (!ours) return;
  const parted = (mib: number[]): string => {
    const [broker = 0, agent = 0, ...others] = mib.map(Math.round);
    return others.length ? `${broker} + ${agent} + ${others.join(' + ')} MiB` : `${broker} + ${agent} MiB`;
  };
  const who = `broker + agent${agents.length > 1 ? ' + its helper' : ''}`;
  table.row(
    `peak memory during this output, minus memory at idle (${parted(meter.idle())}), ${who}`,
    parted(meter.peak()),
  );
  await trueBeside(commandsBench, what);
}

/** Runs a command with much output. Returns its speed in MB/s. Throws unless every byte has arrived. */
async function streamed(way: WayName, targets: Targets): Promise<number> {
  const { bytes, seconds } = await measureInProcess<Read>({ way, targets, command: writer });
  if (bytes !== outputBytes) throw new Error(`${bytes} of ${outputBytes} bytes arrived`);
  const speed = bytes / 1e6 / seconds;
  console.error(`${outputBytes / 1e6} MB, ${way}: ${rounded(speed)} MB/s`);
  return speed;
}

/** Measures how long other commands on a machine take while one command writes much output. */
async function trueBeside({ table, targets, runs }: CommandsBench, what: string): Promise<void> {
  const way = await startWay('farhand', targets, 1);
  const ask = (): Promise<void> => way.run('true');
  await timed(oneByOne, ask);
  const calm = await timed(oneByOne, ask);
  const beside: number[] = [];
  for (let round = 0; round < runs; round += 1) {
    let going = true;
    const over = (): void => {
      going = false;
    };
    const stream = streamed('farhand', targets);
    void stream.then(over, over);
    while (going) beside.push(...(await timed(1, ask)));
    await stream;
  }
  await way.close();
  const ratio = rounded(at(sorted(beside), 0.99) / at(calm, 0.99));
  const row = `\`true\` during ${what.replace(/,.*/, '')}: p50 / p99 of ${beside.length}`;
  table.row(row, p50AndP99(sorted(beside)), `without it: ${p50AndP99(calm)}`, `${ratio} (p99)`);
}

/**
 * Measures whether a long history slows down new commands. Fills the history of a second broker with commands. Then
 * measures this broker in turns with the first one.
 */
async function history(commandsBench: CommandsBench): Promise<void> {
  const { table, kept } = commandsBench;
  const folder = join(commandsBench.folder, 'history');
  mkdirSync(folder);
  const started = await startFarhand(folder);
  const long = { ...commandsBench.targets, http: started.http, key: started.key };
  long.machine = await machineId(started, 0);
  await settle();
  const one = { count: oneByOne, width: 1 };
  await trues('farhand', long, { count: 40 * oneByOne, width: 4 });
  const few = (await completedOf(long)).toLocaleString('en');
  const before = await inTurns(commandsBench, ['long'], 'a short history', () => trues('farhand', long, one));
  const filled = await trues('farhand', long, { count: kept, width: 32 });
  unanswered(commandsBench, 'farhand', [filled]);
  const total = await completedOf(long);
  if (total < kept) throw new Error(`only ${total} of ${kept} commands are in history`);
  await settle();
  const other = (await completedOf(commandsBench.targets)).toLocaleString('en');
  const both = { long, short: commandsBench.targets };
  const after = await inTurns(commandsBench, ['long', 'short'], 'a long history', (which) =>
    trues('farhand', both[which], one),
  );
  const ours = after.get('long') ?? [];
  const row = (beside: string, theirs: Seen[] = []): void =>
    table.row(
      `second broker, \`true\` with ${total.toLocaleString('en')} commands in history: p50 / p99`,
      bothOf(ours),
      `${beside}: ${bothOf(theirs)}`,
      `${rounded(p50(ours) / p50(theirs))} (p50)`,
    );
  row(
    `first broker, with ${other} commands in history, measured in turns with the second`,
    after.get('short'),
  );
  row(`second broker earlier, with ${few} commands in history`, before.get('long'));
  const speed = `${rounded(filled.times.length / filled.seconds)}/s`;
  table.row(`second broker, ${kept.toLocaleString('en')} commands to fill its history, 32 at once`, speed);
}

async function completedOf({ http, key }: Targets): Promise<number> {
  const { commands } = new Client({ baseUrl: http, apiKey: key, retries: 0 });
  return (await commands.list({ status: 'completed', limit: 1 })).total;
}

/** Measures the least time of each step of the command `true`, such as one write to the disk. */
async function steps(commandsBench: CommandsBench): Promise<void> {
  const { folder, targets, runs } = commandsBench;
  const floors = await createFloors(folder, targets);
  const asks = ['http', 'call', 'row', 'line'] as const;
  for (const name of asks) await timed(oneByOne, floors[name]);
  const all = new Map<string, number[]>();
  const add = (name: string, times: number[]): void =>
    void all.set(name, [...(all.get(name) ?? []), median(times)]);
  for (let round = 0; round < runs; round += 1) {
    for (const name of asks) add(name, await timed(oneByOne, floors[name]));
    for (const way of ['spawn', 'farhand'] as const) {
      add(way, (await trues(way, targets, { count: oneByOne, width: 1 })).times);
    }
  }
  await floors.close();
  const ms = (name: string): number => median(all.get(name) ?? []);
  const whole = ms('farhand');
  const table = new Table(['step of one command `true`', 'p50', 'share', 'measured by']);
  const rows: [string, number, string][] = [
    ['HTTP request and answer', ms('http'), 'GET /auth/me'],
    ['broker stores the accepted command', ms('row'), 'insert of a row by SQLite (WAL, synchronous = FULL)'],
    [
      'one round trip over the link',
      ms('call') - ms('http'),
      'time of GET /files/stat minus time of GET /auth/me',
    ],
    ['agent writes its journal', ms('line'), 'append and fdatasync'],
    ['spawn and exit', ms('spawn'), 'spawn of `sh -c true` by a process with little memory'],
    [
      'broker stores the end of the command',
      ms('row'),
      'insert of a row by SQLite, as for the accepted command',
    ],
  ];
  const rest = whole - rows.reduce((sum, [, value]) => sum + value, 0);
  rows.push(['rest', rest, 'time of the whole command, minus the steps above']);
  rows.push(['whole', whole, 'POST /commands']);
  for (const [step, value, how] of rows) {
    table.row(step, `${rounded(value)} ms`, `${((value / whole) * 100).toFixed(0)} %`, how);
  }
  console.log();
  table.print();
}

await bench(main);
