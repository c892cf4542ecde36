// Compares the speed and memory of this checkout with those of another one, to find the cost of a change.
//
//   npx node scripts/bench/compare-checkouts.ts --before DIR                     fifteen rounds
//   npx node scripts/bench/compare-checkouts.ts --before DIR --turns 3 --only commands,files     three rounds
//   npx node scripts/bench/compare-checkouts.ts --before DIR --packaged          programs as in their packages
//
// Needs Linux, Debian's curl, and the node_modules of both checkouts.
//
// - "now" is this checkout. "before" and "before again" are the other checkout, started twice.
// - Each round measures all three. Each ratio in the table is the median over all rounds.
// - If the ratio of "before again" differs from 1 by more than 3 %, other work disturbed the measurement.
import { mkdirSync } from 'node:fs';
import { join, resolve } from 'node:path';
import { parseArgs } from 'node:util';
import { Farhand as Client } from '../../shared/sdk/index.ts';
import { startWay } from './commands/ways-to-run-a-command.ts';
import { rest, rounded, Table } from './compare-programs-in-turns.ts';
import { makePackagedPrograms } from './packaged-programs.ts';
import {
  at,
  bench,
  type Farhand,
  fromSource,
  helpers,
  machineId,
  median,
  privateMebibytes,
  run,
  startFarhand,
  timed,
} from './start-and-measure-programs.ts';
import { attached, echoes, startEcho, type Typist } from './terminals/key-echo-times.ts';

const { values } = parseArgs({
  options: {
    before: { type: 'string' },
    turns: { type: 'string', default: '15' },
    only: { type: 'string', default: 'memory,commands,files,keys' },
    mib: { type: 'string', default: '1024' },
    packaged: { type: 'boolean', default: false },
  },
});

const oneByOne = 60;
const atOnce = 32;
const many = 320;
const keys = 150;
const warmUp = 150;

const sideNames = ['before', 'before again', 'now'] as const;
type SideName = (typeof sideNames)[number];

interface Side {
  started: Farhand;
  client: Client;
  machine: string;
  typist: Typist;
  /** `large` and `copy` are paths on the machine: a file to download, and the target of uploads. */
  large: string;
  copy: string;
}

/** The values of all rounds, by measurement and by side: "now", "before" or "before again". */
type Results = Map<string, Map<SideName, number[]>>;

async function main(folder: string): Promise<void> {
  if (values.before === undefined) throw new Error('--before DIR is needed');
  const now = join(import.meta.dirname, '../..');
  const checkouts = { before: resolve(values.before), 'before again': resolve(values.before), now };
  const sides = new Map<SideName, Side>();
  for (const name of sideNames) {
    sides.set(name, await startSide(join(folder, name.replace(' ', '-')), checkouts[name]));
  }
  const results: Results = new Map();
  const parts = values.only.split(',');
  if (parts.includes('memory')) {
    console.error('at rest …');
    await rest();
    for (const [name, side] of sides) record(results, 'idle private memory (MiB)', name, memory(side));
  }
  for (let turn = 0; turn < Number(values.turns); turn += 1) {
    console.error(`round ${turn + 1} …`);
    const names = [...sideNames.slice(turn % 3), ...sideNames.slice(0, turn % 3)];
    if (parts.includes('commands')) await each(names, sides, results, commands);
    if (parts.includes('files')) await each(names, sides, results, files);
    if (parts.includes('keys')) await each(names, sides, results, typing);
  }
  print(results);
}

async function startSide(folder: string, checkout: string): Promise<Side> {
  mkdirSync(folder);
  const commands = values.packaged
    ? await makePackagedPrograms(join(folder, 'packaged'), checkout)
    : fromSource(checkout);
  const started = await startFarhand(folder, commands);
  const client = new Client({ baseUrl: started.http, apiKey: started.key, retries: 0 });
  const machine = await machineId(started, 0);
  const [large, copy] = [join(folder, 'large'), join(folder, 'copy')];
  if (values.only.includes('files')) await run(`head -c ${values.mib}M /dev/urandom > ${large}`);
  const typist = await attached(client, await startEcho(client, machine));
  const way = await startWay('farhand', { ...started, machine, ssh: undefined }, 1);
  await timed(warmUp, () => way.run('true'));
  await way.close();
  return { started, client, machine, typist, large, copy };
}

async function each(
  names: SideName[],
  sides: ReadonlyMap<SideName, Side>,
  results: Results,
  measure: (side: Side) => Promise<Record<string, number>>,
): Promise<void> {
  for (const name of names) {
    const side = sides.get(name);
    if (!side) continue;
    for (const [what, value] of Object.entries(await measure(side))) record(results, what, name, value);
  }
}

function record(results: Results, what: string, name: SideName, value: number): void {
  const ofSides = results.get(what) ?? new Map<SideName, number[]>();
  results.set(what, ofSides);
  ofSides.set(name, [...(ofSides.get(name) ?? []), value]);
}

function memory({ started }: Side): number {
  const programs = [started.broker, started.agent, ...helpers(started.agent)];
  return programs.reduce((sum, { pid }) => sum + privateMebibytes(pid), 0);
}

async function commands({ started, machine }: Side): Promise<Record<string, number>> {
  const way = await startWay('farhand', { ...started, machine, ssh: undefined }, atOnce);
  // The first requests do not count, because they open the connection.
  await timed(10, () => way.run('true'));
  const p50 = at(await timed(oneByOne, () => way.run('true')), 0.5);
  let left = many;
  const begun = performance.now();
  const lane = async (): Promise<void> => {
    while (left-- > 0) await way.run('true');
  };
  await Promise.all(Array.from({ length: atOnce }, lane));
  const seconds = (performance.now() - begun) / 1000;
  await way.close();
  return { '`true`, p50 (ms)': p50, [`commands a second, ${atOnce} at once`]: many / seconds };
}

async function files({ started, machine, large, copy }: Side): Promise<Record<string, number>> {
  const at = `${started.http}/api/v1/machines/${machine}/files`;
  const curl = `curl -sS --fail -H 'Authorization: Bearer ${started.key}'`;
  const down = await run(`${curl} -o /dev/null '${at}/download?path=${large}'`);
  await run(`rm -f ${copy} && sync -f ${large}`);
  const up = await run(`${curl} -o /dev/null -T ${large} '${at}/raw?path=${copy}'`);
  await run(`rm -f ${copy}`);
  const mib = Number(values.mib);
  return { [`${mib} MiB down (MiB/s)`]: mib / down.seconds, [`${mib} MiB up (MiB/s)`]: mib / up.seconds };
}

async function typing({ typist }: Side): Promise<Record<string, number>> {
  return { 'key echo, p50 (ms)': at(await echoes(typist, keys), 0.5) };
}

function print(results: Results): void {
  const table = new Table(['what', 'before: median', 'before again / before', 'now / before']);
  for (const [what, ofSides] of results) {
    const before = ofSides.get('before') ?? [];
    const ratios = (name: SideName): string => {
      const sorted = (ofSides.get(name) ?? [])
        .map((value, n) => value / (before[n] ?? Number.NaN))
        .sort((a, b) => a - b);
      const [low, middle, high] = [0.25, 0.5, 0.75].map((share) => at(sorted, share).toFixed(2));
      return `${middle} (${low} to ${high})`;
    };
    table.row(what, rounded(median(before)), ratios('before again'), ratios('now'));
  }
  table.note(
    `${values.turns} rounds; in brackets the range of the middle half of the rounds; programs ${values.packaged ? 'as in their packages' : 'run from source'}`,
  );
  table.print();
}

await bench(main);
