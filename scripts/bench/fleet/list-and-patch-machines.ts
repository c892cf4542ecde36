// Measures lists and changes of machines: GET /machines compared with bare koa and router, and PATCH of one machine.
import { setTimeout as sleep } from 'node:timers/promises';
import type { Farhand } from '../../../shared/sdk/index.ts';
import { rounded } from '../compare-programs-in-turns.ts';
import { at, program, timed } from '../start-and-measure-programs.ts';
import type { Fleet } from './fleet-context.ts';
import { perSecond } from './http-load.ts';
import { milliseconds } from './print-figures.ts';

const changesPerSecond = 5;
const patches = 40;

/**
 * Queries of GET /machines: one without parameters, then filters, sort fields and an offset. All answers are pages of
 * 20 machines.
 */
const selections: [what: string, query: string][] = [
  ['plain', ''],
  ['status=online', 'status=online'],
  ['tags', 'tags=limited'],
  ['sort=name', 'sort=name'],
  ['sort=hostname', 'sort=hostname'],
  ['sort=status', 'sort=status'],
  ['sort=last_seen', 'sort=last_seen'],
  ['search', 'search=node-000'],
  ['offset in the middle', 'offset=50'],
];

/** Filters and sort fields of GET /machines/statuses, whose answers also contain the reports of the machines. */
const ofStatuses: [what: string, query: string][] = [
  ['plain', ''],
  ['status=online', 'status=online'],
  ['sort=-cpu', 'sort=-cpu'],
];

export async function listMachines({ broker, client, figures, settings }: Fleet): Promise<void> {
  const limited = await client.keys.create({
    name: 'limited',
    scopes: ['machines:read'],
    tags: ['limited'],
  });
  const lists = '/api/v1/machines';
  const statuses = `${lists}/statuses`;
  const bareOf = async (path: string): Promise<string> => {
    const url = `${broker.http}${path}?limit=20`;
    const { line } = await program('scripts/bench/bare-koa-server.ts', [url, broker.key], 'bare is up');
    return `${line.url}${lists}`;
  };
  const floors: Record<string, string> = { [lists]: await bareOf(lists), [statuses]: await bareOf(statuses) };
  const beside = async (what: string, query: string, key: string, path = lists): Promise<void> => {
    const bareRate = await perSecond(floors[path] ?? '', key, settings.seconds);
    const rate = await perSecond(`${broker.http}${path}?${query}`, key, settings.seconds);
    const ratio = (rate / bareRate).toFixed(3);
    figures.row(
      `\`GET ${path.slice('/api/v1'.length)}\`, ${what}`,
      `${rounded(rate)}/s`,
      `bare koa and router: ${rounded(bareRate)}/s`,
      ratio,
    );
  };
  figures.line('requests over 32 connections');
  // All programs are warmed up before the first measurement.
  for (const url of [...Object.values(floors), `${broker.http}${lists}`, `${broker.http}${statuses}`])
    await perSecond(url, broker.key, settings.seconds);
  for (const [what, query] of selections) await beside(what, query, broker.key);
  for (const [what, query] of ofStatuses) await beside(what, query, broker.key, statuses);
  await beside('key limited to machines with a tag', '', limited.key);
  await beside('the same key, sort=name', 'sort=name', limited.key);
  const stop = changeNames(client);
  await beside(
    `sort=name, while ${changesPerSecond} machines a second get a new name`,
    'sort=name',
    broker.key,
  );
  await stop();
}

/** Renames machines until it is stopped. */
function changeNames(client: Farhand): () => Promise<void> {
  let going = true;
  const changes = (async () => {
    const { items } = await client.machines.list({ limit: 1, sort: '-name' });
    const machine = items[0];
    for (let n = 0; going && machine; n += 1) {
      await client.machines.update({ machine_id: machine.id, name: `${machine.name}-${n % 2}` });
      await sleep(1000 / changesPerSecond);
    }
    if (machine) await client.machines.update({ machine_id: machine.id, name: machine.name });
  })();
  return () => {
    going = false;
    return changes;
  };
}

export async function patchMachine({ broker, client, agents, figures }: Fleet): Promise<void> {
  const [machine_id] = agents.machineIds;
  if (machine_id === undefined) throw new Error('no machine has joined');
  const idleBegan = broker.written();
  await sleep(2_000);
  const idlePerMs = (broker.written() - idleBegan) / 2_000;
  const [before, begun] = [broker.written(), performance.now()];
  let n = 0;
  const times = await timed(patches, () => client.machines.update({ machine_id, name: `renamed-${n++}` }));
  const idle = idlePerMs * (performance.now() - begun);
  const bytes = (broker.written() - before - idle) / patches;
  figures.row(
    '`PATCH` of one machine: time (p50 / p99); data that each `PATCH` writes to disk',
    `${milliseconds(at(times, 0.5))} / ${milliseconds(at(times, 0.99))}; ${rounded(bytes / 1024)} KiB`,
  );
}
