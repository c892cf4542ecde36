// The parts of the files bench that measure response times: of long lists, and of small requests beside stalled
// downloads.
import { mkdirSync, writeFileSync } from 'node:fs';
import { connect, type Socket } from 'node:net';
import { join } from 'node:path';
import { Pool } from 'undici';
import { p50AndP99, rounded, settle } from '../compare-programs-in-turns.ts';
import {
  at,
  cost,
  median,
  privateMebibytes,
  type Running,
  run,
  timed,
} from '../start-and-measure-programs.ts';
import type { FilesBench } from './files-bench-type.ts';

const longList = 10_000;
const veryLongList = 200_000;
const page = 1_000;
const readers = 32;
const asks = 500;
/**
 * Minimum size in MiB of the file for the stalled downloads. The buffers between broker and client may hold a smaller
 * file completely. Its download would then end instead of stalling.
 */
const unfitting = 32;

/** Sends GET requests over one connection. Throws unless the status is 200. */
function asker({ farhand }: FilesBench): { get(url: string): Promise<string>; close(): Promise<void> } {
  const pool = new Pool(farhand.http, { connections: 1 });
  return {
    async get(url) {
      const path = url.replace(farhand.http, '');
      const headers = { authorization: `Bearer ${farhand.key}` };
      const { statusCode, body } = await pool.request({ path, method: 'GET', headers });
      const text = await body.text();
      if (statusCode !== 200) throw new Error(`${path} answered ${statusCode}: ${text.slice(0, 200)}`);
      return text;
    },
    close: () => pool.close(),
  };
}

export async function listing(filesBench: FilesBench): Promise<void> {
  const { table, runs, folder, files, farhand } = filesBench;
  const asked = asker(filesBench);
  for (const [count, limit] of [
    [longList, undefined],
    [veryLongList, page],
  ] as const) {
    const directory = join(folder, `list-${count}`);
    mkdirSync(directory);
    for (let n = 0; n < count; n += 1) writeFileSync(join(directory, `entry-${n}`), '');
    const url = `${files}?path=${encodeURIComponent(directory)}${limit ? `&limit=${limit}` : ''}`;
    const entries = (await asked.get(url)).split('"modified_at"').length - 1;
    if (entries !== (limit ?? count)) throw new Error(`${entries} of ${limit ?? count} entries were listed`);
    const [ours, beside]: [number[], number[]] = [[], []];
    for (let n = 0; n < runs; n += 1) {
      ours.push(...(await timed(1, () => asked.get(url))));
      beside.push((await run(`ls -la ${directory} > /dev/null`)).seconds * 1000);
    }
    const listed = limit ? `the first ${limit.toLocaleString('en')}` : 'all';
    table.row(
      `list ${listed} of the ${count.toLocaleString('en')} entries of a directory`,
      `${rounded(median(ours))} ms`,
      `local \`ls -la\` of all entries: ${rounded(median(beside))} ms`,
      (median(ours) / median(beside)).toFixed(2),
    );
    table.row(
      'resident memory of the agent after the lists of the row above',
      `${cost(farhand.agent.pid).rss.toFixed(0)} MiB`,
    );
  }
  await asked.close();
}

export async function stalled(filesBench: FilesBench): Promise<void> {
  const { table, folder, files, farhand, source, size } = filesBench;
  if (size < unfitting)
    table.note(`downloads of ${size} MiB may fit into buffers and not stall: use --size ${unfitting}`);
  const small = join(folder, 'small');
  writeFileSync(small, 'small\n');
  const asked = asker(filesBench);
  const urls = {
    'GET files/content, 6 bytes': `${files}/content?path=${encodeURIComponent(small)}`,
    'GET a machine': files.replace(/\/files$/, ''),
  };
  const time = async (): Promise<number[][]> => {
    const times: number[][] = [];
    for (const url of Object.values(urls)) times.push(await timed(asks, () => asked.get(url)));
    return times;
  };
  await time();
  const calm = await time();
  const held = privateMemory([farhand.broker, farhand.agent]);
  const download = new URL(`${files}/download?path=${encodeURIComponent(source)}`);
  const sockets = await startStalled(download, farhand.key);
  try {
    const beside = await time();
    const hung = sockets.filter((socket) => !socket.destroyed && !socket.closed).length;
    for (const [n, name] of Object.keys(urls).entries()) {
      const [ours = [], free = []] = [beside[n], calm[n]];
      table.row(
        `${name}, beside ${hung} stalled downloads: p50 / p99`,
        p50AndP99(ours),
        `without them: ${p50AndP99(free)}`,
        `${(at(ours, 0.5) / at(free, 0.5)).toFixed(2)} (p50)`,
      );
    }
    table.row(`private memory that ${hung} stalled downloads take, broker + agent`, held());
  } finally {
    for (const socket of sockets) socket.destroy();
    await asked.close();
  }
}

/** Starts downloads whose clients stop reading after the head of the answer. Resolves when all of them have stalled. */
export async function startStalled(url: URL, key: string): Promise<Socket[]> {
  const sockets = await Promise.all(Array.from({ length: readers }, () => startReading(url, key)));
  await settle();
  return sockets;
}

/** Returns a function that returns, as text, how much private memory each program has gained since this call. */
export function privateMemory(programs: Running[]): () => string {
  const before = programs.map(({ pid }) => privateMebibytes(pid));
  return () => {
    const growth = programs.map(({ pid }, n) => privateMebibytes(pid) - (before[n] ?? 0));
    return `${growth.map((mib) => mib.toFixed(0)).join(' + ')} MiB`;
  };
}

/** Requests a file, and reads only the head of the answer. */
function startReading(url: URL, key: string): Promise<Socket> {
  const socket = connect(Number(url.port), url.hostname);
  const ask = [
    `GET ${url.pathname}${url.search} HTTP/1.1`,
    `Host: ${url.host}`,
    `Authorization: Bearer ${key}`,
  ];
  socket.write(`${ask.join('\r\n')}\r\n\r\n`);
  return new Promise((resolve, reject) => {
    let head = '';
    socket.on('data', (chunk) => {
      head += chunk.toString('latin1');
      if (!head.includes('\r\n\r\n')) return;
      socket.pause();
      if (head.startsWith('HTTP/1.1 200 ')) return resolve(socket);
      reject(new Error(`a download was answered with ${head.split('\r\n')[0]} instead of 200`));
    });
    socket.once('close', () =>
      reject(new Error('the broker closed the connection of a download before the head of its answer')),
    );
    socket.on('error', reject);
  });
}
