// The OpenAPI document that a broker serves: it has no warning of the linter, and is complete and correct.
import { execFile } from 'node:child_process';
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { z } from 'zod';
import { openapiText } from '../broker/http/openapi.ts';
import { deliveryBody, webhookTypes } from '../shared/api/events.ts';
import { allRoutes } from '../shared/api/route-table.ts';
import { codes, isCode } from '../shared/errors.ts';
import { addressOf, everything, startScene } from './all-routes.ts';
import { call, startFarhand, temporaryFolder } from './start-farhand.ts';

type Json = null | boolean | number | string | Json[] | { [key: string]: Json };

type Content = Record<string, { schema: { [key: string]: Json } }>;

interface Response {
  content?: Content;
  headers?: Record<string, { $ref: string }>;
}

interface Operation {
  operationId: string;
  summary: string;
  description?: string;
  security?: object[];
  tags: string[];
  parameters?: {
    in: string;
    name: string;
    description?: string;
    required?: boolean;
    schema: { [key: string]: Json };
  }[];
  requestBody?: { required?: boolean; content: Content };
  responses: Record<string, Response & { $ref?: string }>;
}

interface Document {
  openapi: string;
  info: { title: string; version: string };
  servers: { url: string }[];
  paths: Record<string, Record<string, Operation>>;
  webhooks: Record<string, { post: Operation }>;
  components: {
    schemas: { [key: string]: Json };
    securitySchemes: { [key: string]: Json };
    responses: Record<string, Response>;
  };
}

async function served(): Promise<{ url: string; text: string; document: Document }> {
  const { url } = await startFarhand();
  const response = await fetch(`${url}/api/v1/openapi.json`);
  expect([response.status, response.headers.get('content-type')]).toEqual([
    200,
    'application/json; charset=utf-8',
  ]);
  const text = await response.text();
  return { url, text, document: JSON.parse(text) };
}

/** Returns every operation with its route. */
function operationsOf(document: Document) {
  return allRoutes().map(({ noun, operation, route }) => ({
    name: `${noun}.${operation}`,
    route,
    described: document.paths[`${route.base}${route.path}`]?.[route.method.toLowerCase()],
  }));
}

/** Yields every value in a document with its key. */
function* valuesIn(value: unknown, key = ''): Generator<[key: string, value: unknown]> {
  yield [key, value];
  if (typeof value !== 'object' || value === null) return;
  for (const [name, inner] of Object.entries(value)) yield* valuesIn(inner, name);
}

interface Problem {
  ruleId: string;
  severity: string;
  message: string;
  location: { pointer?: string }[];
}

async function lint(text: string): Promise<Problem[]> {
  const folder = temporaryFolder('openapi');
  const file = join(folder, 'openapi.json');
  writeFileSync(file, text);
  writeFileSync(join(folder, 'redocly.yaml'), 'extends: [recommended]\n');
  const binary = join(import.meta.dirname, '../node_modules/.bin/redocly');
  const args = [
    'lint',
    file,
    '--config',
    join(folder, 'redocly.yaml'),
    '--format',
    'json',
    '--max-problems',
    '999',
  ];
  const env = {
    PATH: process.env.PATH ?? '',
    HOME: folder,
    REDOCLY_TELEMETRY: 'off',
    REDOCLY_SUPPRESS_UPDATE_NOTICE: 'true',
  };
  const output = await new Promise<string>((resolve, reject) => {
    // The linter exits with 1 if it finds errors. If it could not run, it prints nothing on standard output.
    execFile(binary, args, { cwd: folder, env, maxBuffer: 2 ** 26 }, (error, stdout, stderr) =>
      stdout ? resolve(stdout) : reject(new Error(stderr, { cause: error })),
    );
  });
  return (JSON.parse(output) as { problems: Problem[] }).problems;
}

const line = ({ ruleId, message, location }: Problem): string =>
  `${ruleId}: ${message} (${location[0]?.pointer ?? ''})`;

test('the linter reports what is wrong with a document', async () => {
  const { document } = await served();
  const { '/api/v1/machines': _, ...paths } = document.paths;
  const broken = { ...document, paths: { ...paths, '/x/{id}': { get: { responses: {} } } } };
  const rules = (await lint(JSON.stringify(broken))).map(({ ruleId }) => ruleId);
  expect(rules).toContain('path-parameters-defined');
});

test('the served document has no errors and no warnings by the linter’s recommended rules', async () => {
  const { text } = await served();
  const problems = await lint(text);
  expect(problems.filter(({ severity }) => severity === 'error').map(line)).toEqual([]);
  // Leaves out the warning about a WebSocket route, whose success is 101.
  const warnings = problems.filter(
    ({ ruleId, location }) =>
      ruleId !== 'operation-2xx-response' || !location[0]?.pointer?.includes('~1stream/get'),
  );
  expect(warnings.map(line)).toEqual([]);
});

test('the served document is OpenAPI 3.1 and names this broker as its server', async () => {
  const { url, document } = await served();
  expect(document.openapi).toMatch(/^3\.1\.\d+$/);
  expect(document.servers).toMatchObject([{ url }]);
  expect(document.info.version).toMatch(/^\d+\.\d+\.\d+/);
  const system = await startFarhand({ flags: ['--public-url', 'https://farhand.example.org'] });
  const { body } = await call(`${system.url}/api/v1/openapi.json`, 'GET');
  expect(body.servers).toMatchObject([{ url: 'https://farhand.example.org' }]);
});

test('every reference in the document resolves, and every component is used', async () => {
  const { document } = await served();
  const references = [...valuesIn(document)]
    .filter(([key]) => key === '$ref')
    .map(([, value]) => String(value));
  expect(references.length).toBeGreaterThan(10);
  for (const reference of new Set(references)) {
    const [root, ...steps] = reference
      .split('/')
      .map((step) => step.replaceAll('~1', '/').replaceAll('~0', '~'));
    expect([reference, root]).toEqual([reference, '#']);
    let at: unknown = document;
    for (const step of steps) at = (at as Record<string, unknown> | undefined)?.[step];
    expect([reference, typeof at]).toEqual([reference, 'object']);
  }
  const schemas = Object.keys(document.components.schemas);
  expect(schemas.filter((name) => !references.includes(`#/components/schemas/${name}`))).toEqual([]);
});

test('every route of the table is in the document with its method and status, and nothing else is', async () => {
  const { document } = await served();
  const operations = operationsOf(document);
  for (const { name, route, described } of operations) {
    expect([name, described?.operationId, described?.summary]).toEqual([name, name, route.summary]);
    expect([name, Object.keys(described?.responses ?? {})]).toEqual([
      name,
      expect.arrayContaining([`${route.status}`, '400', '500']),
    ]);
  }
  const described = Object.values(document.paths).flatMap((path) => Object.values(path));
  expect(described.length).toBe(operations.length);
});

test('each operation names the scope that it needs, or says that it needs no key', async () => {
  const { document } = await served();
  expect(document.components.securitySchemes).toEqual({
    apiKey: { type: 'http', scheme: 'bearer', description: expect.any(String) },
    login: { type: 'apiKey', in: 'cookie', name: '__Host-farhand', description: expect.any(String) },
  });
  expect(document).toMatchObject({ security: [{ apiKey: [] }, { login: [] }] });
  for (const { name, route, described } of operationsOf(document)) {
    const open = route.access === 'everybody';
    expect([name, described?.security]).toEqual([name, open ? [] : undefined]);
    const scope = open ? 'no key' : route.access === 'any key' ? 'any' : route.access;
    expect([name, described?.description]).toEqual([name, expect.stringContaining(scope)]);
    expect([name, described?.description]).toEqual([name, expect.stringContaining(route.description ?? '')]);
  }
});

test('the parameters of the document are those of the table, with the names of headers as they are sent', async () => {
  const { document } = await served();
  for (const { name, route, described } of operationsOf(document)) {
    const places = { path: route.params, query: route.query, header: route.headers };
    for (const [place, shape] of Object.entries(places)) {
      const named = (described?.parameters ?? []).filter((parameter) => parameter.in === place);
      const names = Object.keys(shape).map((key) =>
        place === 'header' ? key.replaceAll('_', '-').toLowerCase() : key,
      );
      if (place === 'header' && route.idempotency) names.push('idempotency-key');
      const seen = named.map((parameter) =>
        place === 'header' ? parameter.name.toLowerCase() : parameter.name,
      );
      expect([name, place, seen.toSorted()]).toEqual([name, place, names.toSorted()]);
      for (const { name: key, required } of named) {
        const schema =
          Object.entries(shape).find(([one]) => one.replaceAll('_', '-') === key.toLowerCase())?.[1] ??
          shape[key];
        if (schema)
          expect([name, key, required ?? false]).toEqual([
            name,
            key,
            !z.safeParse(schema, undefined).success,
          ]);
      }
    }
  }
});

test('enum, default and pattern of every parameter match its type', async () => {
  const { document } = await served();
  const wrong: string[] = [];
  for (const { name, described } of operationsOf(document)) {
    for (const { name: key, schema } of described?.parameters ?? []) {
      const values = [
        ...((schema.enum as Json[] | undefined) ?? []),
        ...('default' in schema ? [schema.default] : []),
      ];
      const kind = schema.type === 'integer' ? 'number' : schema.type;
      if (values.some((value) => typeof value !== kind))
        wrong.push(`${name} ${key}: ${JSON.stringify(schema)}`);
      if ('pattern' in schema && kind !== 'string')
        wrong.push(`${name} ${key}: a pattern on a ${JSON.stringify(kind)}`);
    }
  }
  expect(wrong).toEqual([]);
});

test('a body is described as required exactly if an empty one is refused', async () => {
  const { document } = await served();
  for (const { name, route, described } of operationsOf(document)) {
    const required = route.accepts ? true : route.body && !z.safeParse(route.body, {}).success;
    expect([name, described?.requestBody && (described.requestBody.required ?? false)]).toEqual([
      name,
      required,
    ]);
  }
});

test('every success is described as the envelope of data and meta, with paging for a list', async () => {
  const { document } = await served();
  for (const { name, route, described } of operationsOf(document)) {
    if (!['single', 'list', 'growing'].includes(route.kind)) continue;
    const { properties, required } =
      described?.responses[route.status]?.content?.['application/json']?.schema ?? {};
    const { data, meta } = properties as Record<string, { [key: string]: Json }>;
    expect([name, required]).toEqual([name, expect.arrayContaining(['data', 'meta'])]);
    expect([name, data?.type === 'array']).toEqual([name, route.kind === 'list']);
    if (route.listMeta) {
      // The schema of `meta` lists all fields itself. It cannot combine two schemas with `allOf`: neither allows
      // further properties, so each would refuse the fields of the other.
      const common = ['request_id', 'timestamp', 'total', 'limit', 'offset', 'has_more'];
      const fields = [...common, ...Object.keys(route.listMeta.shape)];
      expect([name, Object.keys(meta?.properties ?? {}).toSorted()]).toEqual([name, fields.toSorted()]);
      continue;
    }
    expect([name, meta?.$ref]).toEqual([
      name,
      `#/components/schemas/${route.kind === 'single' ? 'Meta' : 'ListMeta'}`,
    ]);
  }
});

/** Returns the fields and schemas below a schema that lack a description. */
function undescribed(schema: Json | undefined, at: string): string[] {
  if (typeof schema !== 'object' || schema === null || Array.isArray(schema) || '$ref' in schema) return [];
  const { properties = {}, items, additionalProperties, anyOf = [], oneOf = [], allOf = [] } = schema;
  const fields = Object.entries(properties as { [key: string]: Json }).flatMap(([name, field]) => {
    const { description, $ref } = field as { description?: string; $ref?: string };
    return [...(description || $ref ? [] : [`${at}.${name}`]), ...undescribed(field, `${at}.${name}`)];
  });
  const inner = [items, additionalProperties, ...[anyOf, oneOf, allOf].flat()];
  return [...fields, ...inner.flatMap((one) => undescribed(one, at))];
}

test('every parameter and every field of the document has a description', async () => {
  const { document } = await served();
  const operations = [
    ...Object.values(document.paths).flatMap((path) => Object.values(path)),
    ...Object.values(document.webhooks).map(({ post }) => post),
  ];
  const missing = operations.flatMap(({ operationId, parameters = [], requestBody, responses }) => [
    ...parameters.filter(({ description }) => !description).map(({ name }) => `${operationId} ?${name}`),
    ...[requestBody, ...Object.values(responses)].flatMap((one) =>
      Object.values(one?.content ?? {}).flatMap(({ schema }) => undescribed(schema, operationId)),
    ),
  ]);
  const schemas = Object.entries(document.components.schemas);
  expect([...missing, ...schemas.flatMap(([name, schema]) => undescribed(schema, name))]).toEqual([]);
});

test('a list has the defaults of limit and offset, and the header of its next page', async () => {
  const { document } = await served();
  for (const { name, route, described } of operationsOf(document)) {
    if (route.kind !== 'list') continue;
    const defaults = (described?.parameters ?? []).map((one) => [one.name, one.schema.default]);
    expect([name, defaults]).toEqual([
      name,
      expect.arrayContaining([
        ['limit', 20],
        ['offset', 0],
      ]),
    ]);
    expect([name, Object.keys(described?.responses['200']?.headers ?? {})]).toEqual([
      name,
      expect.arrayContaining(['X-Request-Id', 'X-RateLimit-Limit', 'Link']),
    ]);
  }
});

test('the error responses of a route are listed by status, each with its codes', async () => {
  const { document } = await served();
  for (const { name, route, described } of operationsOf(document)) {
    const refused = Object.entries(described?.responses ?? {}).filter(([status]) => Number(status) >= 400);
    const listed = refused.flatMap(([status, { $ref = '' }]) => {
      const response = document.components.responses[$ref.replace('#/components/responses/', '')];
      const schema = JSON.stringify(response?.content?.['application/json']?.schema);
      const found = (JSON.parse(/"enum":(\[[^\]]*\])/.exec(schema)?.[1] ?? '[]') as string[]).filter(isCode);
      expect([name, status, found.map((code) => codes[code])]).toEqual([
        name,
        status,
        found.map(() => Number(status)),
      ]);
      return found;
    });
    expect([name, listed]).toEqual([name, expect.arrayContaining(['invalid_request', 'internal_error'])]);
    if (route.access !== 'everybody')
      expect([name, listed]).toEqual([name, expect.arrayContaining(['unauthorized', 'forbidden'])]);
    if (route.params.machine_id)
      expect([name, listed]).toEqual([name, expect.arrayContaining(['machine_not_found'])]);
  }
});

test('every JSON body has an example, and each works when it is sent', async () => {
  const scene = await startScene();
  const { client, key } = scene.system;
  const { machine: machine_id, session: session_id } = scene.here;
  const input = await client.commands.create({ machine_id, command: 'cat', input: true, wait: 100 });
  const { client_id } = await client.sessions.attach({ session_id });
  mkdirSync(join(scene.folder, 'app'));
  const examples = everything.filter(({ route }) => route.body && !route.accepts);
  for (const { name, route } of examples) {
    writeFileSync(join(scene.folder, 'app/motd'), 'hello');
    const text = JSON.stringify(route.example)
      .replaceAll(/mach_\w{22}/g, machine_id)
      .replaceAll(/cli_\w{22}/g, client_id)
      .replaceAll('/srv/app', join(scene.folder, 'app'));
    // The example for input also closes the input, so it needs a command of its own.
    const command = name === 'commands.input' ? input.id : scene.here.command;
    const url = addressOf(scene, route, { ids: { ...scene.here, command } });
    const { status, body } = await call(url, route.method, { key, body: JSON.parse(text) });
    expect([name, status, body?.error]).toEqual([name, route.status, undefined]);
    // Removes the webhook at once, so that nothing is sent to its URL.
    if (name === 'webhooks.create') await client.webhooks.remove({ webhook_id: body.data.id });
  }
});

test('the data of every event matches the schema of its delivery, without further fields', async () => {
  const { system, here } = await startScene();
  const path = join(temporaryFolder('events'), 'file');
  await system.client.files.write({ machine_id: here.machine, path, content: 'x' });
  await system.client.files.remove({ machine_id: here.machine, path });
  await system.client.sessions.attach({ session_id: here.session });
  await system.client.sessions.end({ session_id: here.session });
  const seen = new Set<string>();
  for await (const event of system.client.events.list()) {
    if (!webhookTypes.some((type) => type === event.type)) continue;
    seen.add(event.type);
    const { data } = deliveryBody(event.type).shape;
    if (!(data instanceof z.ZodObject)) throw new Error(`${event.type} has no object as data`);
    expect([event.type, data.strict().safeParse(event.data).error?.issues]).toEqual([event.type, undefined]);
  }
  expect([...seen].sort()).toEqual(
    expect.arrayContaining([
      'command.completed',
      'command.started',
      'file.deleted',
      'file.uploaded',
      'machine.registered',
      'session.client_attached',
      'session.connected',
      'session.created',
      'session.disconnected',
    ]),
  );
});

test('the document and the files of the reference page are made once, and a client that has them gets 304', async () => {
  const { url } = await startFarhand();
  for (const path of ['/api/v1/openapi.json', '/docs/redoc.standalone.js', '/docs/page.js']) {
    const first = await fetch(url + path);
    const etag = first.headers.get('etag') ?? '';
    expect([path, first.headers.get('cache-control'), etag]).toEqual([
      path,
      'no-cache',
      expect.stringMatching(/^"\S+"$/),
    ]);
    expect((await first.arrayBuffer()).byteLength).toBe(Number(first.headers.get('content-length')));
    const again = await fetch(url + path, { headers: { 'If-None-Match': etag } });
    expect([path, again.status, await again.text()]).toEqual([path, 304, '']);
    const other = await fetch(url + path, { headers: { 'If-None-Match': '"other"' } });
    expect([path, other.status, other.headers.get('etag')]).toEqual([path, 200, etag]);
    await other.arrayBuffer();
  }
  const costOf = async (run: () => unknown): Promise<number> => {
    const begun = process.cpuUsage();
    for (let n = 0; n < 8; n += 1) await run();
    return process.cpuUsage(begun).user;
  };
  const head = (path: string) => () => fetch(url + path, { method: 'HEAD' });
  await costOf(() => openapiText(url));
  const making = await costOf(() => openapiText(url));
  const asking = (await costOf(head('/api/v1/openapi.json'))) - (await costOf(head('/healthz')));
  expect(asking).toBeLessThan(making);
});
