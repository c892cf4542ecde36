// Measures list requests on a history with many rows. Each filter in the OpenAPI document is measured alone and
// together with machine_id; so are sort fields and offsets. Also measures the longest wait of another request
// meanwhile.
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { request } from 'undici';
import { Farhand as Client } from '../../../shared/sdk/index.ts';
import { at } from '../start-and-measure-programs.ts';
import { BrokerProcess } from './broker-process.ts';
import { fillHistory } from './fill-history-rows.ts';
import { FleetOfAgents } from './fleet-of-agents.ts';
import { Prober } from './http-load.ts';
import { type Figures, milliseconds } from './print-figures.ts';

const machines = 100;
/**
 * Maximum number of requests for one query. No request is sent after `longestMs` milliseconds, except for the first
 * `fewestRequests`.
 */
const mostRequests = 20;
const fewestRequests = 3;
const longestMs = 500;
const offsets = [100, 1_000, 10_000];
/** Parameters that are not measured as filters. `key` is left out, because it is only another name of `key_id`. */
const notFilters = new Set(['limit', 'offset', 'sort', 'since', 'until', 'include', 'key']);
/**
 * Filter values that only one row in a thousand has, by list and filter. For any other filter, the bench takes a value
 * from a row of the list.
 */
const rare: Readonly<Record<string, string>> = {
  'events type': 'command.failed',
  'commands status': 'failed',
  'audit action': 'machines.update',
  'runs status': 'failed',
  'deliveries status': 'failed',
  'deliveries type': 'command.failed',
};

interface List {
  noun: string;
  /** Path of the route with its parameters, as in the OpenAPI document. */
  route: string;
  path: string;
}

interface Context {
  broker: BrokerProcess;
  figures: Figures;
  machineId: string;
  rows: number;
}

/** Starts a broker of its own, and fills five tables of its history with `rows` rows each. */
export async function listHistory(folder: string, figures: Figures, rows: number): Promise<void> {
  const broker = await BrokerProcess.start({ dataDir: folder, machines });
  const { grpc, joinToken } = broker;
  const agents = await FleetOfAgents.start({
    brokers: [grpc],
    agents: machines,
    joinToken,
  });
  try {
    const client = new Client({ baseUrl: broker.http, apiKey: broker.key, retries: 0 });
    const { lists, ...ids } = await declare(client, agents.machineIds[0] ?? '');
    await broker.stop('SIGTERM');
    const begun = performance.now();
    fillHistory(join(folder, 'history.db'), { rows, machineIds: agents.machineIds, ...ids });
    figures.line(`${rows} rows in each table, written to the file in ${seconds(begun)} s`);
    const started = performance.now();
    await broker.restart();
    figures.line(`the broker serves ${seconds(started)} s after its start`);
    await agents.linked(machines, 60);
    await sleep(2_000);
    const context = { broker, figures, machineId: agents.machineIds[0] ?? '', rows };
    for (const list of lists) await measureList(context, list);
  } finally {
    await agents.close();
    await broker.stop('SIGTERM').catch(() => undefined);
  }
}

const seconds = (begun: number): string => ((performance.now() - begun) / 1000).toFixed(1);

/** Creates a schedule and a webhook, to which the invented runs and deliveries belong. Returns the lists to measure. */
async function declare(client: Client, machine_id: string) {
  const { id: keyId } = (await client.keys.list({ limit: 1 })).items[0] ?? { id: '' };
  const { id: scheduleId } = await client.schedules.create({
    name: 'bench',
    machine_id,
    command: 'true',
    cron: '0 0 1 1 *',
    enabled: false,
  });
  const { id: webhookId } = await client.webhooks.create({
    url: 'https://receiver.example',
    // The bench opens no session, so this webhook gets no real event.
    events: ['session.*'],
  });
  const lists: List[] = [
    { noun: 'events', route: '/events', path: '/events' },
    { noun: 'commands', route: '/commands', path: '/commands' },
    { noun: 'audit', route: '/audit', path: '/audit' },
    { noun: 'runs', route: '/schedules/{schedule_id}/history', path: `/schedules/${scheduleId}/history` },
    {
      noun: 'deliveries',
      route: '/webhooks/{webhook_id}/deliveries',
      path: `/webhooks/${webhookId}/deliveries`,
    },
  ];
  return { keyId, scheduleId, webhookId, lists };
}

async function measureList(context: Context, list: List): Promise<void> {
  const { filters, sorts } = await parametersOf(context, list.route);
  const page = await read(context, `${list.path}?limit=100&offset=${Math.min(5_000, context.rows / 2)}`);
  const exampleOf = (name: string): string | undefined => {
    if (name === 'machine_id') return context.machineId;
    const value = rare[`${list.noun} ${name}`] ?? page.find((item) => (item[name] ?? null) !== null)?.[name];
    return value === undefined ? undefined : String(value);
  };
  const middle = encodeURIComponent(
    String(page[0]?.created_at ?? page[0]?.timestamp ?? page[0]?.at ?? page[0]?.started_at),
  );
  const queries = new Map<string, string>([['no filter', '']]);
  for (const offset of offsets) queries.set(`offset ${offset}`, `offset=${offset}`);
  for (const sort of sorts) queries.set(`sort=${sort}`, `sort=${sort}`);
  for (const name of ['since', 'until']) queries.set(name, `${name}=${middle}`);
  for (const name of filters) {
    const value = exampleOf(name);
    if (value === undefined)
      context.figures.line(
        `${list.noun}: the filter ${name} is not measured, because none of ${page.length} rows has a value to filter by`,
      );
    else queries.set(name, `${name}=${encodeURIComponent(value)}`);
  }
  const withMachine = [...queries].filter(([what]) => what !== 'no filter' && what !== 'machine_id');
  for (const [what, query] of queries) await measureOrFail(context, list, what, query);
  if (!filters.includes('machine_id')) return;
  for (const [what, query] of withMachine)
    await measureOrFail(context, list, `machine_id and ${what}`, `machine_id=${context.machineId}&${query}`);
}

/** Measures a query. After a failure, the bench continues with the next query. */
async function measureOrFail(context: Context, list: List, what: string, query: string): Promise<void> {
  await measureQuery(context, list, what, query).catch((error: unknown) =>
    context.figures.failure(`${list.noun}, ${what}`, error),
  );
}

async function measureQuery(
  { broker, figures }: Context,
  { noun, path }: List,
  what: string,
  query: string,
): Promise<void> {
  const url = `${broker.http}/api/v1${path}?${query}`;
  const headers = { authorization: `Bearer ${broker.key}` };
  const prober = new Prober(broker.http, '/api/v1/machines?limit=1', broker.key);
  const times: number[] = [];
  const begun = performance.now();
  while (
    times.length < fewestRequests ||
    (times.length < mostRequests && performance.now() - begun < longestMs)
  ) {
    const sent = performance.now();
    const answer = await request(url, { headers });
    await answer.body.dump();
    if (answer.statusCode !== 200) {
      await prober.stop();
      throw new Error(`${path}?${query} answered ${answer.statusCode}`);
    }
    times.push(performance.now() - sent);
  }
  const { longest } = await prober.stop();
  times.sort((a, b) => a - b);
  figures.row(
    `${noun}, ${what}: p50 / p95`,
    `${milliseconds(at(times, 0.5))} / ${milliseconds(at(times, 0.95))}`,
    `longest wait of another request: ${milliseconds(longest)}`,
  );
}

async function read(
  { broker }: Context,
  path: string,
): Promise<Record<string, string | number | boolean | null>[]> {
  const headers = { authorization: `Bearer ${broker.key}` };
  const { body } = await request(`${broker.http}/api/v1${path}`, { headers });
  return ((await body.json()) as { data: Record<string, string>[] }).data;
}

interface Parameter {
  name: string;
  in: string;
  schema?: { enum?: string[] };
}

/** Returns the filters and sort fields of a list route, as the OpenAPI document lists them. */
async function parametersOf({ broker }: Context, route: string) {
  const { body } = await request(`${broker.http}/api/v1/openapi.json`);
  const { paths } = (await body.json()) as { paths: Record<string, { get?: { parameters?: Parameter[] } }> };
  const get = paths[route]?.get ?? paths[`/api/v1${route}`]?.get;
  if (!get) throw new Error(`the OpenAPI document has no ${route}`);
  const query = (get.parameters ?? []).filter((parameter) => parameter.in === 'query');
  return {
    filters: query.map(({ name }) => name).filter((name) => !notFilters.has(name)),
    sorts: query.find(({ name }) => name === 'sort')?.schema?.enum ?? [],
  };
}
