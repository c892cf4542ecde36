// Measures a command compared with a local spawn, a list compared with bare koa, and the cost of idle programs.
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { Pool } from 'undici';
import { loadIdentity } from '../../agent/join-or-load-identity.ts';
import { at, bench, cost, program, startFarhand, timed } from './start-and-measure-programs.ts';

const ms = (value: number): string => value.toFixed(2).padStart(8);

async function spawnTrue(): Promise<void> {
  await once(spawn('/bin/sh', ['-c', 'true'], { stdio: 'ignore' }), 'close');
}

const path = '/api/v1/machines';
const width = 32;
const seconds = 5;

/** Sends requests, `width` at once. Returns the number of answers per second. Throws unless every answer is 200. */
async function perSecond(origin: string, headers: Record<string, string>): Promise<number> {
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

async function main(folder: string): Promise<void> {
  const { broker, agent, http, grpc, key, token } = await startFarhand(folder);
  const headers = { authorization: `Bearer ${key}`, 'content-type': 'application/json' };
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
    const params = { broker: grpc, joinToken: token, name: `m${n}`, tags: [] };
    await loadIdentity(mkdtempSync(join(folder, 'machine-')), params);
  }
  const bare = await program(
    'scripts/bench/bare-koa-server.ts',
    [`${http}${path}?limit=100`, key],
    'bare is up',
  );
  const rates = { ours: 0, bare: 0 };
  for (let round = 0; round < 3; round += 1) {
    rates.ours = Math.max(rates.ours, await perSecond(http, headers));
    rates.bare = Math.max(rates.bare, await perSecond(bare.line.url ?? '', headers));
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

await bench(main);
