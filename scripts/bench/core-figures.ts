// Measures a list compared with bare koa, and the cost of idle programs.
import { mkdtempSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { loadIdentity } from '../../agent/join-or-load-identity.ts';
import { perSecond } from './fleet/http-load.ts';
import { bench, cost, program, startFarhand } from './start-and-measure-programs.ts';

const seconds = 5;

async function main(folder: string): Promise<void> {
  const { broker, agent, http, grpc, key, token } = await startFarhand(folder);
  for (let n = 1; n < 100; n += 1) {
    const params = { broker: grpc, joinToken: token, name: `m${n}`, tags: [] };
    await loadIdentity(mkdtempSync(join(folder, 'machine-')), params);
  }
  const list = `${http}/api/v1/machines`;
  const bare = await program('scripts/bench/bare-koa-server.ts', [`${list}?limit=100`, key], 'bare is up');
  const rates = { ours: 0, bare: 0 };
  for (let round = 0; round < 3; round += 1) {
    rates.ours = Math.max(rates.ours, await perSecond(list, key, seconds));
    rates.bare = Math.max(rates.bare, await perSecond(`${bare.line.url}/api/v1/machines`, key, seconds));
  }
  console.log(`GET /machines, 100 registered, 20 a page  ${rates.ours.toFixed(0).padStart(7)} requests/s`);
  console.log(`bare koa + router, the same bytes         ${rates.bare.toFixed(0).padStart(7)} requests/s`);
  console.log(
    `ratio                                     ${(rates.ours / rates.bare).toFixed(2).padStart(7)}`,
  );

  const before = cost(agent.pid);
  await sleep(60_000);
  const idle = { broker: cost(broker.pid), agent: cost(agent.pid) };
  console.log(
    `idle RSS: broker ${idle.broker.rss.toFixed(0)} MiB, agent ${idle.agent.rss.toFixed(0)} MiB (run from source)`,
  );
  console.log(`idle agent: ${(((idle.agent.cpu - before.cpu) / 60) * 100).toFixed(2)} % of a core over 60 s`);
}

await bench(main);
