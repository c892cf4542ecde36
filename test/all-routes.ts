// Builds a request to every route from its schemas, and starts a broker that has two objects of each kind.
import { readdirSync } from 'node:fs';
import { join } from 'node:path';
import { expect } from 'vitest';
import { z } from 'zod';
import { codesOf } from '../broker/http/openapi.ts';
import type { RawInput } from '../broker/request-checks/parse-api-request.ts';
import type { Route, Scope } from '../shared/api/route.ts';
import { allRoutes } from '../shared/api/route-table.ts';
import { type IdNoun, idSchemas } from '../shared/api/shared-schemas.ts';
import { codes, isCode } from '../shared/errors.ts';
import { storedState, storedTables } from './read-stored-state.ts';
import { makeSigner } from './sign-packages.ts';
import {
  type AgentHandle,
  type Answer,
  call,
  startFarhand,
  type TestSystem,
  temporaryFolder,
} from './start-farhand.ts';
import { packageOf } from './upgrades-fixture.ts';

// ---- Requests made from the schemas of a route

/** The parts of JSON Schema that the routes use. */
interface Json {
  type?: string;
  properties?: Record<string, Json>;
  required?: string[];
  items?: Json;
  anyOf?: Json[];
  oneOf?: Json[];
  enum?: unknown[];
  const?: unknown;
  minimum?: number;
  examples?: unknown[];
}

export interface Named {
  /** Name of a route, such as `machines.list`. */
  name: string;
  route: Route;
}

export type Ids = Record<IdNoun, string>;

/** Where a request has an id, such as `body.machine_ids.0`. */
export interface Place {
  at: string;
  noun: IdNoun;
}

/** Values for fields that need more than the schema says, such as a path that exists. */
type Known = Readonly<Record<string, string>>;

const parts = ['params', 'query', 'body'] as const;
export const nouns = Object.keys(idSchemas) as IdNoun[];
export const everything: Named[] = allRoutes().map(({ noun, operation, route }) => ({
  name: `${noun}.${operation}`,
  route,
}));
// The WebSocket route is left out, because it needs a ticket. websocket.test.ts tests it.
export const table = everything.filter(({ route }) => route.kind !== 'socket');
/**
 * Divides the routes that need a key into several lists. Each list is tested with a broker of its own, because a broker
 * limits how many wrong keys it checks per minute.
 */
export const inParts = (parts: number): Named[][] =>
  Array.from({ length: parts }, (_, part) => keyed.filter((_one, n) => n % parts === part));
export const keyed = table.filter(({ route }) => route.access !== 'everybody');

function schemaOf(route: Route, part: (typeof parts)[number]): Json {
  const schema = part === 'body' ? route.body : z.object(route[part]);
  return schema ? (z.toJSONSchema(schema, { io: 'input', unrepresentable: 'any' }) as Json) : {};
}

/**
 * Returns the kind of object whose id a field contains, such as machine for `destination_machine_id`. Returns undefined
 * for other fields, and for ids that the broker does not look up. Throws for an id of an unknown kind.
 */
function nounAt(at: string): IdNoun | undefined {
  const field = at
    .split('.')
    .filter((step) => step !== '0')
    .at(-1);
  if (!field || !/_ids?$/.test(field)) return undefined;
  // The broker does not look up these ids: of a session's client, of an earlier request or event, or of a revoked key
  // or login.
  if (['client_id', 'request_id', 'event_id'].includes(field)) return undefined;
  if (['query.key_id', 'query.login_id'].includes(at)) return undefined;
  const noun = nouns.find((one) => new RegExp(`(^|_)${one}_ids?$`).test(field));
  if (!noun) throw new Error(`${at} is an id of something that dispatch cannot look up`);
  return noun;
}

function branches(schema: Json): Json[] {
  return schema.anyOf ?? schema.oneOf ?? [schema];
}

function placesInSchema(schema: Json, at: string): Place[] {
  return branches(schema).flatMap((branch) => {
    const noun = branch.type === 'string' ? nounAt(at) : undefined;
    if (noun) return [{ at, noun }];
    if (branch.items) return placesInSchema(branch.items, `${at}.0`);
    return Object.entries(branch.properties ?? {}).flatMap(([key, inner]) =>
      placesInSchema(inner, `${at}.${key}`),
    );
  });
}

export const placesIn = (route: Route): Place[] =>
  parts.flatMap((part) => placesInSchema(schemaOf(route, part), part));

/** Makes a value that matches a schema, with its required fields and all ids. `swap` replaces the id at one place. */
function fill(schema: Json, at: string, ids: Ids, known: Known, swap?: { at: string; id: string }): unknown {
  const branch = branches(schema)[0] ?? {};
  const inner = (one: Json, key: string): unknown => fill(one, `${at}.${key}`, ids, known, swap);
  const noun = branch.type === 'string' ? nounAt(at) : undefined;
  if (noun) return swap?.at === at ? swap.id : ids[noun];
  const received = known[at.split('.').at(-1) ?? ''];
  if (received !== undefined) return received;
  if (branch.const !== undefined || branch.enum) return branch.const ?? branch.enum?.[0];
  if (branch.type === 'array') return branch.items ? [inner(branch.items, '0')] : [];
  if (branch.properties) {
    const needed = Object.entries(branch.properties).filter(
      ([key, one]) => branch.required?.includes(key) || placesInSchema(one, `${at}.${key}`).length > 0,
    );
    return Object.fromEntries(needed.map(([key, one]) => [key, inner(one, key)]));
  }
  if (branch.type === 'boolean') return false;
  if (branch.type === 'integer' || branch.type === 'number') return branch.minimum ?? 0;
  return branch.type === 'string' ? (branch.examples?.[0] ?? 'x') : {};
}

export function rawOf(route: Route, ids: Ids, known: Known, swap?: { at: string; id: string }): RawInput {
  const [params, query, body] = parts.map((part) => fill(schemaOf(route, part), part, ids, known, swap));
  return {
    // The cast is safe: the value matches schemas of z.object().
    params: params as Record<string, string>,
    query: query as Record<string, string>,
    headers: {},
    body: route.body && { ...(body as object), ...alternatives[`${route.method} ${route.path}`] },
  };
}

/** Fields that a request needs although its schema does not require them, because each has an alternative. */
const alternatives: Readonly<Record<string, object>> = { 'POST /schedules': { cron: '30 2 * * *' } };

// ---- A system with two machines, and calls to it

export interface Scene {
  system: TestSystem;
  /** A folder that must stay empty. */
  folder: string;
  known: Known;
  /** Ids of one object of each kind on the first machine, and on the second. */
  here: Ids;
  there: Ids;
  agents: AgentHandle[];
  /** The id of a delivery of the channel in `here`. `here.delivery` belongs to the webhook in `here`. */
  channelDelivery: string;
  /** The request ids of all requests so far. */
  requestIds: string[];
  /** Creates a key that is limited to the machine in `here`, by its id or its tag. */
  limited(scopes: Scope[], by?: Limit): Promise<string>;
}

export type Limit = 'machine_ids' | 'tags';

export async function startScene(): Promise<Scene> {
  const system = await startFarhand({ tuning: { alerts: { quietMs: 0, startMs: 0 } } });
  const folder = temporaryFolder('untouched');
  const agents = [
    await system.agent({ name: 'here', tags: 'here' }),
    await system.agent({ name: 'there', tags: 'there' }),
  ];
  const [here, there] = await Promise.all([
    furnish(system, agents[0]!, 'here'),
    furnish(system, agents[1]!, 'there'),
  ]);
  await settled(system);
  const reach = { machine_ids: [here.machine], tags: ['here'] };
  const uploaded = packageOf('9.0.0', makeSigner(), fileBytes);
  return {
    system,
    folder,
    known: {
      path: join(folder, 'file'),
      command: `touch ${folder}/ran`,
      file: 'page.js',
      package: uploaded.file,
      signature: uploaded.signature,
      topics: 'machines',
      since: '2026-11-21T10:00:00Z',
    },
    here,
    there,
    agents,
    channelDelivery: await channelDelivery(system.client, here.channel),
    requestIds: [],
    limited: async (own, by = 'machine_ids') => (await system.keyed(own, { [by]: reach[by] })).key,
  };
}

/** Creates one object of each kind that has an id. Does not compile if a new kind of object is missing. */
async function furnish(system: TestSystem, { machineId: machine }: AgentHandle, tag: string): Promise<Ids> {
  const [session, command, batch, upgrade, key, token, login] = await Promise.all([
    system.client.sessions.create({ machine_id: machine, shell: 'cat' }),
    // Waits long enough for the event of the start to be recorded.
    system.client.commands.create({ machine_id: machine, command: 'cat', input: true, wait: 100 }),
    system.client.batches.create({ machine_ids: [machine], command: 'true' }),
    system.client.upgrades.create({ machine_ids: [machine] }),
    system.client.keys.create({ name: tag, scopes: ['files:read'] }),
    system.client.joinTokens.create({ name: tag }),
    system.client.logins.create({ name: tag }),
  ]);
  const schedule = await system.client.schedules.create({
    ...{ machine_id: machine, name: tag, command: 'true', cron: '@yearly', catch_up: 'none' },
  });
  const saved = await system.client.savedCommands.create({
    name: `saved ${tag}`,
    argv: ['true'],
    parameters: [{ name: 'unit', type: 'string', required: false }],
  });
  await system.client.schedules.run({ schedule_id: schedule.id });
  const { items } = await system.client.schedules.history({ schedule_id: schedule.id });
  expect(session.status).toBe('CONNECTED');
  return {
    machine,
    session: session.id,
    command: command.id,
    batch: batch.id,
    upgrade: upgrade.id,
    key: key.id,
    login: login.id,
    join_token: token.id,
    schedule: schedule.id,
    run: items[0]?.id ?? '',
    saved_command: saved.id,
    ...(await deliveredTo(system, machine)),
    ...(await alertedBy(system, machine)),
  };
}

/** Creates a webhook with a failed delivery: the broker may not send to its URL. */
async function deliveredTo(
  { client }: TestSystem,
  machine: string,
): Promise<Pick<Ids, 'webhook' | 'delivery'>> {
  const { id } = await client.webhooks.create({
    url: 'http://localhost:1/',
    events: ['command.*'],
    machine_ids: [machine],
  });
  await client.commands.create({ machine_id: machine, command: 'true' });
  const { items } = await client.webhooks.deliveries({ webhook_id: id });
  return { webhook: id, delivery: items[0]!.id };
}

/**
 * Creates a rule that opens an alert at once, and a channel with a failed delivery: the broker may not send to its URL.
 */
async function alertedBy(
  { client }: TestSystem,
  machine: string,
): Promise<Pick<Ids, 'alert' | 'rule' | 'channel' | 'window'>> {
  const { id: channel } = await client.alertChannels.create({
    ...{ name: 'nowhere', type: 'ntfy', url: 'http://localhost:1/topic' },
  });
  const { id: rule } = await client.alertRules.create({
    ...{
      name: 'memory',
      kind: 'memory',
      above: 0.001,
      for: 0,
      machine_ids: [machine],
      channel_ids: [channel],
    },
  });
  await expect.poll(() => channelDelivery(client, channel), { interval: 20, timeout: 5_000 }).not.toBe('');
  const { items } = await client.alerts.list({ rule_id: rule });
  const { id: window } = await client.maintenanceWindows.create({
    ...{ name: 'later', machine_ids: [machine], starts_at: '2099-01-01T00:00:00Z', duration: 60_000 },
  });
  return { alert: items[0]?.id ?? '', rule, channel, window };
}

/** Returns the id of a delivery that the channel has already attempted. */
async function channelDelivery(client: TestSystem['client'], channel_id: string): Promise<string> {
  const { items } = await client.alertChannels.deliveries({ channel_id });
  return items.find((one) => !isUntried(one))?.id ?? '';
}

/**
 * Waits until the broker has attempted each webhook delivery, and runs no command except one `cat` on each machine.
 * Every later change then has a cause in the test. Each machine has one webhook, so the number of webhooks is also the
 * number of these commands.
 */
async function settled({ client }: TestSystem): Promise<void> {
  const { items: webhooks } = await client.webhooks.list();
  const busy = async (): Promise<number> => {
    const running = await client.commands.list({ status: 'running' });
    const received = await Promise.all(
      webhooks.map(({ id }) => client.webhooks.deliveries({ webhook_id: id })),
    );
    return running.total - webhooks.length + received.flatMap(({ items }) => items.filter(isUntried)).length;
  };
  await expect.poll(busy, { interval: 20 }).toBe(0);
}

const isUntried = ({ attempts }: { attempts: unknown[] }): boolean => attempts.length === 0;

/** True for machines, and for kinds of objects that belong to machines. */
export const onMachine: Record<IdNoun, boolean> = {
  machine: true,
  command: true,
  batch: true,
  upgrade: true,
  schedule: true,
  run: true,
  saved_command: false,
  session: true,
  key: false,
  login: false,
  join_token: false,
  webhook: false,
  delivery: false,
  alert: true,
  rule: true,
  channel: false,
  window: true,
};

export interface Ask {
  key?: string | null;
  ids?: Ids;
  swap?: { at: string; id: string };
  headers?: Record<string, string>;
  method?: string;
  /** Sent in place of a body that matches the schema. */
  body?: unknown;
  query?: Record<string, string>;
}

/** What a request needs of a scene. */
type Asked = Pick<Scene, 'system' | 'known' | 'there' | 'requestIds'>;

export function addressOf(scene: Asked, route: Route, options: Ask = {}): string {
  const { params, query } = rawOf(route, options.ids ?? scene.there, scene.known, options.swap);
  const path = route.path.replaceAll(/\{(\w+)\}/g, (_, name: string) =>
    encodeURIComponent(String(params[name])),
  );
  const search = new URLSearchParams({ ...(query as Record<string, string>), ...options.query });
  return `${scene.system.url}${route.base}${path}?${search.toString()}`;
}

export async function ask(scene: Asked, route: Route, options: Ask = {}): Promise<Answer> {
  const raw = rawOf(route, options.ids ?? scene.there, scene.known, options.swap);
  const { body, type } =
    options.body === undefined ? bodyOf(route, raw, scene.known) : { body: options.body };
  const answer = await call(addressOf(scene, route, options), options.method ?? route.method, {
    key: options.key === undefined ? scene.system.key : options.key,
    ...(body !== undefined && { body }),
    headers: { ...(type && { 'Content-Type': type }), ...options.headers },
  });
  scene.requestIds.push(answer.headers.get('x-request-id') ?? '');
  const code = answer.body?.error?.code;
  // The code of a refusal must be listed for the route in the OpenAPI document.
  if (code !== undefined && options.method === undefined) expect(codesOf(route)).toContain(code);
  return answer;
}

/** The bytes of an uploaded file. They are also an empty tar archive. */
const fileBytes = Buffer.alloc(1024);

/**
 * Returns the body to send. For a route that accepts bytes or a form, the body is a file of zeros, or a form with this
 * file, and `type` is its content type.
 */
function bodyOf({ accepts }: Route, { body }: RawInput, { path }: Known): { body?: unknown; type?: string } {
  const bytes = fileBytes.toString();
  if (accepts === 'bytes') return { body: bytes, type: 'application/octet-stream' };
  if (accepts !== 'form') return { body };
  const part = (name: string, value: string) =>
    `--x\r\nContent-Disposition: form-data; name="${name}"\r\n\r\n${value}\r\n`;
  const form = [part('path', path ?? ''), part('file"; filename="x', bytes), '--x--\r\n'].join('');
  return { body: form, type: 'multipart/form-data; boundary=x' };
}

/** Checks that a refusal has the error envelope. Returns its status and code, such as `403 forbidden`. */
export function refusalIn(answer: Answer): string {
  const { code, message, details } = answer.body?.error ?? {};
  if (!isCode(String(code))) return `${answer.status} without a code of the table`;
  expect(answer.body).toEqual({ error: { code, message: expect.any(String), details: expect.any(Object) } });
  expect(Array.isArray(details)).toBe(false);
  expect(message).not.toMatch(/^\s*at |node:|\.ts/m);
  expect(answer.headers.get('x-request-id')).toMatch(/^req_[0-9A-Za-z]{22}$/);
  expect([code, answer.status]).toEqual([code, codes[code as keyof typeof codes]]);
  return `${answer.status} ${code}`;
}

/**
 * Tables that change even if every call is refused: with each call, with reports of machines, or while a broker runs.
 * Their changes are ignored.
 */
const byThemselves = /^(alert_marks|audit|brokers|key_|machine_facts|metrics|announced|sqlite_)/;

/** Returns everything that is stored. A refused call must not change the result. */
async function kept({ system, folder, agents }: Scene): Promise<Record<string, unknown>> {
  return {
    state: await storedState(system.dataDir),
    // Leaves out machine.online, which is recorded two seconds after a machine has linked.
    history: Object.entries(await storedTables(system.dataDir, byThemselves)).map(([table, rows]) => [
      table,
      rows.filter(({ type }) => type !== 'machine.online'),
    ]),
    files: [folder, system.dataDir, ...agents.map(({ dataDir }) => dataDir)].map((directory) =>
      readdirSync(directory, { recursive: true, encoding: 'utf8' })
        // Leaves out the machines' own logs, which are written a moment later.
        .filter((name) => !name.startsWith('activity.'))
        .toSorted((a, b) => a.localeCompare(b)),
    ),
  };
}

/** Runs `attempt` for each case, and compares all refusals at once. Expects that nothing stored has changed. */
export async function expectRefusals<T>(
  scene: Scene,
  cases: T[],
  attempt: (one: T) => Promise<readonly [asked: string, refusal: string, expected: string]>,
): Promise<void> {
  expect(cases.length).toBeGreaterThan(0);
  const before = await kept(scene);
  const first = scene.requestIds.length;
  const received: (readonly [string, string, string])[] = [];
  for (const one of cases) received.push(await attempt(one));
  expect(received.map(([asked, refusal]) => [asked, refusal])).toEqual(
    received.map(([asked, , expected]) => [asked, expected]),
  );
  expect(await kept(scene)).toEqual(before);
  expect(reached(scene, scene.requestIds.slice(first))).toEqual([]);
}

/** Returns those of the request ids that are in a machine's own log. */
export function reached({ agents }: Scene, requestIds: string[]): string[] {
  const logs = agents.flatMap(({ logged }) => logged);
  return requestIds.filter((id) => id !== '' && logs.some((line) => line.includes(id)));
}

export const malformed = '{"name":';
