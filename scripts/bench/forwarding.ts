// Measures requests that another broker forwards, against the same requests at the owner of the machine: small calls,
// and a download of 1 GiB with its CPU time. Usage: node scripts/bench/forwarding.ts URL OF AN EMPTY DATABASE
import { copyFileSync, mkdirSync, truncateSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { Pool } from 'undici';
import { Farhand as Client } from '../../shared/sdk/index.ts';
import {
  at,
  bench,
  cost,
  firstSecrets,
  median,
  program,
  startAgent,
  timed,
} from './start-and-measure-programs.ts';

const calls = 400;
const rounds = 5;
const bytes = 1024 ** 3;
const downloads = 3;

interface Ask {
  method: 'GET' | 'POST';
  path: string;
  body?: string;
}

/** Sends requests over one connection and reads the answers to their end. */
function asker(url: string, key: string) {
  const pool = new Pool(url, { connections: 1 });
  return async (ask: Ask): Promise<void> => {
    const headers = { authorization: `Bearer ${key}`, 'content-type': 'application/json' };
    const { statusCode, body } = await pool.request({ ...ask, path: `/api/v1${ask.path}`, headers });
    if (statusCode > 299) throw new Error(`${ask.path} answered ${statusCode}: ${await body.text()}`);
    for await (const _chunk of body);
  };
}

async function startBrokers(folder: string, database: string) {
  const start = (dataDir: string) => {
    const flags = ['--data-dir', dataDir, '--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0'];
    const shared = ['--database-url', database, '--peer-listen', '127.0.0.1:0'];
    return program('broker/main.ts', [...flags, ...shared], 'broker is up');
  };
  const [first, second] = [join(folder, 'owner'), join(folder, 'front')];
  const owner = await start(first);
  mkdirSync(second);
  for (const name of ['authority.json', 'webhooks.key']) copyFileSync(join(first, name), join(second, name));
  const front = await start(second);
  const { key, token } = await firstSecrets(first, 1);
  const agent = await startAgent(folder, 'agent', owner.line.grpc ?? '', token);
  return { owner, front, agent, key };
}

await bench(async (folder) => {
  const [database] = process.argv.slice(2);
  if (!database) throw new Error('usage: node scripts/bench/forwarding.ts URL OF AN EMPTY DATABASE');
  const { owner, front, agent, key } = await startBrokers(folder, database);
  const [machine] = (await new Client({ baseUrl: owner.line.http ?? '', apiKey: key }).machines.list({}))
    .items;
  const ways = { local: asker(owner.line.http ?? '', key), forwarded: asker(front.line.http ?? '', key) };
  const file = join(folder, 'file');
  writeFileSync(file, '');
  truncateSync(file, bytes);
  const stat: Ask = { method: 'GET', path: `/machines/${machine?.id}/files/stat?path=/etc` };
  const command = JSON.stringify({ machine_id: machine?.id, command: 'true', wait: 10_000 });
  const small: Record<string, Ask> = { stat, true: { method: 'POST', path: '/commands', body: command } };
  for (const [name, ask] of Object.entries(small)) {
    const times: Record<string, number[]> = { local: [], forwarded: [] };
    for (let n = 0; n <= rounds; n += 1)
      for (const [way, send] of Object.entries(ways)) {
        const p50 = at(await timed(calls / (name === 'stat' ? 1 : 4), () => send(ask)), 0.5);
        // The first round warms up.
        if (n > 0) times[way]?.push(p50);
      }
    const [local, forwarded] = [median(times.local ?? []), median(times.forwarded ?? [])];
    const ratio = (forwarded / local).toFixed(2);
    console.log(
      `${name}: p50 ${local.toFixed(2)} ms local, ${forwarded.toFixed(2)} ms forwarded, ratio ${ratio}`,
    );
  }
  const download: Ask = { method: 'GET', path: `/machines/${machine?.id}/files/download?path=${file}` };
  const programs = { owner, front, agent };
  for (const [way, send] of Object.entries(ways)) {
    const before = Object.values(programs).map(({ pid }) => cost(pid).cpu);
    const ms = median(await timed(downloads, () => send(download)));
    const cpu = Object.entries(programs).map(([name, { pid }], n) => {
      const seconds = (cost(pid).cpu - (before[n] ?? 0)) / downloads;
      return `${name} ${seconds.toFixed(2)}`;
    });
    console.log(`1 GiB ${way}: ${Math.round(1024 / (ms / 1000))} MiB/s, CPU seconds: ${cpu.join(', ')}`);
  }
});
