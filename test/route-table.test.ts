// Tests every route of the table with a real broker: the order of its checks, and that its definition is complete. New
// routes of the table are tested without a change here. Rights are tested in attack/every-route-wrong-keys.test.ts.
import { expect, test } from 'vitest';
import { z } from 'zod';
import { RequestParser } from '../broker/request-checks/parse-api-request.ts';
import { single } from '../shared/api/define-route.ts';
import { commandId, type IdNoun, keyId, machineId } from '../shared/api/shared-schemas.ts';
import { Farhand } from '../shared/sdk/index.ts';
import {
  ask,
  everything,
  expectRefusals,
  type Ids,
  keyed,
  malformed,
  nouns,
  placesIn,
  rawOf,
  refusalIn,
  startScene,
  table,
} from './all-routes.ts';
import { shared } from './close-after-tests.ts';
import { call, startFarhand } from './start-farhand.ts';

const scenery = shared(startScene);

// ---- Authorization

test('an unknown id is 404 in every place and form, before any other check', async () => {
  const scene = await scenery();
  const forms = ['none', 'mach_none', '__proto__', 'constructor', '../x', 'a b%2F', 'ü', 'x'.repeat(300)];
  const cases = keyed.flatMap((named) =>
    placesIn(named.route).flatMap((place) => forms.map((id) => ({ ...named, ...place, id }))),
  );
  await expectRefusals(scene, cases, async ({ name, route, at, noun, id }) => {
    const asked = { swap: { at, id }, query: { limit: 'x', offset: '-' } };
    const answer = await ask(scene, route, asked);
    expect([name, answer.body.error?.details]).toEqual([name, { [`${noun}_id`]: id }]);
    // The order of checks does not depend on the form of the id, so one form is enough here.
    if (id === 'none' && !at.startsWith('body') && route.body) {
      const broken = await ask(scene, route, { ...asked, body: malformed });
      expect([name, refusalIn(broken)]).toEqual([name, `404 ${noun}_not_found`]);
    }
    return [`${name} at ${at}: ${id}`, refusalIn(answer), `404 ${noun}_not_found`];
  });
});

test('a wrong body is refused after all other checks: 400 if it is not JSON, 422 if it breaks the schema', async () => {
  const scene = await scenery();
  // Leaves out forms, which are not JSON and have tests of their own.
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
  'a key limited by %s reads nothing about another machine, not even counts',
  async (by) => {
    const scene = await scenery();
    const key = await scene.limited(['admin'], by);
    // Leaves out streams, which have no end.
    const reads = keyed.filter(({ route }) => route.method === 'GET' && route.kind !== 'events');
    // Leaves out saved commands, which belong to no machine.
    const ids = Object.entries(scene.there).filter(([noun]) => noun !== 'saved_command');
    const hidden = [...ids.map(([, id]) => id), '"there"'];
    const received: [name: string, found: string[], total: number][] = [];
    for (const { name, route } of reads) {
      const { params, query } = rawOf(route, scene.here, scene.known);
      const path = route.path.replaceAll(/\{(\w+)\}/g, (_, param: string) => String(params[param]));
      // Leaves out filters, so that the answer has everything that the key may read.
      const given = Object.entries(query).filter(([field]) => !/_ids?$|^since$/.test(field));
      const search = new URLSearchParams({
        ...(Object.fromEntries(given) as Record<string, string>),
        limit: '100',
      });
      const { body } = await call(`${scene.system.url}${route.base}${path}?${search.toString()}`, 'GET', {
        key,
      });
      const text = JSON.stringify(body);
      const total = route.kind === 'list' ? (body.meta?.total ?? 0) : 0;
      received.push([name, hidden.filter((word) => text.includes(word)), total]);
      if (total > 0) expect([name, body.data.length]).toEqual([name, total]);
    }
    expect(received).toEqual(received.map(([name, , total]) => [name, [], total]));
    // These lists must contain items of the key's own machine, because an empty list would prove nothing.
    const seen = received.filter(([, , total]) => total > 0).map(([name]) => name);
    expect(seen).toEqual(
      expect.arrayContaining(['machines.list', 'commands.list', 'batches.list', 'audit.list']),
    );
    expect(seen).toEqual(expect.arrayContaining(['schedules.list', 'sessions.list', 'events.list']));
  },
);

test('a key cannot create a key for a machine that it may not use itself', async () => {
  const scene = await scenery();
  const key = await scene.limited(['admin']);
  const requests = [[scene.there.machine], [scene.here.machine, scene.there.machine], undefined];
  await expectRefusals(scene, requests, async (machine_ids) => {
    const answer = await scene.system.call('POST', '/api-keys', {
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
  const scene = await scenery();
  const key = await scene.limited([scope], by);
  await expectRefusals(scene, [`/machines/${scene.here.machine}`], async (path) => {
    const answer = await scene.system.call('PATCH', path, { key, body: { tags: ['here', 'more'] } });
    return [path, refusalIn(answer), '403 forbidden'];
  });
});

test('exactly these routes need no key, and they answer without a key and with a wrong one', async () => {
  const scene = await scenery();
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
      // A checkout has agent packages only after they were built.
      if (name.startsWith('packages.')) expect([200, 404]).toContain(status);
      else expect([name, status]).toEqual([name, 200]);
    }
  }
});

// ---- Completeness of the table

test('every route has a handler: a broker starts, and no route answers that it does not exist', async () => {
  const { system, known } = await scenery();
  const nowhere = Object.fromEntries(nouns.map((noun) => [noun, 'none'])) as Ids;
  for (const { name, route } of table) {
    const { params } = rawOf(route, nowhere, known);
    const path = route.path.replaceAll(/\{(\w+)\}/g, (_, param: string) => String(params[param]));
    const headers = { Authorization: `Bearer ${system.key}` };
    const answer = await fetch(`${system.url}${route.base}${path}`, { method: route.method, headers });
    // Ends streams, which go on while a client reads.
    if (answer.headers.get('content-type') === 'text/event-stream') await answer.body?.cancel();
    // A checkout has agent packages only after they were built, and the answer says that.
    else if (!name.startsWith('packages.'))
      expect([name, await answer.text()]).not.toEqual([
        name,
        expect.stringContaining('"code":"route_not_found"'),
      ]);
    expect([name, [405, 500, 501].includes(answer.status)]).toEqual([name, false]);
  }
});

test('every route has an operation in the OpenAPI document, and the document has no other', async () => {
  const system = await startFarhand();
  const { body } = await system.call('GET', '/openapi.json');
  const received = Object.entries(
    body.paths as Record<string, Record<string, { operationId: string }>>,
  ).flatMap(([path, operations]) =>
    Object.entries(operations).map(([method, { operationId }]) => `${operationId} ${method} ${path}`),
  );
  const expected = everything.map(
    ({ name, route }) => `${name} ${route.method.toLowerCase()} ${route.base}${route.path}`,
  );
  expect(received.sort()).toEqual(expected.sort());
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

test('no route hides another: the path of each route matches that route first', () => {
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

// ---- All ids in a request are found and checked

interface Named {
  noun: IdNoun;
  id: string;
}

const named = (found: readonly Named[]): Named[] => found.map(({ noun, id }) => ({ noun, id }));

test('the parser finds every field that is named like an id', () => {
  const ids = Object.fromEntries(nouns.map((noun) => [noun, `some ${noun}`])) as Ids;
  for (const { name, route } of table) {
    const found = named(new RequestParser(route).ids(rawOf(route, ids, {})));
    const expected = placesIn(route).map(({ noun }) => ({ noun, id: ids[noun] }));
    expect([name, found]).toEqual([name, expected]);
  }
});

function idsIn(body: z.ZodType, value: unknown): Named[] {
  const route = single('POST', '/x', 'admin', { summary: '', body, reply: z.null() });
  return named(new RequestParser(route).ids({ params: {}, query: {}, headers: {}, body: value }));
}

const a: Named = { noun: 'machine', id: 'a' };
const b: Named = { noun: 'machine', id: 'b' };
const id = machineId;

test.each<[string, z.ZodType, unknown, Named[]]>([
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

// TypeScript and zod accept each of these schemas. The broker must either find all ids in it or refuse to start.
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
  let found: Named[];
  try {
    found = idsIn(schema, value);
  } catch (error) {
    return expect(String(error)).toMatch(/^Error: .*\bid\b/);
  }
  expect(found).toEqual([a]);
});
