// The table of routes against a real broker: who may call what, in which order that is checked, and that nothing of
// the table is forgotten. Every case is made from the table, so a new route is tested from its first day.
import { readdirSync, readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { expect, test } from 'vitest';
import { z } from 'zod';
import { type FoundId, type RawInput, readerOf } from '../broker/admission/input.ts';
import { allRoutes } from '../shared/api/index.ts';
import {
  commandId,
  type IdNoun,
  idSchemas,
  keyId,
  machineId,
  type Route,
  type Scope,
  scopes,
  single,
} from '../shared/api/route.ts';
import { codes, isCode } from '../shared/errors.ts';
import { Farhand } from '../shared/sdk/index.ts';
import { type Answer, call, type House, openHouse, temporaryFolder } from './house.ts';

// ---- Requests made from the schemas of a route

/** As much of JSON Schema as our routes use. */
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

interface Named {
  /** `machines.list`. */
  name: string;
  route: Route;
}

type Ids = Record<IdNoun, string>;

/** Where an id stands in a request: `body.machine_ids.0`. */
interface Place {
  at: string;
  noun: IdNoun;
}

/** Values for what a schema cannot tell. */
type Known = Readonly<Record<string, string>>;

const parts = ['params', 'query', 'body'] as const;
const nouns = Object.keys(idSchemas) as IdNoun[];
const everything: Named[] = allRoutes().map(({ noun, operation, route }) => ({
  name: `${noun}.${operation}`,
  route,
}));
// A WebSocket is no request with an answer, its right is a ticket: websocket.test.ts is its own.
const table = everything.filter(({ route }) => route.kind !== 'socket');
const keyed = table.filter(({ route }) => route.access !== 'everybody');

function schemaOf(route: Route, part: (typeof parts)[number]): Json {
  const schema = part === 'body' ? route.body : z.object(route[part]);
  return schema ? (z.toJSONSchema(schema, { io: 'input', unrepresentable: 'any' }) as Json) : {};
}

/** The noun of a field that holds an id: `destination_machine_id` is a machine's. A name we do not know fails. */
function nounAt(at: string): IdNoun | undefined {
  const field = at
    .split('.')
    .filter((step) => step !== '0')
    .at(-1);
  if (!field || !/_ids?$/.test(field)) return undefined;
  // Of a client of the session in the path, and of a request that was; of nothing else.
  if (['client_id', 'request_id'].includes(field)) return undefined;
  const noun = nouns.find((one) => new RegExp(`(^|_)${one}_ids?$`).test(field));
  if (!noun) throw new Error(`${at} is an id of something that dispatch cannot look up`);
  return noun;
}

function branches(schema: Json): Json[] {
  return schema.anyOf ?? schema.oneOf ?? [schema];
}

function placesOf(schema: Json, at: string): Place[] {
  return branches(schema).flatMap((branch) => {
    const noun = branch.type === 'string' ? nounAt(at) : undefined;
    if (noun) return [{ at, noun }];
    if (branch.items) return placesOf(branch.items, `${at}.0`);
    return Object.entries(branch.properties ?? {}).flatMap(([key, inner]) => placesOf(inner, `${at}.${key}`));
  });
}

const placesIn = (route: Route): Place[] => parts.flatMap((part) => placesOf(schemaOf(route, part), part));

/** A value that fits: what is required, and every id; `swap` puts another id at one place. */
function fill(schema: Json, at: string, ids: Ids, known: Known, swap?: { at: string; id: string }): unknown {
  const branch = branches(schema)[0] ?? {};
  const inner = (one: Json, key: string): unknown => fill(one, `${at}.${key}`, ids, known, swap);
  const noun = branch.type === 'string' ? nounAt(at) : undefined;
  if (noun) return swap?.at === at ? swap.id : ids[noun];
  const told = known[at.split('.').at(-1) ?? ''];
  if (told !== undefined) return told;
  if (branch.const !== undefined || branch.enum) return branch.const ?? branch.enum?.[0];
  if (branch.type === 'array') return branch.items ? [inner(branch.items, '0')] : [];
  if (branch.properties) {
    const needed = Object.entries(branch.properties).filter(
      ([key, one]) => branch.required?.includes(key) || placesOf(one, `${at}.${key}`).length > 0,
    );
    return Object.fromEntries(needed.map(([key, one]) => [key, inner(one, key)]));
  }
  if (branch.type === 'boolean') return false;
  if (branch.type === 'integer' || branch.type === 'number') return branch.minimum ?? 0;
  return branch.type === 'string' ? (branch.examples?.[0] ?? 'x') : {};
}

function rawOf(route: Route, ids: Ids, known: Known, swap?: { at: string; id: string }): RawInput {
  const [params, query, body] = parts.map((part) => fill(schemaOf(route, part), part, ids, known, swap));
  return {
    // Made from z.object() schemas.
    params: params as Record<string, string>,
    query: query as Record<string, string>,
    headers: {},
    body: route.body && body,
  };
}

// ---- A house with two machines, and calls into it

interface Scene {
  house: House;
  /** Nothing may ever appear in it. */
  folder: string;
  known: Known;
  /** Two of everything, each on a machine of its own. */
  here: Ids;
  there: Ids;
  /** A key that reaches only the machine of `here`: by its id, or by its tag. */
  limited(scopes: Scope[], by?: 'machine_ids' | 'tags'): Promise<string>;
}

async function openScene(): Promise<Scene> {
  const house = await openHouse();
  const folder = temporaryFolder('untouched');
  const [here, there] = [await furnish(house, 'here'), await furnish(house, 'there')];
  const reach = { machine_ids: [here.machine], tags: ['here'] };
  return {
    house,
    folder,
    known: {
      path: join(folder, 'file'),
      command: `touch ${folder}/ran`,
      file: 'page.js',
      since: '2026-11-21T10:00:00Z',
    },
    here,
    there,
    limited: async (own, by = 'machine_ids') => (await house.keyed(own, { [by]: reach[by] })).key,
  };
}

/** A machine and one of everything that has an id; a new noun does not compile until it is here. */
async function furnish(house: House, tag: string): Promise<Ids> {
  const { machineId: machine } = await house.agent({ name: tag, tags: tag });
  const [session, command, batch, key, token] = await Promise.all([
    house.client.sessions.create({ machine_id: machine, shell: 'cat' }),
    // Long enough for its start to be an event.
    house.client.commands.create({ machine_id: machine, command: 'cat', input: true, wait: 100 }),
    house.client.batches.create({ machine_ids: [machine], command: 'true' }),
    house.client.keys.create({ name: tag, scopes: ['files:read'] }),
    house.client.joinTokens.create({ name: tag }),
  ]);
  const schedule = await house.client.schedules.create({
    ...{ machine_id: machine, name: tag, command: 'true', cron: '@yearly', catch_up: 'none' },
  });
  await house.client.schedules.run({ schedule_id: schedule.id });
  const { items } = await house.client.schedules.history({ schedule_id: schedule.id });
  expect(session.status).toBe('CONNECTED');
  return {
    machine,
    session: session.id,
    command: command.id,
    batch: batch.id,
    key: key.id,
    join_token: token.id,
    schedule: schedule.id,
    run: items[0]?.id ?? '',
    ...(await toldTo(house, machine)),
  };
}

/** A webhook, and a delivery of it that fails: nothing may go there. */
async function toldTo({ client }: House, machine: string): Promise<Pick<Ids, 'webhook' | 'delivery'>> {
  const { id } = await client.webhooks.create({
    url: 'http://localhost:1/',
    events: ['command.*'],
    machine_ids: [machine],
  });
  await client.commands.create({ machine_id: machine, command: 'true' });
  const { items } = await client.webhooks.deliveries({ webhook_id: id });
  return { webhook: id, delivery: items[0]!.id };
}

/** Nouns whose things lie on a machine, or are one. */
const onMachine: Record<IdNoun, boolean> = {
  machine: true,
  command: true,
  batch: true,
  schedule: true,
  run: true,
  session: true,
  key: false,
  join_token: false,
  webhook: false,
  delivery: false,
};

interface Ask {
  key?: string | null;
  ids?: Ids;
  swap?: { at: string; id: string };
  headers?: Record<string, string>;
  method?: string;
  /** Sent instead of the body that fits. */
  body?: unknown;
  query?: Record<string, string>;
}

function ask(scene: Scene, route: Route, options: Ask = {}): Promise<Answer> {
  const raw = rawOf(route, options.ids ?? scene.there, scene.known, options.swap);
  const path = route.path.replaceAll(/\{(\w+)\}/g, (_, name: string) =>
    encodeURIComponent(String(raw.params[name])),
  );
  const query = new URLSearchParams({ ...(raw.query as Record<string, string>), ...options.query });
  const body = options.body ?? raw.body;
  return call(`${scene.house.url}${route.base}${path}?${query.toString()}`, options.method ?? route.method, {
    key: options.key === undefined ? scene.house.key : options.key,
    ...(body !== undefined && { body }),
    ...(options.headers && { headers: options.headers }),
  });
}

/** `403 forbidden`, once the whole answer is as every refusal must be. */
function refusalIn(answer: Answer): string {
  const { code, message, details } = answer.body?.error ?? {};
  if (!isCode(String(code))) return `${answer.status} without a code of the table`;
  expect(answer.body).toEqual({ error: { code, message: expect.any(String), details: expect.any(Object) } });
  expect(Array.isArray(details)).toBe(false);
  expect(message).not.toMatch(/^\s*at |node:|\.ts/m);
  expect(answer.headers.get('x-request-id')).toMatch(/^req_[0-9A-Za-z]{22}$/);
  expect([code, answer.status]).toEqual([code, codes[code as keyof typeof codes]]);
  return `${answer.status} ${code}`;
}

/** What must be the same before and after calls that are refused. */
async function stateOf({ house, folder }: Scene): Promise<unknown> {
  const { generation } = JSON.parse(readFileSync(join(house.dataDir, 'state.json'), 'utf8'));
  const commands = await house.client.commands.list({ limit: 1 });
  const events = await house.client.events.list({ limit: 100 });
  // Those come by themselves, two seconds after a machine linked.
  const caused = events.items.filter(({ type }) => !['machine.online', 'machine.offline'].includes(type));
  const sessions = await house.client.sessions.list({ limit: 1 });
  return {
    generation,
    sessions: sessions.total,
    commands: commands.total,
    events: caused.length,
    files: readdirSync(folder),
  };
}

/** Runs `tell` for each case and compares all of what it told at once; nothing may have changed meanwhile. */
async function expectRefusals<T>(
  scene: Scene,
  cases: T[],
  tell: (one: T) => Promise<readonly [asked: string, refusal: string, expected: string]>,
): Promise<void> {
  expect(cases.length).toBeGreaterThan(0);
  const before = await stateOf(scene);
  const told: (readonly [string, string, string])[] = [];
  for (const one of cases) told.push(await tell(one));
  expect(told.map(([asked, refusal]) => [asked, refusal])).toEqual(
    told.map(([asked, , expected]) => [asked, expected]),
  );
  expect(await stateOf(scene)).toEqual(before);
}

const malformed = '{"name":';

// ---- Who may

test('without a valid key every route that needs one is 401, whatever else is wrong, and changes nothing', async () => {
  const scene = await openScene();
  const { house } = scene;
  const made = await house.client.keys.create({
    name: 'expired',
    scopes: ['admin'],
    expires_at: '2001-01-01T00:00:00Z',
  });
  const revoked = await house.client.keys.create({ name: 'revoked', scopes: ['admin'] });
  await house.client.keys.remove({ key_id: revoked.id });
  const wrong: [string, Record<string, string>][] = [
    ['no key', {}],
    ['an empty key', { Authorization: 'Bearer ' }],
    ['an unknown key', { Authorization: `Bearer service_apikey_${'0'.repeat(43)}` }],
    ['a key without its literal', { Authorization: `Bearer ${house.key.replace('service_apikey_', '')}` }],
    ['a key in other letters', { Authorization: `Bearer ${house.key.toUpperCase()}` }],
    ['a key and more', { Authorization: `Bearer ${house.key}0` }],
    ['a key without its end', { Authorization: `Bearer ${house.key.slice(0, -1)}` }],
    ['another scheme', { Authorization: `Basic ${btoa(`user:${house.key}`)}` }],
    ['a key in another header', { 'X-Api-Key': house.key }],
    ['an expired key', { Authorization: `Bearer ${made.key}` }],
    ['a revoked key', { Authorization: `Bearer ${revoked.key}` }],
  ];
  const cases = keyed.flatMap((named) => wrong.map(([what, headers]) => ({ ...named, what, headers })));
  await expectRefusals(scene, cases, async ({ name, route, what, headers }) => {
    const answer = await ask(scene, route, { key: null, headers });
    expect(answer.headers.get('www-authenticate')).toBe('Bearer');
    return [`${name} with ${what}`, refusalIn(answer), '401 unauthorized'];
  });
  await expectRefusals(scene, keyed, async ({ name, route }) => {
    const answer = await ask(scene, route, {
      key: null,
      query: { limit: 'x', key: house.key, api_key: house.key },
      ...(route.body && { body: malformed }),
    });
    return [`${name} with everything wrong`, refusalIn(answer), '401 unauthorized'];
  });
  const reads = keyed.filter(({ route }) => route.method === 'GET');
  for (const { name, route } of reads) {
    const response = await fetch(`${house.url}${route.base}${route.path}`, { method: 'HEAD' });
    expect([name, response.status, await response.text()]).toEqual([name, 401, '']);
  }
});

test('a key with every scope but the one a route needs is 403 with that scope, and changes nothing', async () => {
  const scene = await openScene();
  const scoped = keyed.filter(({ route }) => route.access !== 'any key');
  const bodies = [undefined, malformed];
  const cases = scoped.flatMap((named) => bodies.map((body) => ({ ...named, body })));
  const keys = new Map<string, string>();
  for (const needed of new Set(scoped.map(({ route }) => route.access))) {
    // admin holds every scope: only a key without both lacks the needed one.
    const others = scopes.filter((scope) => scope !== needed && scope !== 'admin');
    keys.set(needed, (await scene.house.keyed(others)).key);
  }
  await expectRefusals(scene, cases, async ({ name, route, body }) => {
    const answer = await ask(scene, route, {
      key: keys.get(route.access) ?? null,
      query: { limit: 'x' },
      ...(body && route.body && { body }),
    });
    expect([name, answer.body.error?.details]).toEqual([name, { required_scope: route.access }]);
    return [name, refusalIn(answer), '403 forbidden'];
  });
});

test.each(['machine_ids', 'tags'] as const)(
  'a key limited by %s is 403 wherever a request names another machine or something on one, and changes nothing',
  async (by) => {
    const scene = await openScene();
    const cases = keyed.flatMap((named) =>
      placesIn(named.route)
        .filter(({ noun }) => onMachine[noun])
        .map((place) => ({ ...named, ...place })),
    );
    const keys = new Map<string, string>();
    for (const { route } of cases) {
      // Scopes of the table: a route that any key may call names no machine.
      const needed = route.access as Scope;
      if (!keys.has(needed)) keys.set(needed, await scene.limited([needed], by));
    }
    await expectRefusals(scene, cases, async ({ name, route, at, noun }) => {
      const key = keys.get(route.access) ?? null;
      const asked = { key, ids: scene.here, query: { limit: 'x' } };
      const swap = { at, id: scene.there[noun] };
      const answer = await ask(scene, route, { ...asked, swap });
      expect([name, answer.body.error?.details]).toEqual([name, { [`${noun}_id`]: swap.id }]);
      if (!at.startsWith('body')) {
        const broken = await ask(scene, route, { ...asked, swap, ...(route.body && { body: malformed }) });
        expect([name, refusalIn(broken)]).toEqual([name, '403 forbidden']);
      }
      return [`${name} at ${at}`, refusalIn(answer), '403 forbidden'];
    });
    // An outsider cannot tell a machine that exists from one that does not.
    const machines = cases.filter(({ noun }) => noun === 'machine');
    await expectRefusals(scene, machines, async ({ name, route, at }) => {
      const key = keys.get(route.access) ?? null;
      const [exists, never] = await Promise.all(
        [scene.there.machine, 'mach_never'].map((id) =>
          ask(scene, route, { key, ids: scene.here, swap: { at, id } }),
        ),
      );
      expect([name, never?.body.error.message]).toEqual([name, exists?.body.error.message]);
      return [`${name} at ${at}`, never ? refusalIn(never) : '', '403 forbidden'];
    });
  },
);

test('an id that names nothing is 404 wherever it stands and whatever its form, before anything else is looked at', async () => {
  const scene = await openScene();
  const forms = ['none', 'mach_none', '__proto__', 'constructor', '../x', 'a b%2F', 'ü', 'x'.repeat(300)];
  const cases = keyed.flatMap((named) =>
    placesIn(named.route).flatMap((place) => forms.map((id) => ({ ...named, ...place, id }))),
  );
  await expectRefusals(scene, cases, async ({ name, route, at, noun, id }) => {
    const asked = { swap: { at, id }, query: { limit: 'x', offset: '-' } };
    const answer = await ask(scene, route, asked);
    expect([name, answer.body.error?.details]).toEqual([name, { [`${noun}_id`]: id }]);
    if (!at.startsWith('body') && route.body) {
      const broken = await ask(scene, route, { ...asked, body: malformed });
      expect([name, refusalIn(broken)]).toEqual([name, `404 ${noun}_not_found`]);
    }
    return [`${name} at ${at}: ${id}`, refusalIn(answer), `404 ${noun}_not_found`];
  });
});

test('a wrong body is the last thing to be refused: 400 when it is not JSON, 422 when it breaks the schema', async () => {
  const scene = await openScene();
  // Forms are no JSON: they have tests of their own.
  const cases = keyed.filter(({ route }) => route.body && !route.accepts);
  await expectRefusals(scene, cases, async ({ name, route }) => {
    const answer = await ask(scene, route, { body: malformed });
    return [name, refusalIn(answer), '400 invalid_request'];
  });
  await expectRefusals(scene, cases, async ({ name, route }) => {
    const { body } = rawOf(route, scene.there, scene.known);
    const answer = await ask(scene, route, { body: { ...(body as object), surely_unknown: 1 } });
    expect([name, answer.body.error.details.issues]).toEqual([
      name,
      [{ path: expect.any(String), message: expect.stringContaining('surely_unknown') }],
    ]);
    return [name, refusalIn(answer), '422 validation_failed'];
  });
});

test.each(['machine_ids', 'tags'] as const)(
  'a key limited by %s is told nothing of another machine by whatever it may read, not even how much there is',
  async (by) => {
    const scene = await openScene();
    const key = await scene.limited(['admin'], by);
    // Nobody waits here for what is followed.
    const reads = keyed.filter(({ route }) => route.method === 'GET' && route.kind !== 'events');
    const hidden = [...Object.values(scene.there), '"there"'];
    const told: [name: string, found: string[], total: number][] = [];
    for (const { name, route } of reads) {
      const { params, query } = rawOf(route, scene.here, scene.known);
      const path = route.path.replaceAll(/\{(\w+)\}/g, (_, param: string) => String(params[param]));
      // No filter: all that may be read.
      const given = Object.entries(query).filter(([field]) => !/_ids?$|^since$/.test(field));
      const search = new URLSearchParams({ ...(Object.fromEntries(given) as Known), limit: '100' });
      const { body } = await call(`${scene.house.url}${route.base}${path}?${search.toString()}`, 'GET', {
        key,
      });
      const text = JSON.stringify(body);
      const total = route.kind === 'list' ? (body.meta?.total ?? 0) : 0;
      told.push([name, hidden.filter((word) => text.includes(word)), total]);
      if (total > 0) expect([name, body.data.length]).toEqual([name, total]);
    }
    expect(told).toEqual(told.map(([name, , total]) => [name, [], total]));
    // Its own is told: what tells nothing at all proves nothing.
    const seen = told.filter(([, , total]) => total > 0).map(([name]) => name);
    expect(seen).toEqual(
      expect.arrayContaining(['machines.list', 'commands.list', 'batches.list', 'audit.list']),
    );
    expect(seen).toEqual(expect.arrayContaining(['schedules.list', 'sessions.list', 'events.list']));
  },
);

test('a key may make no key that reaches a machine outside it, whether it has one name right or none', async () => {
  const scene = await openScene();
  const key = await scene.limited(['admin']);
  const wishes = [[scene.there.machine], [scene.here.machine, scene.there.machine], undefined];
  await expectRefusals(scene, wishes, async (machine_ids) => {
    const answer = await scene.house.call('POST', '/api-keys', {
      key,
      body: { name: 'more', scopes: ['files:read'], ...(machine_ids && { machine_ids }) },
    });
    return [String(machine_ids), refusalIn(answer), '403 forbidden'];
  });
});

test.each([
  ['a key limited by machine_ids', 'machines:write', 'machine_ids'],
  ['a key limited by tags', 'machines:write', 'tags'],
  ['an admin key limited by machine_ids', 'admin', 'machine_ids'],
  ['an admin key limited by tags', 'admin', 'tags'],
] as const)('%s changes no tags, for tags decide what keys reach', async (_what, scope, by) => {
  const scene = await openScene();
  const key = await scene.limited([scope], by);
  await expectRefusals(scene, [`/machines/${scene.here.machine}`], async (path) => {
    const answer = await scene.house.call('PATCH', path, { key, body: { tags: ['here', 'more'] } });
    return [path, refusalIn(answer), '403 forbidden'];
  });
});

test('the routes that need no key are exactly these, and answer without one and with a wrong one', async () => {
  const scene = await openScene();
  const open = table.filter(({ route }) => route.access === 'everybody');
  expect(open.map(({ route }) => `${route.method} ${route.base}${route.path}`).sort()).toEqual([
    'GET /api/v1/openapi.json',
    'GET /docs',
    'GET /docs/{file}',
    'GET /healthz',
    'GET /install.sh',
    'GET /packages/{file}',
    'GET /readyz',
  ]);
  for (const { name, route } of open) {
    for (const headers of [{}, { Authorization: 'Bearer wrong' }]) {
      const { status } = await ask(scene, route, { key: null, headers });
      // A checkout has no packages until somebody makes them.
      expect([name, status]).toEqual([name, name.startsWith('packages.') ? 404 : 200]);
    }
  }
});

test('the requests made here are good ones: with the right key and ids none of them is refused', async () => {
  const scene = await openScene();
  const { house, here } = scene;
  // What removes something comes last; a machine takes all that lies on it along.
  const order = (name: string): number =>
    Number(/remove|cancel|sessions\.end/.test(name)) + Number(name === 'machines.remove');
  // Events have no end, and what is no JSON is not made here: both have tests of their own.
  const plain = keyed.filter(({ route }) => route.kind !== 'events' && !route.accepts);
  const sorted = plain.sort((a, b) => order(a.name) - order(b.name));
  const key = (await house.keyed([...scopes])).key;
  const told: unknown[] = [];
  const recorded: unknown[] = [];
  const { path = '' } = scene.known;
  // What is made must not be there yet, and a search needs to know what for.
  const places: Record<string, Parameters<typeof ask>[2]> = {
    'files.mkdir': { body: { path: `${path}.made` } },
    'files.copy': { body: { source: path, destination: `${path}.copy` } },
    'files.search': { query: { name: '*', path: dirname(path) } },
  };
  for (const { name, route } of sorted) {
    // Reading comes before writing in the table; here the file must be there first.
    if (['files.read', 'files.removeAnywhere'].includes(name))
      await house.client.files.write({ machine_id: here.machine, path: scene.known.path ?? '', content: '' });
    const { status, body, headers } = await ask(scene, route, { key, ids: here, ...places[name] });
    told.push([name, status, body.error?.code]);
    const { items } = await house.client.audit.list({ request_id: headers.get('x-request-id') ?? '' });
    recorded.push([name, items.map(({ action, result, address }) => [action, result, address])]);
  }
  expect(told).toEqual(sorted.map(({ name, route }) => [name, route.status, undefined]));
  // What changes or runs something is on record, once; what only reads is not.
  expect(recorded).toEqual(
    sorted.map(({ name, route }) => [name, route.method === 'GET' ? [] : [[name, 'ok', '127.0.0.1']]]),
  );
});

// ---- Nothing of the table is forgotten

test('every route has a handler: a broker starts, and no route answers that it does not exist', async () => {
  const { house, known } = await openScene();
  const nowhere = Object.fromEntries(nouns.map((noun) => [noun, 'none'])) as Ids;
  for (const { name, route } of table) {
    const { params } = rawOf(route, nowhere, known);
    const path = route.path.replaceAll(/\{(\w+)\}/g, (_, param: string) => String(params[param]));
    const headers = { Authorization: `Bearer ${house.key}` };
    const answer = await fetch(`${house.url}${route.base}${path}`, { method: route.method, headers });
    // Those that go on as long as somebody listens.
    if (answer.headers.get('content-type') === 'text/event-stream') await answer.body?.cancel();
    else expect([name, await answer.text()]).not.toEqual([name, expect.stringContaining('route_not_found')]);
    expect([name, [405, 500, 501].includes(answer.status)]).toEqual([name, false]);
  }
});

test('every route has an operation in the OpenAPI document, and the document has no other', async () => {
  const house = await openHouse();
  const { body } = await house.call('GET', '/openapi.json');
  const told = Object.entries(body.paths as Record<string, Record<string, { operationId: string }>>).flatMap(
    ([path, operations]) =>
      Object.entries(operations).map(([method, { operationId }]) => `${operationId} ${method} ${path}`),
  );
  const expected = everything.map(
    ({ name, route }) => `${name} ${route.method.toLowerCase()} ${route.base}${route.path}`,
  );
  expect(told.sort()).toEqual(expected.sort());
});

test('every route has a method of the SDK that makes its request', async () => {
  const asked: string[] = [];
  const client = new Farhand({
    baseUrl: 'http://broker',
    fetch: async (url, init) => {
      asked.push(
        `${init?.method} ${decodeURIComponent(new URL(url instanceof Request ? url.url : url).pathname)}`,
      );
      return new Response('{"data":[],"meta":{}}');
    },
  }) as unknown as Record<string, Record<string, (input: object) => Promise<unknown>>>;
  for (const { name, route } of table) {
    const [noun = '', operation = ''] = name.split('.');
    const params = Object.keys(route.params).map((param) => [param, `{${param}}`]);
    await client[noun]?.[operation]?.({ ...Object.fromEntries(params), content: '' });
  }
  expect(asked).toEqual(table.map(({ route }) => `${route.method} ${route.base}${route.path}`));
});

test('no route hides another: the path of each is matched by itself first', () => {
  const patterns = table.map(({ name, route }) => ({
    name,
    method: route.method,
    path: `${route.base}${route.path}`,
    pattern: new RegExp(`^${`${route.base}${route.path}`.replaceAll(/\{\w+\}/g, '[^/]+')}$`),
  }));
  for (const { name, method, path } of patterns) {
    const first = patterns.find((one) => one.method === method && one.pattern.test(path));
    expect(first?.name).toBe(name);
  }
});

// ---- Every id in a request is one that dispatch checks

test('every field of every route that is called an id is found by the reader that dispatch asks', () => {
  const ids = Object.fromEntries(nouns.map((noun) => [noun, `some ${noun}`])) as Ids;
  for (const { name, route } of table) {
    const found = readerOf(route).ids(rawOf(route, ids, {}));
    const expected = placesIn(route).map(({ noun }) => ({ noun, id: ids[noun] }));
    expect([name, found]).toEqual([name, expected]);
  }
});

function idsIn(body: z.ZodType, value: unknown): FoundId[] {
  const route = single({ method: 'POST', path: '/x', access: 'admin', summary: '', body, reply: z.null() });
  return readerOf(route).ids({ params: {}, query: {}, headers: {}, body: value });
}

const a: FoundId = { noun: 'machine', id: 'a' };
const b: FoundId = { noun: 'machine', id: 'b' };
const id = machineId;

test.each<[string, z.ZodType, unknown, FoundId[]]>([
  ['an object', z.object({ id }), { id: 'a' }, [a]],
  ['a strict object', z.strictObject({ id }), { id: 'a', other: 'b' }, [a]],
  ['an object with a refinement', z.object({ id }).refine(() => true), { id: 'a' }, [a]],
  ['a nested object', z.object({ x: z.object({ y: z.object({ id }) }) }), { x: { y: { id: 'a' } } }, [a]],
  ['an array of ids', z.object({ ids: z.array(id) }), { ids: ['a', 'b'] }, [a, b]],
  ['a limited array', z.object({ ids: z.array(id).min(1).max(9) }), { ids: ['a'] }, [a]],
  [
    'an array of objects',
    z.object({ x: z.array(z.object({ id })) }),
    { x: [{ id: 'a' }, { id: 'b' }] },
    [a, b],
  ],
  ['arrays of arrays', z.object({ x: z.array(z.array(id)) }), { x: [['a'], [], ['b']] }, [a, b]],
  ['an optional', z.object({ id: id.optional() }), { id: 'a' }, [a]],
  ['an optional that is absent', z.object({ id: id.optional() }), {}, []],
  ['a nullable', z.object({ id: id.nullable() }), { id: 'a' }, [a]],
  ['a nullable that is null', z.object({ id: id.nullable() }), { id: null }, []],
  ['a nullish array', z.object({ ids: z.array(id.nullish()).nullish() }), { ids: ['a', null, 'b'] }, [a, b]],
  ['a default', z.object({ ids: z.array(id).default([]) }), { ids: ['a'] }, [a]],
  ['an optional body', z.object({ id }).optional(), { id: 'a' }, [a]],
  [
    'several nouns',
    z.object({ id, c: commandId, k: keyId }),
    { id: 'a', c: 'c', k: 'k' },
    [a, { noun: 'command', id: 'c' }, { noun: 'key', id: 'k' }],
  ],
  ['a field named __proto__', z.object({ id }), JSON.parse('{"__proto__":{"id":"b"},"id":"a"}'), [a]],
  ['another type than the schema’s', z.object({ id, ids: z.array(id) }), { id: ['a'], ids: 'a' }, []],
  ['no object at all', z.object({ id }), 'a', []],
])('the reader finds every id in %s', (_what, schema, value, expected) => {
  expect(idsIn(schema, value)).toEqual(expected);
});

const recursive: z.ZodType = z.object({
  id,
  get children() {
    return z.array(recursive);
  },
});

// Each of these compiles and parses: an id in it must be found, or the broker must refuse to start with such a route.
test.each<[string, z.ZodType, unknown]>([
  ['a description', z.object({ id: id.meta({ description: 'the target' }) }), { id: 'a' }],
  ['a refinement of its own', z.object({ id: id.refine(() => true) }), { id: 'a' }],
  ['a transform', z.object({ id: id.transform((text) => text) }), { id: 'a' }],
  ['a transform of an object', z.object({ id }).transform((body) => body), { id: 'a' }],
  ['a pipe into it', z.object({ id: z.string().pipe(id) }), { id: 'a' }],
  ['a preprocess', z.object({ id: z.preprocess((text) => text, id) }), { id: 'a' }],
  ['a union', z.object({ id: z.union([id, z.literal('all')]) }), { id: 'a' }],
  [
    'a union of objects',
    z.object({ x: z.union([z.object({ id }), z.object({ tags: z.string() })]) }),
    { x: { id: 'a' } },
  ],
  [
    'a discriminated union',
    z.discriminatedUnion('type', [z.object({ type: z.literal('one'), id })]),
    { type: 'one', id: 'a' },
  ],
  ['an intersection', z.intersection(z.object({ id }), z.object({ x: z.string() })), { id: 'a', x: '' }],
  ['the values of a record', z.object({ x: z.record(z.string(), id) }), { x: { any: 'a' } }],
  ['the keys of a record', z.object({ x: z.record(id, z.string()) }), { x: { a: '' } }],
  ['a tuple', z.object({ x: z.tuple([id, z.string()]) }), { x: ['a', ''] }],
  ['the rest of a tuple', z.object({ x: z.tuple([z.string()]).rest(id) }), { x: ['', 'a'] }],
  ['the other fields of an object', z.object({}).catchall(id), { any: 'a' }],
  ['a lazy schema', z.object({ x: z.lazy(() => z.object({ id })) }), { x: { id: 'a' } }],
  ['a recursive schema', z.object({ x: recursive }), { x: { id: 'a', children: [] } }],
  ['a catch', z.object({ id: id.catch('x' as never) }), { id: 'a' }],
  ['a prefault', z.object({ id: id.prefault('x') }), { id: 'a' }],
  ['a readonly', z.object({ x: z.object({ id }).readonly() }), { x: { id: 'a' } }],
  ['an optional that is required again', z.object({ id: z.nonoptional(id.optional()) }), { id: 'a' }],
  ['an exact optional', z.object({ id: z.exactOptional(id) }), { id: 'a' }],
])('an id under %s is found, or refused when the broker starts', (_what, schema, value) => {
  expect(schema.safeParse(value).success).toBe(true);
  let found: FoundId[];
  try {
    found = idsIn(schema, value);
  } catch (error) {
    return expect(String(error)).toMatch(/^Error: .*\bid\b/);
  }
  expect(found).toEqual([a]);
});
