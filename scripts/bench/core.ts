// The core figures: a command beside a local spawn, a list beside bare koa, and what idle programs cost.
// Quote the ratios: absolute times belong to the machine they were taken on.
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { setTimeout as sleep } from 'node:timers/promises';
import { Pool } from 'undici';
import { openIdentity } from '../../agent/identity.ts';
import { withBroker } from '../../broker/cli/connect.ts';

const root = join(import.meta.dirname, '../..');
const folder = mkdtempSync(join(tmpdir(), 'farhand-bench-'));
const children: ChildProcess[] = [];

/** Starts a program and resolves with the first log line that says `message`. */
async function program(
  main: string,
  args: string[],
  message: string,
): Promise<{ pid: number; line: Record<string, string> }> {
  const child = spawn(process.execPath, [join(root, main), ...args], { stdio: ['ignore', 'ignore', 'pipe'] });
  children.push(child);
  for await (const text of createInterface({ input: child.stderr })) {
    const line = JSON.parse(text) as Record<string, string>;
    // Later lines must not fill the pipe.
    if (line.msg === message) {
      child.stderr.resume();
      return { pid: child.pid ?? 0, line };
    }
  }
  throw new Error(`${main} ended before it said: ${message}`);
}

/** Milliseconds of each of `count` runs, one after another. */
async function timed(count: number, run: () => Promise<unknown>): Promise<number[]> {
  const times: number[] = [];
  for (let n = 0; n < count; n += 1) {
    const started = performance.now();
    await run();
    times.push(performance.now() - started);
  }
  return times.sort((a, b) => a - b);
}

const at = (sorted: number[], share: number): number =>
  sorted[Math.floor(sorted.length * share)] ?? Number.NaN;
const ms = (value: number): string => value.toFixed(2).padStart(8);

async function spawnTrue(): Promise<void> {
  await once(spawn('/bin/sh', ['-c', 'true'], { stdio: 'ignore' }), 'close');
}

/** Requests a second with `width` at once for some seconds; every answer must be 200. */
async function perSecond(
  origin: string,
  path: string,
  headers: Record<string, string>,
  width = 32,
  seconds = 5,
) {
  const pool = new Pool(origin, { connections: width });
  const end = performance.now() + seconds * 1000;
  let done = 0;
  const lane = async (): Promise<void> => {
    while (performance.now() < end) {
      const { statusCode, body } = await pool.request({ path, method: 'GET', headers });
      await body.dump();
      if (statusCode !== 200) throw new Error(`${path} answered ${statusCode}`);
      done += 1;
    }
  };
  await Promise.all(Array.from({ length: width }, lane));
  await pool.close();
  return done / seconds;
}

/** Resident bytes and CPU seconds so far of a process. */
function cost(pid: number): { rss: number; cpu: number } {
  const status = readFileSync(`/proc/${pid}/status`, 'utf8');
  const fields = readFileSync(`/proc/${pid}/stat`, 'utf8')
    .replace(/^.*\) /, '')
    .split(' ');
  return {
    rss: Number(/VmRSS:\s+(\d+)/.exec(status)?.[1]) / 1024,
    cpu: (Number(fields[11]) + Number(fields[12])) / 100,
  };
}

async function main(): Promise<void> {
  const dataDir = join(folder, 'broker');
  const flags = ['--data-dir', dataDir, '--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0'];
  const broker = await program('broker/main.ts', flags, 'broker is up');
  const { http = '', grpc = '' } = broker.line;
  const made = await withBroker({ dataDir, url: undefined, apiKey: undefined }, async (client) => ({
    key: (await client.keys.create({ name: 'bench', scopes: ['admin'] })).key,
    token: (await client.joinTokens.create({ uses: 100 })).token,
  }));
  const agentFlags = ['--broker', grpc, '--join-token', made.token, '--data-dir', join(folder, 'agent')];
  const agent = await program('agent/main.ts', agentFlags, 'linked');
  const headers = { authorization: `Bearer ${made.key}`, 'content-type': 'application/json' };
  const pool = new Pool(http, { connections: 1 });
  const ask = async (method: 'GET' | 'POST', path: string, body?: object): Promise<unknown> => {
    const answer = await pool.request({
      method,
      path: `/api/v1${path}`,
      headers,
      body: body ? JSON.stringify(body) : null,
    });
    return answer.body.json();
  };
  const { data } = (await ask('GET', '/machines')) as { data: { id: string }[] };
  const machine_id = data[0]?.id;

  const command = { machine_id, command: 'true' };
  await timed(50, () => ask('POST', '/commands', command));
  await timed(50, spawnTrue);
  const commands = await timed(500, () => ask('POST', '/commands', command));
  const spawns = await timed(500, spawnTrue);
  console.log(
    `POST /commands true, one at a time  p50 ${ms(at(commands, 0.5))} ms  p99 ${ms(at(commands, 0.99))} ms`,
  );
  console.log(
    `local spawn of sh -c true           p50 ${ms(at(spawns, 0.5))} ms  p99 ${ms(at(spawns, 0.99))} ms`,
  );
  console.log(`ratio of p50                            ${ms(at(commands, 0.5) / at(spawns, 0.5))}`);

  for (let n = 1; n < 100; n += 1) {
    const wish = { broker: grpc, joinToken: made.token, name: `m${n}`, tags: [] };
    await openIdentity(mkdtempSync(join(folder, 'machine-')), wish);
  }
  const bare = await program(
    'scripts/bench/bare.ts',
    [`${http}/api/v1/machines?limit=100`, made.key],
    'bare is up',
  );
  const rates = { ours: 0, bare: 0 };
  for (const round of [1, 2, 3]) {
    rates.ours = Math.max(rates.ours, await perSecond(http, '/api/v1/machines', headers));
    rates.bare = Math.max(rates.bare, await perSecond(bare.line.url ?? '', '/api/v1/machines', headers));
    if (round === 3) break;
  }
  console.log(`GET /machines, 100 registered, 20 a page  ${rates.ours.toFixed(0).padStart(7)} requests/s`);
  console.log(`bare koa + router, the same bytes         ${rates.bare.toFixed(0).padStart(7)} requests/s`);
  console.log(`ratio                                    ${ms(rates.ours / rates.bare)}`);
  await pool.close();

  const before = cost(agent.pid);
  await sleep(60_000);
  const idle = { broker: cost(broker.pid), agent: cost(agent.pid) };
  console.log(
    `idle RSS: broker ${idle.broker.rss.toFixed(0)} MiB, agent ${idle.agent.rss.toFixed(0)} MiB (run from source)`,
  );
  console.log(`idle agent: ${(((idle.agent.cpu - before.cpu) / 60) * 100).toFixed(2)} % of a core over 60 s`);
}

await main().finally(() => {
  for (const child of children) child.kill('SIGTERM');
  rmSync(folder, { recursive: true, force: true });
});
