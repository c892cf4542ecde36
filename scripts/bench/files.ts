// Compares Farhand's file transfers with scp, rsync, tar over ssh and a bare node:http server.
//
//   npx node scripts/bench/files.ts                            1 GiB, five runs of each, about half an hour
//   npx node scripts/bench/files.ts --size 64 --runs 1         a quick look
//   npx node scripts/bench/files.ts --only down,up             some parts: down, up, tree, far, list, stalled
//   npx node scripts/bench/files.ts --only up --beside scp     compares only with the programs of these names
//   npx node scripts/bench/files.ts --only up --busy           while two other programs use all the CPU they get
//   npx node scripts/bench/files.ts --packaged                 broker and agent bundled and started as in their packages
//   TMPDIR=/dev/shm npx node scripts/bench/files.ts            all files in memory, so that no disk is measured
//
// Needs Linux, and Debian's curl, openssh-client, openssh-server and rsync. Skips what needs a missing program.
//
// Rules:
// - The programs take turns, and copy between the same two paths of one file system, with a warm page cache.
// - Each time is that of the whole client process, including the handshake of ssh.
// - Uploads are synced to disk within the measured time, except by "scp without sync". Downloads are not synced.
// - Figures are medians. Each ratio is followed by the smallest and the largest ratio of a single round.
import { randomFillSync } from 'node:crypto';
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { parseArgs } from 'node:util';
import {
  type CopyProgram,
  Meter,
  partsOf,
  race,
  rest,
  rounded,
  settle,
  Table,
} from './compare-programs-in-turns.ts';
import type { FilesBench } from './files/files-bench-type.ts';
import { listing, privateMemory, stalled, startStalled } from './files/response-times.ts';
import { makePackagedPrograms } from './packaged-programs.ts';
import {
  bench,
  cost,
  fromSource,
  machineId,
  median,
  program,
  run,
  startAgent,
  startFarhand,
} from './start-and-measure-programs.ts';
import { isInstalled, type Ssh, startSsh } from './start-sshd.ts';

const parts = { down, up, tree, far, list: listing, stalled };
type Part = keyof typeof parts;

const treeFiles = 10_000;
const farSize = 256;
const oneWayMs = 25;

async function main(folder: string): Promise<void> {
  const { size, runs, only, beside, busy, packaged } = flags();
  const table = new Table();
  const ssh = await startSsh(folder, table);
  const shelf = join(folder, 'shelf');
  mkdirSync(shelf);
  const source = join(shelf, 'source');
  await run(`head -c ${size}M /dev/urandom > ${source}`);
  const plain = await program('scripts/bench/files/bare-file-server.ts', [shelf], 'plain is up');
  const commands = packaged ? await makePackagedPrograms(join(folder, 'packaged')) : fromSource();
  const started = await startFarhand(folder, commands);
  const files = `${started.http}/api/v1/machines/${await machineId(started, 0)}/files`;
  writeFileSync(join(folder, 'headers'), `Authorization: Bearer ${started.key}\n`, { mode: 0o600 });
  const copy = join(shelf, 'copy');
  await settle();
  const idle = new Map([plain, started.broker, started.agent].map((one) => [one, cost(one.pid).rss]));
  const places = { folder, source, copy, files };
  const filesBench: FilesBench = {
    size,
    runs,
    beside,
    table,
    farhand: started,
    commands,
    plain,
    idle,
    ssh,
    ...places,
  };

  if (busy) for (let n = 0; n < 2; n += 1) void run('while :; do :; done').catch(() => undefined);
  if (ssh) await handshake(filesBench, ssh);
  for (const part of only) {
    if (part !== 'list' && part !== 'stalled' && !isInstalled('curl', table)) continue;
    await parts[part](filesBench).catch((error: unknown) => table.failure(part, error));
  }
  const { output } = await run(`df --output=fstype ${folder} | tail -1`);
  table.note(
    `${runs === 1 ? 'one run' : `medians of ${runs} runs`} of each compared program; all of them read and write ${folder}, on ${output.trim()}`,
  );
  table.note('no row for a link without TLS, because broker and agent support only TLS');
  console.log();
  table.print();
}

interface Flags extends Pick<FilesBench, 'size' | 'runs' | 'beside'> {
  only: Part[];
  busy: boolean;
  packaged: boolean;
}

function flags(): Flags {
  const { values } = parseArgs({
    options: {
      size: { type: 'string', default: '1024' },
      runs: { type: 'string', default: '5' },
      only: { type: 'string', default: Object.keys(parts).join(',') },
      beside: { type: 'string' },
      busy: { type: 'boolean', default: false },
      packaged: { type: 'boolean', default: false },
    },
  });
  const [size, runs] = [Number(values.size), Number(values.runs)];
  if (!(size >= 1) || !(runs >= 1))
    throw new Error('--size (in MiB) and --runs must be numbers of at least 1');
  return {
    size: Math.floor(size),
    runs: Math.floor(runs),
    only: partsOf(values.only, parts),
    beside: values.beside?.split(','),
    busy: values.busy,
    packaged: values.packaged,
  };
}

async function handshake({ table, runs }: FilesBench, { options }: Ssh): Promise<void> {
  const times: number[] = [];
  for (let n = 0; n < 2 * runs + 1; n += 1) times.push((await run(`ssh ${options} bench true`)).seconds);
  const printed = `ssh: ${rounded(median(times) * 1000)} ms`;
  table.row('(time of `ssh HOST true`, which is part of every time over ssh below)', '', printed, '');
}

// ---- One large file

const curl = (folder: string): string => `curl -sS --fail-with-body -H @${join(folder, 'headers')}`;
const query = (path: string): string => `path=${encodeURIComponent(path)}`;
const sizeText = (size: number): string => (size % 1024 === 0 ? `${size / 1024} GiB` : `${size} MiB`);

async function down(filesBench: FilesBench): Promise<void> {
  const { table, runs, size, source, copy, plain } = filesBench;
  const meters = metersOf(filesBench);
  const work = { what: `${sizeText(size)} down`, source, amount: size, unit: 'MiB' };
  const ours = [{ ...download(filesBench, filesBench.files, source), meter: meters.ours }];
  const bare = {
    name: 'node:http',
    command: `curl -sS -f -o ${copy} ${plain.line.url}/source`,
    made: copy,
    meter: meters.plain,
  };
  await race(table, runs, work, ours, chosen(filesBench, [...sshPrograms(filesBench, 'down'), bare]));
  spent(filesBench, 'download', meters);
}

async function up(filesBench: FilesBench): Promise<void> {
  const { table, runs, size, source, copy, plain, files, folder } = filesBench;
  const meters = metersOf(filesBench);
  const work = { what: `${sizeText(size)} up`, source, amount: size, unit: 'MiB' };
  const form = `-F path=${copy} -F file=@${source}`;
  const ours: CopyProgram[] = [{ ...upload(filesBench, files, source), meter: meters.ours }];
  if (!filesBench.beside)
    ours.push({ name: 'POST upload', command: `${curl(folder)} ${form} ${files}/upload`, made: copy });
  const bare = {
    name: 'node:http',
    command: `curl -sS -f -T ${source} ${plain.line.url}/copy`,
    made: copy,
    meter: meters.plain,
  };
  await race(table, runs, work, ours, chosen(filesBench, [...sshPrograms(filesBench, 'up'), bare]));
  spent(filesBench, 'upload by `PUT /raw`', meters);
}

function download({ folder, copy }: FilesBench, files: string, source: string): CopyProgram {
  const command = `${curl(folder)} -o ${copy} '${files}/download?${query(source)}'`;
  return { name: 'GET download', command, made: copy };
}

function upload({ folder, copy }: FilesBench, files: string, source: string): CopyProgram {
  const command = `${curl(folder)} -T ${source} '${files}/raw?${query(copy)}'`;
  return { name: 'PUT raw', command, made: copy };
}

function sshPrograms({ ssh, table, source, copy }: FilesBench, way: 'down' | 'up'): CopyProgram[] {
  if (!ssh) return [];
  const paths = way === 'down' ? `bench:${source} ${copy}` : `${source} bench:${copy}`;
  const sync = way === 'down' ? '' : ` && sync ${copy}`;
  const copying = (name: string, command: string, after = sync): CopyProgram => ({
    ...{ name, command: `${command} ${paths}${after}`, made: copy },
  });
  const programs = [
    copying('scp', `scp -q ${ssh.options}`),
    copying('scp, aes128-gcm', `scp -q ${ssh.options} -c aes128-gcm@openssh.com`),
  ];
  if (sync) programs.push(copying('scp without sync', `scp -q ${ssh.options}`, ''));
  if (isInstalled('rsync', table)) programs.push(copying('rsync -W', `rsync -W -e 'ssh ${ssh.options}'`));
  return programs;
}

/** Returns the programs that the option --beside names, or all programs without --beside. */
function chosen({ beside }: FilesBench, programs: CopyProgram[]): CopyProgram[] {
  return programs.filter(({ name }) => beside?.includes(name) ?? true);
}

interface Meters {
  ours: Meter;
  plain: Meter;
}

const metersOf = ({ farhand, plain, idle }: FilesBench): Meters => ({
  ours: new Meter([farhand.broker, farhand.agent], idle),
  plain: new Meter([plain], idle),
});

/**
 * Adds a row with the CPU and memory of the serving programs to the table. `way` names the transfers, such as
 * "download".
 */
function spent({ table, size }: FilesBench, way: string, { ours, plain }: Meters): void {
  const perGib = (meter: Meter): string => {
    const seconds = meter.cpu().map((cpu) => (cpu * 1024) / size);
    return seconds.some(Number.isNaN) ? 'failed' : `${seconds.map(rounded).join(' + ')} s`;
  };
  const mib = (values: number[]): string => `${values.map((value) => value.toFixed(0)).join(' + ')} MiB`;
  const server = (text: string): string => (plain.used ? `node:http server: ${text}` : '');
  table.row(
    `CPU seconds of broker + agent per GiB transferred, ${way}`,
    perGib(ours),
    server(perGib(plain)),
    '',
  );
  const peak = `peak memory over idle (${mib(ours.idle())}), broker + agent, ${way}`;
  table.row(peak, mib(ours.peak()), server(mib(plain.peak())), '');
}

// ---- Many small files

async function tree(filesBench: FilesBench): Promise<void> {
  const { table, runs, folder, files, copy } = filesBench;
  const source = join(folder, 'shelf', 'tree');
  mkdirSync(source);
  const content = Buffer.alloc(1024);
  for (let n = 0; n < treeFiles; n += 1) writeFileSync(join(source, `file-${n}`), randomFillSync(content));
  const ours = (name: string, command: string): CopyProgram => ({
    name,
    command: `mkdir ${copy} && ${command}`,
    made: copy,
  });
  const work = { source, amount: treeFiles, unit: 'files' };
  const what = `${treeFiles.toLocaleString('en')} files of 1 KiB`;
  const get = `${curl(folder)} '${files}/download?${query(source)}&archive=tar'`;
  const downs = ours('GET download as tar', `${get} | tar x -C ${copy}`);
  await race(
    table,
    runs,
    { ...work, what: `${what} down` },
    [downs],
    treePrograms(filesBench, source, 'down'),
  );
  const post = `${curl(folder)} -X POST -H 'Content-Type: application/x-tar' -T -`;
  const ups = ours('POST extract', `tar c -C ${source} . | ${post} '${files}/extract?${query(copy)}'`);
  await race(table, runs, { ...work, what: `${what} up` }, [ups], treePrograms(filesBench, source, 'up'));
}

function treePrograms({ ssh, table, copy }: FilesBench, source: string, way: 'down' | 'up'): CopyProgram[] {
  if (!ssh) return [];
  const remote = `ssh ${ssh.options} bench`;
  const unpack = `mkdir ${copy} && tar x -C ${copy}`;
  const pack = `tar c -C ${source} .`;
  const downs = {
    'scp -r': `scp -qr ${ssh.options} bench:${source} ${copy}`,
    'tar over ssh': `${remote} ${pack} | (${unpack})`,
    'rsync -a': `rsync -a -e 'ssh ${ssh.options}' bench:${source}/ ${copy}/`,
  };
  const ups = {
    'scp -r': `scp -qr ${ssh.options} ${source} bench:${copy}`,
    'tar over ssh': `${pack} | ${remote} '${unpack}'`,
    'rsync -a': `rsync -a -e 'ssh ${ssh.options}' ${source}/ bench:${copy}/`,
  };
  return Object.entries(way === 'down' ? downs : ups)
    .filter(([name]) => name !== 'rsync -a' || isInstalled('rsync', table))
    .map(([name, command]) => ({
      name,
      command: way === 'down' ? command : `${command} && sync -f ${copy}`,
      made: copy,
    }));
}

// ---- A far link

async function far(filesBench: FilesBench): Promise<void> {
  const { table, runs, folder, farhand, commands, plain, ssh, copy } = filesBench;
  const size = Math.min(filesBench.size, farSize);
  const source = join(folder, 'shelf', 'far');
  await run(`head -c ${size}M /dev/urandom > ${source}`);
  const delayed = async (address: string): Promise<string> =>
    (await program('scripts/bench/files/delaying-proxy.ts', [address, String(oneWayMs)], 'delay is up')).line
      .address ?? '';
  const agent = await startAgent(folder, 'far', await delayed(farhand.grpc), farhand.token, commands);
  await settle();
  const files = `${farhand.http}/api/v1/machines/${await machineId(farhand, 1)}/files`;
  const url = `http://${await delayed(new URL(plain.line.url ?? '').host)}`;
  const scp =
    ssh && `scp -q ${ssh.options} -o Port=${(await delayed(`127.0.0.1:${ssh.port}`)).split(':')[1]}`;
  const programs = (onScp: string, onHttp: string): CopyProgram[] => [
    ...(scp ? [{ name: 'scp', command: `${scp} ${onScp}`, made: copy }] : []),
    { name: 'node:http', command: `curl -sS -f ${onHttp}`, made: copy },
  ];
  const what = `${sizeText(size)} over ${2 * oneWayMs} ms`;
  const work = { source, amount: size, unit: 'MiB' };
  const downs = programs(`bench:${source} ${copy}`, `-o ${copy} ${url}/far`);
  const ups = programs(`${source} bench:${copy} && sync ${copy}`, `-T ${source} ${url}/copy`);
  const held = privateMemory([farhand.broker, agent]);
  const sockets = await startStalled(new URL(`${files}/download?${query(source)}`), farhand.key);
  const stalledRow = `private memory of broker + agent for ${sockets.length} stalled downloads, round trip ${2 * oneWayMs} ms`;
  table.row(stalledRow, held());
  await rest();
  table.row(
    `the same downloads, still stalled, 30 s later: private memory, once V8 has collected its garbage`,
    held(),
  );
  for (const socket of sockets) socket.destroy();
  await race(
    table,
    runs,
    { ...work, what: `${what} down` },
    [download(filesBench, files, source)],
    chosen(filesBench, downs),
  );
  await race(
    table,
    runs,
    { ...work, what: `${what} up` },
    [upload(filesBench, files, source)],
    chosen(filesBench, ups),
  );
}

await bench(main);
