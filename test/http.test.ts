// HTTP with a real broker: wrong requests are refused with the error envelope, disguised paths and headers change no
// rights, and no request ends the broker.
import { once } from 'node:events';
import { writeFileSync } from 'node:fs';
import { connect, type Socket } from 'node:net';
import { join } from 'node:path';
import { status as grpcStatus } from '@grpc/grpc-js';
import { expect, test } from 'vitest';
import { queryOf } from '../broker/request-checks/parse-api-request.ts';
import { toWire } from '../shared/agent-rpcs.ts';
import { allRoutes } from '../shared/api/route-table.ts';
import { AppError, codes, isCode } from '../shared/errors.ts';
import { shared } from './close-after-tests.ts';
import { nextCall, reporting } from './commands-fixture.ts';
import { joinScripted, type ScriptedAgent, scriptedMachine, statusOf } from './scripted-agent.ts';
import { type Answer, call, startFarhand, type TestSystem, temporaryFolder } from './start-farhand.ts';
import { waitFor } from './wait-for.ts';

const mebibyte = 1024 * 1024;

// ---- Requests as raw bytes, because fetch would correct them

interface WireAnswer {
  status: number;
  headers: Headers;
  text: string;
}

async function dialHttp(system: TestSystem): Promise<Socket> {
  const { hostname, port } = new URL(system.url);
  const socket = connect(Number(port), hostname);
  // The broker may reset the connection when it refuses a request that it has not read completely. That is no failure.
  socket.on('error', () => undefined);
  await once(socket, 'connect');
  return socket;
}

/** Reads until the connection is closed. Returns a string with one character per byte. */
function everything(socket: Socket): Promise<string> {
  const chunks: Buffer[] = [];
  socket.on('data', (chunk: Buffer) => chunks.push(chunk));
  return new Promise((resolve) => {
    socket.once('close', () => resolve(Buffer.concat(chunks).toString('latin1')));
  });
}

/** Sends bytes unchanged. Reads answers until the broker closes the connection. */
async function wire(system: TestSystem, ...bytes: (string | Buffer)[]): Promise<WireAnswer[]> {
  const socket = await dialHttp(system);
  const answered = everything(socket);
  for (const part of bytes) socket.write(part);
  return answersIn(await answered);
}

function answersIn(text: string): WireAnswer[] {
  const at = text.indexOf('\r\n\r\n');
  if (at < 0) return [];
  const [line = '', ...lines] = text.slice(0, at).split('\r\n');
  const headers = new Headers(lines.map((header) => header.split(/:\s*/, 2) as [string, string]));
  const length = Number(headers.get('content-length') ?? 'Infinity');
  const body = text.slice(at + 4, at + 4 + length);
  return [
    { status: Number(line.split(' ')[1]), headers, text: body },
    ...answersIn(text.slice(at + 4 + body.length)),
  ];
}

interface Wanted {
  method?: string;
  target: string;
  key?: string | undefined;
  headers?: Record<string, string>;
  body?: string;
}

/** Returns the text of a request after which the broker closes the connection. */
function requestText({ method = 'GET', target, key, headers = {}, body }: Wanted): string {
  const all = {
    Host: 'broker',
    Connection: 'close',
    ...(key && { Authorization: `Bearer ${key}` }),
    ...(body !== undefined && { 'Content-Length': String(Buffer.byteLength(body)) }),
    ...headers,
  };
  const lines = Object.entries(all).map(([name, value]) => `${name}: ${value}\r\n`);
  return `${method} ${target} HTTP/1.1\r\n${lines.join('')}\r\n${body ?? ''}`;
}

async function ask(system: TestSystem, wanted: Wanted): Promise<WireAnswer> {
  const [answer, ...more] = await wire(system, requestText(wanted));
  expect(more).toEqual([]);
  if (!answer) throw new Error(`${wanted.target}: the connection was closed without an answer`);
  return answer;
}

const requestId = /^req_[0-9A-Za-z]{22}$/;

/** Checks that a refusal has the error envelope. Returns its status and code, such as `400 invalid_request`. */
function refusal(answer: Answer | WireAnswer): string {
  const body = 'body' in answer ? answer.body : JSON.parse(answer.text || '{}');
  const { code, details } = body?.error ?? {};
  if (!isCode(String(code))) return `${answer.status} without a code of the table`;
  expect(body).toEqual({ error: { code, message: expect.stringMatching(/./), details: expect.any(Object) } });
  expect(Array.isArray(details)).toBe(false);
  expect(JSON.stringify(body)).not.toMatch(/\\n\s+at |node:internal|\.ts:\d/);
  expect(answer.headers.get('content-type')).toBe('application/json; charset=utf-8');
  expect(answer.headers.get('x-request-id')).toMatch(requestId);
  expect([code, answer.status]).toEqual([code, codes[code as keyof typeof codes]]);
  return `${answer.status} ${code}`;
}

async function expectAlive(system: TestSystem): Promise<void> {
  const { status, body } = await system.call('GET', '/auth/me');
  expect([status, body.data?.name]).toEqual([200, 'test']);
  expect((await call(`${system.url}/readyz`, 'GET')).status).toBe(200);
}

/** A system with a registered machine that has never linked. */
const aSystem = shared(startFarhand);

async function startQuietSystem(): Promise<{ system: TestSystem; machine: string }> {
  const system = await startFarhand();
  const { machineId } = await joinScripted(system, 'quiet');
  return { system, machine: `/machines/${machineId}` };
}

const quietSystem = shared(startQuietSystem);

// ---- Paths and methods

test('a path that does not exist is 401 without a key and 404 with one', async () => {
  const system = await aSystem();
  for (const path of [
    '/',
    '/favicon.ico',
    '/api',
    '/api/v1',
    '/api/v1/',
    '/api/v2/machines',
    '/api/v1/nothing',
  ]) {
    for (const method of ['GET', 'POST', 'OPTIONS', 'PROPFIND']) {
      const without = await call(system.url + path, method);
      const wrong = await call(system.url + path, method, { key: 'service_apikey_wrong' });
      const known = await call(system.url + path, method, { key: system.key });
      expect([method, path, ...[without, wrong, known].map(refusal)]).toEqual([
        method,
        path,
        '401 unauthorized',
        '401 unauthorized',
        '404 route_not_found',
      ]);
    }
  }
  const head = await fetch(`${system.url}/nothing`, { method: 'HEAD' });
  expect([head.status, await head.text()]).toEqual([401, '']);
});

test('an unknown method of a path is 405 with Allow, and 401 without a key if the path needs one', async () => {
  const system = await aSystem();
  const methods = ['GET', 'POST', 'PUT', 'PATCH', 'DELETE', 'OPTIONS', 'PROPFIND'];
  const paths = Map.groupBy(allRoutes(), ({ route }) => `${route.base}${route.path}`);
  for (const [path, routes] of paths) {
    const offered = routes.map(({ route }) => route.method as string);
    // Leaves out paths that also match a route with a parameter, such as `/schedules/preview`.
    const alike = [...paths].filter(([other]) => matches(other, path)).flatMap(([, some]) => some);
    if (alike.length > routes.length) continue;
    const url = system.url + path.replaceAll(/\{\w+\}/g, 'x');
    for (const method of methods.filter((one) => !offered.includes(one))) {
      const answer = await call(url, method, { key: system.key });
      expect([method, path, refusal(answer)]).toEqual([method, path, '405 method_not_allowed']);
      const allow = answer.headers.get('allow')?.split(', ') ?? [];
      expect(allow.toSorted()).toEqual([...offered, ...(offered.includes('GET') ? ['HEAD'] : [])].toSorted());
      const open = routes.some(({ route }) => route.access === 'everybody');
      const expected = open ? '405 method_not_allowed' : '401 unauthorized';
      expect([method, path, refusal(await call(url, method))]).toEqual([method, path, expected]);
    }
  }
});

test('a path without parameters is its own route, also if it matches another with parameters', async () => {
  const all = allRoutes().map(({ route }) => ({ method: route.method, path: `${route.base}${route.path}` }));
  for (const { method, path } of all.filter((one) => !one.path.includes('{'))) {
    // The first route that matches, in the order of the table, must be this one.
    const first = all.find((one) => one.method === method && matches(one.path, path));
    expect([method, first?.path]).toEqual([method, path]);
  }
  const system = await aSystem();
  const { key } = system;
  const preview = '/api/v1/schedules/preview';
  expect((await call(`${system.url}${preview}?cron=@daily`, 'GET', { key })).status).toBe(200);
  const metrics = await fetch(`${system.url}/metrics`, { headers: { authorization: `Bearer ${key}` } });
  const counted = (await metrics.text()).split('\n').filter((line) => line.includes('/schedules/'));
  expect(counted.length).toBeGreaterThan(0);
  expect(counted.filter((line) => !line.includes(`"${preview}"`))).toEqual([]);
});

/** True if a path matches a pattern with parameters. */
function matches(pattern: string, path: string): boolean {
  return new RegExp(`^${pattern.replaceAll(/\{\w+\}/g, '[^/{]+')}$`).test(path) || pattern === path;
}

const trickyPaths = [
  '//api/v1/machines',
  '/api//v1/machines',
  '/api/v1//machines',
  '/./api/v1/machines',
  '/api/v1/./machines',
  '/api/v1/../v1/machines',
  '/api/v1/machines/',
  '/api/v1/machines/.',
  '/api/v1/machines/..',
  '/api/v1/%2e/machines',
  '/api/v1/%2E%2E/v1/machines',
  '/api/v1/%6dachines',
  '/api%2Fv1%2Fmachines',
  '/api/v1%2fmachines',
  '/api/v1/machines%2f',
  '/API/V1/MACHINES',
  '/api/v1/Machines',
  '/api/v1/machines;x',
  '/api/v1;x/machines',
  '/api/v1/machines%00',
  '/api/v1/machines%20',
  '/api/v1/machines%3Flimit=1',
  '/api/v1/machines%E0%A4%A',
  '/api/v1\\machines',
  '/healthz/../api/v1/machines',
  '/docs/../api/v1/machines',
  '/docs/%2e%2e/api/v1/machines',
  '/api/v1/openapi.json/../machines',
  '/readyz//api/v1/machines',
  '/healthz/',
  '/HEALTHZ',
  '/metrics/',
  '//metrics',
  '/%6detrics',
  '/healthz/../metrics',
  '*',
  'http://broker//api/v1/machines',
  'http://broker/healthz/../api/v1/machines',
  'http://broker',
];

test('a path that only resembles a route is 401 without a key and 404 with one, and never uses that route', async () => {
  const { system } = await quietSystem();
  for (const target of trickyPaths) {
    const known = refusal(await ask(system, { target, key: system.key }));
    // "." and ".." count as ids of unknown machines.
    expect([target, refusal(await ask(system, { target })), known]).toEqual([
      target,
      '401 unauthorized',
      expect.stringMatching(/^404 (route|machine)_not_found$/),
    ]);
  }
});

test('an absolute URI in the request line counts as its path and query, and needs the same key', async () => {
  const { system } = await quietSystem();
  const { key } = await system.keyed(['files:read']);
  for (const origin of ['http://broker', 'HTTPS://elsewhere:99', 'http://user:password@broker']) {
    const target = `${origin}/api/v1/machines`;
    expect([origin, refusal(await ask(system, { target }))]).toEqual([origin, '401 unauthorized']);
    expect([origin, refusal(await ask(system, { target, key }))]).toEqual([origin, '403 forbidden']);
    const query = await ask(system, { target: `${target}?limit=0`, key: system.key });
    expect([origin, refusal(query)]).toEqual([origin, '400 invalid_request']);
    const { status, text } = await ask(system, { target: `${target}?limit=1`, key: system.key });
    expect([origin, status, JSON.parse(text).meta?.total]).toEqual([origin, 200, 1]);
  }
});

test('a Host header changes nothing about a request, whatever it contains', async () => {
  const { system } = await quietSystem();
  const target = '/api/v1/machines?limit=1';
  const hosts = ['', '[', 'a b', 'b/x?limit=7&z=', 'b/x#', 'b?', 'b:99999', 'user@[', 'user@b', '[::1]:8420'];
  const received: string[] = [];
  for (const host of hosts) {
    const without = await ask(system, { target, headers: { Host: host } });
    const known = await ask(system, { target, key: system.key, headers: { Host: host } });
    const limit = JSON.parse(known.text || '{}').meta?.limit;
    received.push(`${host}: ${without.status}, ${known.status} with limit ${limit}`);
  }
  // The broker may refuse the request. It must neither answer 500 nor take the query from the header.
  const good = /^.*: (401, 200 with limit 1|40[01], 400 with limit undefined)$/;
  expect(received.filter((line) => !good.test(line))).toEqual([]);
});

test('headers that name another method, path or address change nothing about a request', async () => {
  const { system, machine } = await quietSystem();
  const { key } = await system.keyed(['machines:read']);
  for (const name of ['X-HTTP-Method-Override', 'X-HTTP-Method', 'X-Method-Override']) {
    const headers = { [name]: 'DELETE' };
    expect(refusal(await system.call('GET', `${machine}?_method=DELETE`, { headers }))).toBe(
      '400 invalid_request',
    );
    const read = await system.call('GET', machine, { headers });
    expect([name, read.status, read.body.data.name]).toEqual([name, 200, 'quiet']);
    expect(refusal(await system.call('POST', machine, { headers }))).toBe('405 method_not_allowed');
    const written = await system.call('DELETE', machine, { key, headers: { [name]: 'GET' } });
    expect([name, refusal(written)]).toEqual([name, '403 forbidden']);
  }
  for (const headers of [
    { 'X-Original-URL': '/healthz' },
    { 'X-Rewrite-URL': '/healthz' },
    { 'X-Forwarded-For': '127.0.0.1', 'X-Real-IP': '127.0.0.1' },
    { Forwarded: 'for=127.0.0.1;host=localhost;proto=https' },
    { 'X-Forwarded-Host': 'localhost', 'X-Forwarded-Prefix': '/docs' },
  ]) {
    const without = await system.call('GET', '/machines', {
      key: null,
      headers,
    });
    expect(refusal(without)).toBe('401 unauthorized');
  }
  await expectAlive(system);
});

// ---- Bodies

const bodyKinds: [what: string, body: string, headers: Record<string, string>][] = [
  ['malformed JSON', '{"name":', {}],
  ['two values', '{} {}', {}],
  ['JSON with quotes of another kind', "{'name':'x'}", {}],
  ['text', 'name=x', {}],
  ['a form', 'name=x', { 'Content-Type': 'application/x-www-form-urlencoded' }],
  ['JSON called text', '{"name":"x"}', { 'Content-Type': 'text/plain' }],
  ['JSON called a form part', '{"name":"x"}', { 'Content-Type': 'multipart/form-data; boundary=x' }],
  ['JSON without a type that can be read', '{"name":"x"}', { 'Content-Type': 'json' }],
  ['a gzip body', '{"name":"x"}', { 'Content-Encoding': 'gzip' }],
  ['a deflate body', '{"name":"x"}', { 'Content-Encoding': 'deflate' }],
  ['a br body', '{"name":"x"}', { 'Content-Encoding': 'br' }],
  ['a body encoded twice', '{"name":"x"}', { 'Content-Encoding': 'identity, gzip' }],
];

test('a body that is not JSON, or has another Content-Type, is invalid_request, and nothing changes', async () => {
  const { system, machine } = await quietSystem();
  const received: unknown[] = [];
  for (const [what, body, headers] of bodyKinds) {
    received.push([what, refusal(await system.call('PATCH', machine, { body, headers }))]);
  }
  expect(received).toEqual(bodyKinds.map(([what]) => [what, '400 invalid_request']));
  expect((await system.call('GET', machine)).body.data.name).toBe('quiet');
});

test('a JSON body that is no object is refused, also if no field is required', async () => {
  const { system, machine } = await quietSystem();
  const bodies = ['[]', '[{"name":"x"}]', '5', '"name"', 'true', 'null'];
  const received: unknown[] = [];
  for (const body of bodies) received.push([body, refusal(await system.call('PATCH', machine, { body }))]);
  expect(received).toEqual(
    bodies.map((body) => [body, expect.stringMatching(/^(400 invalid_request|422 validation_failed)$/)]),
  );
  expect((await system.call('GET', machine)).body.data.name).toBe('quiet');
});

test('bytes that are not UTF-8 are invalid_request, never text with other characters', async () => {
  const { system, machine } = await quietSystem();
  const [answer] = await wire(
    system,
    requestText({
      method: 'PATCH',
      target: `/api/v1${machine}`,
      key: system.key,
      headers: { 'Content-Type': 'application/json', 'Content-Length': '12' },
    }),
    Buffer.from('{"name":"\xff"}', 'latin1'),
  );
  expect(answer && refusal(answer)).toBe('400 invalid_request');
  expect((await system.call('GET', machine)).body.data.name).toBe('quiet');
});

test('JSON is accepted with any JSON type, without a type and with a charset, but not with a content encoding', async () => {
  const { system, machine } = await quietSystem();
  const types = [
    { 'Content-Type': 'application/json' },
    { 'Content-Type': 'Application/JSON; Charset=UTF-8' },
    { 'Content-Type': 'application/merge-patch+json' },
    { 'Content-Type': 'application/json', 'Content-Encoding': 'identity' },
    {},
  ];
  for (const [n, headers] of types.entries()) {
    const body = JSON.stringify({ name: `name ${n}` });
    const answer = await ask(system, {
      method: 'PATCH',
      target: `/api/v1${machine}`,
      key: system.key,
      headers,
      body,
    });
    expect([answer.status, JSON.parse(answer.text).data?.name]).toEqual([200, `name ${n}`]);
  }
});

test('a declared body over 1 MiB is 413 before a byte of it is sent, and the connection is closed', async () => {
  const { system, machine } = await quietSystem();
  for (const length of [mebibyte + 1, 1e12]) {
    const answers = await wire(
      system,
      requestText({
        method: 'PATCH',
        target: `/api/v1${machine}`,
        key: system.key,
        headers: {
          'Content-Type': 'application/json',
          'Content-Length': String(length),
          Connection: 'keep-alive',
        },
      }),
    );
    expect(answers.map(refusal)).toEqual(['413 payload_too_large']);
    expect(answers[0]?.headers.get('connection')).toBe('close');
  }
});

test('a chunked body is 413 as soon as it is over 1 MiB, while the client still sends', async () => {
  const { system, machine } = await quietSystem();
  const head = requestText({
    method: 'PATCH',
    target: `/api/v1${machine}`,
    key: system.key,
    headers: { 'Content-Type': 'application/json', 'Transfer-Encoding': 'chunked', Connection: 'keep-alive' },
  });
  const chunk = `${(mebibyte + 1).toString(16)}\r\n${' '.repeat(mebibyte + 1)}\r\n`;
  expect((await wire(system, head, chunk)).map(refusal)).toEqual(['413 payload_too_large']);
});

test.each([
  ['a body that is too large', 'keep-alive', '413 payload_too_large'],
  ['a wrong key, by a client that wants the connection closed', 'close', '401 unauthorized'],
])('a client that sends 64 MiB before it reads gets the refusal of %s', async (_, connection, expected) => {
  const { system, machine } = await quietSystem();
  const socket = await dialHttp(system);
  socket.pause();
  const head = requestText({
    method: 'PATCH',
    target: `/api/v1${machine}`,
    key: expected.startsWith('401') ? 'wrong' : system.key,
    headers: {
      'Content-Type': 'application/json',
      'Content-Length': String(64 * mebibyte),
      Connection: connection,
    },
  });
  socket.write(head);
  for (let n = 0; n < 64; n += 1) if (!socket.write(Buffer.alloc(mebibyte, ' '))) await once(socket, 'drain');
  const answered = everything(socket);
  socket.resume();
  expect(answersIn(await answered).map(refusal)).toEqual([expected]);
});

test('a body of exactly 1 MiB is accepted, and file content of up to 16 MiB', async () => {
  const { system, machine } = await quietSystem();
  const full = '{"name":"full"}'.padEnd(mebibyte);
  expect((await system.call('PATCH', machine, { body: full })).body.data.name).toBe('full');
  const target = `/api/v1${machine}/files/content`;
  const content = { 'Content-Type': 'application/json' };
  const within = { path: '/x', content: ' '.repeat(2 * mebibyte) };
  expect(refusal(await system.call('PUT', `${machine}/files/content`, { body: within }))).toBe(
    '503 machine_offline',
  );
  const over = await ask(system, {
    method: 'PUT',
    target,
    key: system.key,
    headers: { ...content, 'Content-Length': String(16 * mebibyte + 1) },
  });
  expect(refusal(over)).toBe('413 payload_too_large');
});

const nested = (levels: number, [open, close]: [string, string]): string =>
  open.repeat(levels) + close.repeat(levels);

test.each<[string, [string, string]]>([
  ['arrays', ['[', ']']],
  ['objects', ['{"a":', '}']],
])('%s nested 33 deep are invalid_request, and so are 10,000 and as many as fit', async (_what, pair) => {
  const { system, machine } = await quietSystem();
  const body = (levels: number): string => `{"name":${nested(levels - 1, pair).replace('":}', '":0}')}}`;
  const deepest = Math.floor((mebibyte - 20) / (pair[0].length + 1));
  for (const levels of [33, 34, 10_000, deepest]) {
    const answer = await system.call('PATCH', machine, { body: body(levels) });
    expect([levels, refusal(answer)]).toEqual([levels, '400 invalid_request']);
  }
  // 32 levels are parsed. Only then does the schema refuse the body.
  expect(refusal(await system.call('PATCH', machine, { body: body(32) }))).toBe('422 validation_failed');
  await expectAlive(system);
});

test('keys of Object.prototype in a body are validation_failed and pollute nothing', async () => {
  const { system, machine } = await startQuietSystem();
  const bodies = [
    '{"__proto__":{"polluted":true}}',
    '{"__proto__":null}',
    '{"constructor":{"prototype":{"polluted":true}}}',
    '{"prototype":{}}',
    '{"name":"x","toString":"y"}',
    '{"name":"x","hasOwnProperty":1}',
  ];
  const received: unknown[] = [];
  for (const body of bodies) received.push([body, refusal(await system.call('PATCH', machine, { body }))]);
  expect(received).toEqual(bodies.map((body) => [body, '422 validation_failed']));
  expect((await system.call('GET', machine)).body.data.name).toBe('quiet');
  expect(Object.hasOwn(Object.prototype, 'polluted')).toBe(false);
});

test('names of Object.prototype in a path, a query or a header have no effect', async () => {
  const system = await aSystem();
  for (const name of ['__proto__', 'constructor', 'toString', 'hasOwnProperty']) {
    expect(refusal(await system.call('GET', `/machines/${name}`))).toBe('404 machine_not_found');
    expect(refusal(await system.call('GET', `/commands/${name}`))).toBe('404 command_not_found');
    const docs = await call(`${system.url}/docs/${name}`, 'GET');
    expect(refusal(docs)).toBe('404 route_not_found');
    const list = await system.call('GET', '/machines', { headers: { [name]: 'x' } });
    expect(list.status).toBe(200);
    const filtered = await system.call('GET', `/machines?${name}=x&${name}[y]=z`);
    expect(refusal(filtered)).toBe('400 invalid_request');
  }
});

test('unknown fields of a body are validation_failed, and the details name them', async () => {
  const { system, machine } = await quietSystem();
  const answer = await system.call('PATCH', machine, { body: { name: 'x', Name: 'y', hostname: 'z' } });
  expect(refusal(answer)).toBe('422 validation_failed');
  const { issues } = answer.body.error.details;
  expect(issues).toEqual([{ path: '', message: expect.stringMatching(/Name.*hostname/) }]);
});

test('fields for a route that takes none are validation_failed, and nothing happens; an empty object is accepted', async () => {
  const { system, machine } = await startQuietSystem();
  for (const body of [{ name: 'x' }, [], null, 1]) {
    const answer = await system.call('DELETE', machine, { body });
    expect([answer.status, answer.body.error.code]).toEqual([422, 'validation_failed']);
  }
  expect((await system.call('GET', machine)).status).toBe(200);
  expect((await system.call('DELETE', machine, { body: {} })).status).toBe(200);
});

test('a body of 1 MB with 80,000 unknown fields is refused with a short message before it is parsed', async () => {
  const { system } = await quietSystem();
  const many = Object.fromEntries(Array.from({ length: 80_000 }, (_, n) => [`f${n}`, 1]));
  const bodies: [path: string, body: object][] = [
    ['/schedules', many],
    ['/schedules', { notify: many }],
    ['/commands', { env: many }],
  ];
  for (const [path, body] of bodies) {
    const answer = await system.call('POST', path, { body });
    expect(refusal(answer)).toBe('422 validation_failed');
    expect(answer.body.error.message).toBe('body: has too many fields: send at most 400');
    expect(answer.body.error.details.issues).toHaveLength(1);
  }
  // This body is not valid JSON. Parsing it would fail with 400, so 422 proves that the broker has not parsed it.
  const cut = JSON.stringify(many).slice(0, -1);
  expect(refusal(await system.call('POST', '/schedules', { body: cut }))).toBe('422 validation_failed');
});

test('a refusal lists at most 20 problems, with short names', async () => {
  const { system, machine } = await quietSystem();
  const id = machine.split('/').at(-1);
  const some = (n: number, name: string) =>
    Object.fromEntries(Array.from({ length: n }, (_, i) => [name + i, 1]));
  const long = 'x'.repeat(900_000);
  const wrong: [path: string, body: object, issues: number][] = [
    ['/schedules', { name: 'x', machine_id: id, command: 'x', cron: '@daily', ...some(99, 'no') }, 1],
    ['/schedules', { name: 'x', machine_id: id, command: 'x', cron: '@daily', [long]: 1 }, 1],
    ['/commands', { machine_id: id, command: 'x', env: some(256, '-') }, 20],
    ['/commands', { machine_id: id, command: 'x', env: { [`-${long}`]: 'x' } }, 1],
    ['/commands', { machine_id: id, command: 'x', args: Array.from({ length: 4096 }, () => 1) }, 20],
    ['/commands', { machine_id: id, command: 'x', args: Array.from({ length: 400_000 }, () => 1) }, 1],
    ['/api-keys', { name: 'x', scopes: ['admin'], machine_ids: Array.from({ length: 30_000 }, () => id) }, 1],
  ];
  for (const [path, body, issues] of wrong) {
    const answer = await system.call('POST', path, { body });
    expect(refusal(answer)).toBe('422 validation_failed');
    expect(answer.body.error.details.issues).toHaveLength(issues);
    expect(JSON.stringify(answer.body).length).toBeLessThan(5_000);
    expect(answer.body.error.message.match(/"no\d+"/g) ?? []).toHaveLength(
      path === '/schedules' && 'no0' in body ? 20 : 0,
    );
  }
  const nowhere = await system.call('POST', '/commands', { body: { machine_id: long, command: 'x' } });
  expect(refusal(nowhere)).toBe('404 machine_not_found');
  expect(JSON.stringify(nowhere.body).length).toBeLessThan(2_000);
  const query = Array.from({ length: 1_500 }, (_, n) => `no${n}=1`).join('&');
  const answer = await system.call('GET', `/machines?${query}`);
  expect(refusal(answer)).toBe('400 invalid_request');
  expect(answer.body.error.details.issues).toHaveLength(20);
});

test('a boolean is true or false and nothing else: in a query invalid_request, in a body validation_failed', async () => {
  const { system, machine } = await quietSystem();
  const inQuery = ['1', '0', 'yes', 'TRUE', 'True', '', ' true', 'null', 'true&hidden=true'];
  const inBody = [1, 0, 'true', 'false', '', null, [], {}];
  const received: unknown[] = [];
  for (const value of inQuery) {
    received.push([value, refusal(await system.call('GET', `${machine}/files?hidden=${value}`))]);
  }
  for (const value of inBody) {
    const body = { path: '/x', content: '', create_parents: value };
    received.push([value, refusal(await system.call('PUT', `${machine}/files/content`, { body }))]);
  }
  expect(received).toEqual([
    ...inQuery.map((value) => [value, '400 invalid_request']),
    ...inBody.map((value) => [value, '422 validation_failed']),
  ]);
  for (const value of [true, false]) {
    const listed = await system.call('GET', `${machine}/files?hidden=${value}`);
    const body = { path: '/x', content: '', create_parents: value };
    const written = await system.call('PUT', `${machine}/files/content`, { body });
    expect([listed, written].map(refusal)).toEqual(['503 machine_offline', '503 machine_offline']);
  }
});

test('an empty body is accepted if no field is required, with and without Content-Type, declared and chunked', async () => {
  const { system, machine } = await quietSystem();
  const kinds: [headers: Record<string, string>, body: string][] = [
    [{}, ''],
    [{ 'Content-Type': 'application/json' }, ''],
    [{ 'Content-Length': '0' }, ''],
    [{ 'Content-Length': '0', 'Content-Type': 'application/json' }, ''],
    [{ 'Content-Length': '0', 'Content-Type': 'text/plain' }, ''],
    [{ 'Transfer-Encoding': 'chunked' }, '0\r\n\r\n'],
    [{ 'Transfer-Encoding': 'chunked', 'Content-Type': 'application/json' }, '0\r\n\r\n'],
    [{ 'Transfer-Encoding': 'chunked', 'Content-Type': 'text/plain' }, '0\r\n\r\n'],
  ];
  for (const [headers, body] of kinds) {
    for (const [method, path, status] of [
      ['PATCH', machine, 200],
      ['POST', '/join-tokens', 201],
    ] as const) {
      const [answer] = await wire(
        system,
        requestText({ method, target: `/api/v1${path}`, key: system.key, headers }) + body,
      );
      expect([headers, method, answer?.status]).toEqual([headers, method, status]);
    }
    const { key_id } = await system.client.keys
      .create({ name: 'spare', scopes: ['files:read'] })
      .then(({ id }) => ({ key_id: id }));
    const [removed] = await wire(
      system,
      requestText({ method: 'DELETE', target: `/api/v1/api-keys/${key_id}`, key: system.key, headers }) +
        body,
    );
    expect([headers, 'DELETE', removed?.status]).toEqual([headers, 'DELETE', 200]);
  }
  const required = await ask(system, { method: 'POST', target: '/api/v1/api-keys', key: system.key });
  expect(refusal(required)).toBe('422 validation_failed');
});

// ---- Requests that are not valid HTTP

const garbage: [what: string, bytes: string, expected: RegExp][] = [
  ['the start of TLS', '\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n', /^400 invalid_request$/],
  ['the preface of HTTP/2', 'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n', /^400 invalid_request$/],
  ['words', 'hello broker\r\n\r\n', /^400 invalid_request$/],
  ['a path without a slash', 'GET api/v1/machines HTTP/1.1\r\nHost: b\r\n\r\n', /^400 invalid_request$/],
  ['backslashes', 'GET \\api\\v1\\machines HTTP/1.1\r\nHost: b\r\n\r\n', /^400 invalid_request$/],
  ['a NUL in the path', 'GET /healthz\0 HTTP/1.1\r\nHost: b\r\n\r\n', /^400 invalid_request$/],
  ['a NUL in a header', 'GET /healthz HTTP/1.1\r\nHost: b\r\nX: a\0b\r\n\r\n', /^400 invalid_request$/],
  ['no Host', 'GET /healthz HTTP/1.1\r\nConnection: close\r\n\r\n', /^400 invalid_request$/],
  ['a space before a colon', 'GET /healthz HTTP/1.1\r\nHost : b\r\n\r\n', /^400 invalid_request$/],
  [
    'a length that is no number',
    'POST /x HTTP/1.1\r\nHost: b\r\nContent-Length: -1\r\n\r\n',
    /^400 invalid_request$/,
  ],
  [
    'two lengths',
    'POST /x HTTP/1.1\r\nHost: b\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab',
    /^400 invalid_request$/,
  ],
  [
    'a length and chunks',
    'POST /x HTTP/1.1\r\nHost: b\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n',
    /^400 invalid_request$/,
  ],
  [
    'chunks of no size',
    'POST /x HTTP/1.1\r\nHost: b\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n',
    /^40[01] /,
  ],
  ['a tunnel', 'CONNECT b:80 HTTP/1.1\r\nHost: b\r\n\r\n', /^40[015] /],
  [
    'headers over 16 KiB',
    `GET /healthz HTTP/1.1\r\nHost: b\r\nX: ${'x'.repeat(16_400)}\r\n\r\n`,
    /^4(13|31) /,
  ],
  [
    'many headers over 16 KiB',
    `GET /healthz HTTP/1.1\r\nHost: b\r\n${'X-Y: 1234567890\r\n'.repeat(1_000)}\r\n`,
    /^4(13|31) /,
  ],
  ['a path over 16 KiB', `GET /${'x'.repeat(16_400)} HTTP/1.1\r\nHost: b\r\n\r\n`, /^413 payload_too_large$/],
];

test.each(garbage)('%s gets an envelope, and the broker goes on', async (_what, bytes, expected) => {
  const system = await aSystem();
  const socket = await dialHttp(system);
  const answered = everything(socket);
  socket.write(Buffer.from(bytes, 'latin1'));
  const [answer] = answersIn(await answered);
  expect(answer && refusal(answer)).toMatch(expected);
  await expectAlive(system);
});

test('unknown expectations and upgrades are refused in the envelope, or ignored', async () => {
  const system = await aSystem();
  for (const headers of [{ Expect: 'miracles' }, { Connection: 'Upgrade, close', Upgrade: 'websocket' }]) {
    const answer = await ask(system, { target: '/healthz', headers });
    if (answer.status === 200) expect(answer.text).toBe('ok\n');
    else expect([headers, refusal(answer)]).toEqual([headers, expect.stringMatching(/^4\d\d /)]);
  }
});

test('headers just under 16 KiB are read', async () => {
  const system = await aSystem();
  const answer = await ask(system, { target: '/healthz', headers: { X: 'x'.repeat(16_000) } });
  expect([answer.status, answer.text]).toEqual([200, 'ok\n']);
});

test('the time to parse a query grows with the number of its names, not with its square', () => {
  // Anyone can send such a request without a key, so it must not be costly.
  const timed = (names: number): number => {
    const search = Array.from({ length: names }, (_, n) => `n${n}`).join('&');
    // Measures CPU time in milliseconds, because other tests run at the same time.
    const runs = [1, 2, 3, 4, 5].map(() => {
      const started = process.cpuUsage();
      expect(Object.keys(queryOf(search))).toHaveLength(names);
      return process.cpuUsage(started).user / 1_000;
    });
    return Math.min(...runs);
  };
  const few = timed(2_000);
  // With 8 times as many names, parsing takes 8 times as long, or 64 times if the time grows with the square. The limit
  // is 32 times, because garbage collections make the times vary.
  expect(timed(16_000)).toBeLessThan(32 * few + 10);
});

test('a refused body is never read as the next request of its connection', async () => {
  const { system, machine } = await startQuietSystem();
  const inner = requestText({ method: 'DELETE', target: `/api/v1${machine}`, key: system.key });
  const refused = requestText({
    method: 'PATCH',
    target: `/api/v1${machine}`,
    headers: { Connection: 'keep-alive', 'Content-Type': 'text/plain' },
    body: inner,
  });
  const answers = await wire(system, refused, requestText({ target: '/healthz' }));
  expect(answers.map(({ status }) => status)).toEqual([401, 200]);
  const large = requestText({
    method: 'PATCH',
    target: `/api/v1${machine}`,
    key: system.key,
    headers: { Connection: 'keep-alive', 'Content-Length': String(2 * mebibyte) },
  });
  expect((await wire(system, large, inner)).map(({ status }) => status)).toEqual([413]);
  expect((await system.call('GET', machine)).body.data.name).toBe('quiet');
});

test('clients that disconnect during headers or a body leave nothing behind', async () => {
  const { system, machine } = await startQuietSystem();
  const target = `/api/v1${machine}`;
  const headers = { 'Content-Type': 'application/json', 'Content-Length': '1000' };
  const starts = [
    'GET /heal',
    `GET ${target} HTTP/1.1\r\nHost: b\r\nAuth`,
    requestText({ method: 'PATCH', target, key: system.key, headers }),
    `${requestText({ method: 'PATCH', target, key: system.key, headers })}{"name":"half`,
    `${requestText({ method: 'PATCH', target, key: system.key, headers: { 'Transfer-Encoding': 'chunked' } })}5\r\n{"na`,
  ];
  const sockets = await Promise.all(
    Array.from({ length: 100 }, async (_, n) => {
      const socket = await dialHttp(system);
      socket.write(starts[n % starts.length] ?? '');
      return socket;
    }),
  );
  await expectAlive(system);
  for (const [n, socket] of sockets.entries()) {
    if (n % 2) socket.resetAndDestroy();
    else socket.end();
  }
  for (const socket of sockets.filter((_, n) => n % 2)) if (!socket.closed) await once(socket, 'close');
  await expectAlive(system);
  expect((await system.call('GET', machine)).body.data.name).toBe('quiet');
  for (const socket of sockets) socket.destroy();
});

// ---- Headers of every answer

test('a valid X-Request-Id is returned in the header and in meta; any other is replaced', async () => {
  const system = await aSystem();
  const sane = ['a', 'A-b_c.1', 'x'.repeat(64), '01234567-89ab-cdef-0123-456789abcdef'];
  for (const id of sane) {
    const good = await system.call('GET', '/machines', { headers: { 'X-Request-Id': id } });
    expect([good.headers.get('x-request-id'), good.body.meta.request_id]).toEqual([id, id]);
    const bad = await system.call('GET', '/nothing', { headers: { 'X-Request-Id': id } });
    expect(bad.headers.get('x-request-id')).toBe(id);
  }
  for (const id of ['', 'x'.repeat(65), 'a b', 'a/b', 'a"b', '<b>', 'a,b', '\u00fc', '{x}']) {
    const { headers, text } = await ask(system, {
      target: '/api/v1/machines',
      key: system.key,
      headers: { 'X-Request-Id': id },
    });
    expect([id, headers.get('x-request-id')]).toEqual([id, expect.stringMatching(requestId)]);
    expect(JSON.parse(text).meta.request_id).toBe(headers.get('x-request-id'));
  }
  const twice =
    'GET /healthz HTTP/1.1\r\nHost: b\r\nConnection: close\r\nX-Request-Id: a\r\nX-Request-Id: b\r\n\r\n';
  const [answer] = await wire(system, twice);
  expect(answer?.headers.get('x-request-id')).toMatch(requestId);
});

test('no answer may be read by another origin, not even after a preflight', async () => {
  const system = await aSystem();
  const origin = {
    Origin: 'https://evil.example',
    'Access-Control-Request-Method': 'DELETE',
    'Access-Control-Request-Headers': 'authorization',
  };
  for (const [method, path, key] of [
    ['OPTIONS', '/api/v1/machines', null],
    ['OPTIONS', '/api/v1/machines', system.key],
    ['OPTIONS', '/docs', null],
    ['GET', '/api/v1/machines', system.key],
    ['GET', '/api/v1/machines', null],
    ['GET', '/api/v1/openapi.json', null],
    ['GET', '/healthz', null],
  ] as const) {
    const { status, headers } = await call(system.url + path, method, { key, headers: origin });
    const cors = [...headers.keys()].filter((name) => name.startsWith('access-control-'));
    expect([method, path, cors]).toEqual([method, path, []]);
    expect(status === 200).toBe(method === 'GET' && (key !== null || path !== '/api/v1/machines'));
    expect(headers.get('x-content-type-options')).toBe('nosniff');
    expect(headers.get('x-powered-by')).toBe(null);
  }
});

test('HEAD answers every GET route with the same status and type, and without a body', async () => {
  const system = await aSystem();
  const { machineId: machine_id } = await system.agent();
  const folder = temporaryFolder('head');
  writeFileSync(join(folder, 'file'), 'x');
  const { id: command_id } = await system.client.commands.create({ machine_id, command: 'true' });
  const { id: batch_id } = await system.client.batches.create({ machine_ids: [machine_id], command: 'true' });
  const { session_id } = await system.client.sessions.create({ machine_id });
  const params = { machine_id, name: 'yearly', command: 'true', cron: '@yearly' };
  const { id: schedule_id } = await system.client.schedules.create(params);
  await system.client.schedules.run({ schedule_id });
  const run_id = (await system.client.schedules.history({ schedule_id })).items[0]?.id ?? '';
  const url = 'https://receiver.invalid/';
  const { id: webhook_id } = await system.client.webhooks.create({ url, events: ['*'] });
  const { id: channel_id } = await system.client.alertChannels.create({ name: 'ops', type: 'slack', url });
  const { id: rule_id } = await system.client.alertRules.create({ name: 'away', kind: 'offline' });
  const { id: window_id } = await system.client.maintenanceWindows.create({
    name: 'now',
    ends_at: new Date(Date.now() + 3_600_000).toISOString(),
  });
  const { id: upgrade_id } = await system.client.upgrades.create({ machine_ids: [machine_id] });
  const { id: saved_command_id } = await system.client.savedCommands.create({ name: 'x', argv: ['true'] });
  const { id: key_id } = await system.client.keys.me();
  const made = { machine_id, command_id, batch_id, session_id, schedule_id, run_id, key_id };
  const values: Record<string, string> = {
    ...{ ...made, webhook_id, channel_id, rule_id, window_id, upgrade_id, saved_command_id },
    file: 'page.js',
  };
  // Leaves out the WebSocket, and packages and single alerts, which may not exist.
  const answering = allRoutes().filter(
    ({ noun, route }) =>
      route.method === 'GET' &&
      route.kind !== 'socket' &&
      noun !== 'packages' &&
      !route.path.includes('{alert_id}'),
  );
  for (const { noun, operation, route } of answering) {
    const path = route.path.replaceAll(/\{(\w+)\}/g, (_, name: string) => values[name] ?? 'x');
    const onFile = ['read', 'readAnywhere', 'download'].includes(operation);
    const received = {
      path: join(folder, onFile ? 'file' : ''),
      ...(operation === 'search' && { name: '*' }),
    };
    const others: Record<string, Record<string, string>> = {
      preview: { cron: '@daily' },
      follow: { topics: 'machines,events' },
    };
    const wanted = noun === 'files' ? received : (others[operation] ?? {});
    const query = `?${new URLSearchParams(wanted).toString()}`;
    // A stream of events does not end by itself.
    const ending = new AbortController();
    const answers = await Promise.all(
      ['GET', 'HEAD'].map((method) =>
        fetch(system.url + route.base + path + query, {
          method,
          headers: { Authorization: `Bearer ${system.key}` },
          ...(method === 'GET' && { signal: ending.signal }),
        }),
      ),
    );
    const [get, head] = answers.map(({ status, headers }) => [
      operation,
      status,
      headers.get('content-type'),
    ]);
    expect(get?.[1]).toBe(200);
    expect(head).toEqual(get);
    expect(await answers[1]?.text()).toBe('');
    ending.abort();
  }
});

// ---- The pages

test('only listed files of the reference page are served, whatever the path', async () => {
  const system = await aSystem();
  for (const target of [
    '/docs/package.json',
    '/docs/index.html',
    '/docs/redoc.standalone.js.map',
    '/docs/main.js',
    '/docs/../package.json',
    '/docs/..%2fpackage.json',
    '/docs/..%2f..%2f..%2f..%2fetc%2fpasswd',
    '/docs/%2e%2e%2fpackage.json',
    '/docs/..%5cpackage.json',
    '/docs/%2fetc%2fpasswd',
    '/docs/page.js%00.css',
    '/docs/page.js/',
    '/docs/page.js%2f',
    '/docs/PAGE.JS',
    '/docs/',
    '/docs/__proto__',
    '/docs//etc/passwd',
  ]) {
    const answer = await ask(system, { target });
    expect([target, refusal(answer)]).toEqual([
      target,
      expect.stringMatching(/^(404 route_not_found|401 unauthorized)$/),
    ]);
    const known = await ask(system, { target, key: system.key });
    expect([target, refusal(known)]).toEqual([target, '404 route_not_found']);
  }
});

test('the reference page loads only the broker’s own files, which need no key', async () => {
  const system = await aSystem();
  const page = await call(`${system.url}/docs`, 'GET');
  expect([page.status, page.headers.get('content-type')]).toEqual([200, 'text/html; charset=utf-8']);
  const policy = page.headers.get('content-security-policy') ?? '';
  expect(policy).toContain("default-src 'none'");
  expect(policy).not.toMatch(/https?:|\*|unsafe-/);
  expect(page.body).not.toMatch(/<script(?![^>]*\ssrc=)[^>]*>|\son\w+=|<iframe|<base/i);
  const nonce = /style-src 'self' 'nonce-([^']{20,})'/.exec(policy)?.[1] ?? '';
  expect([...String(page.body).matchAll(/<style([^>]*)>/g)].map(([, given]) => given)).toEqual([
    ` nonce="${nonce}"`,
  ]);
  const again = await call(`${system.url}/docs`, 'GET');
  expect(again.headers.get('content-security-policy')).not.toBe(policy);
  const links = [...String(page.body).matchAll(/\s(?:src|href)="([^"]*)"/g)].map(([, link = '']) => link);
  expect(links).toEqual(['docs/page.js']);
  const address = new URL('docs/page.js', `${system.url}/docs`);
  const script = await call(address.href, 'GET');
  const [, renderer = ''] = /from '([^']*)'/.exec(script.body) ?? [];
  const library = await call(new URL(renderer, address).href, 'GET');
  for (const { status, headers } of [script, library]) {
    expect([status, headers.get('content-type')]).toEqual([200, 'text/javascript; charset=utf-8']);
  }
  const [, document = ''] = /init\('([^']*)', \{ disableTelemetry: true/.exec(script.body) ?? [];
  const described = await call(new URL(document, `${system.url}/docs`).href, 'GET');
  expect([described.status, described.body.openapi]).toEqual([200, expect.stringMatching(/^3\.1/)]);
});

test('without a console, / redirects a browser to the reference page; programs get 401; a missing icon logs no warning', async () => {
  const system = await startFarhand({ tuning: { console: temporaryFolder('none') } });
  const accept = 'text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8';
  const page = await fetch(`${system.url}/`, { headers: { Accept: accept }, redirect: 'manual' });
  expect([page.status, page.headers.get('location')]).toEqual([302, '/docs']);
  const icon = await call(`${system.url}/favicon.ico`, 'GET');
  expect([refusal(icon), system.log.filter((line) => line.includes('"level":40'))]).toEqual([
    '401 unauthorized',
    [],
  ]);
  for (const Accept of ['*/*', 'application/json'])
    expect(refusal(await call(`${system.url}/`, 'GET', { headers: { Accept } }))).toBe('401 unauthorized');
  expect(refusal(await call(`${system.url}/`, 'GET', { key: system.key }))).toBe('404 route_not_found');
  const posted = await call(`${system.url}/`, 'POST', { headers: { Accept: accept } });
  expect(refusal(posted)).toBe('401 unauthorized');
});

test('/metrics needs a key that may read machines, and paths of unauthenticated requests do not become labels', async () => {
  const system = await startFarhand();
  const url = `${system.url}/metrics`;
  expect(refusal(await call(url, 'GET'))).toBe('401 unauthorized');
  const { key } = await system.keyed(['files:read']);
  expect(refusal(await call(url, 'GET', { key }))).toBe('403 forbidden');
  await call(`${system.url}/a-path-without-a-route`, 'GET');
  await system.call('GET', '/machines/mach_unknown');
  const { key: reader } = await system.keyed(['machines:read']);
  const { status, headers, body } = await call(url, 'GET', { key: reader });
  expect([status, headers.get('content-type')]).toEqual([
    200,
    expect.stringMatching(/^text\/plain; version=/),
  ]);
  expect(body).toContain('farhand_machines{state="online"} 0');
  expect(body).toMatch(/farhand_http_request_seconds_count\{method="GET",route="none",status="401"\} 1/);
  expect(body).not.toMatch(/without-a-route/);
});

// ---- Clients that disconnect, and machines that send invalid answers

/** Starts a request with the system's key. `leave` disconnects its client. */
function askAndLeave(system: TestSystem, method: string, path: string, body?: unknown) {
  const gone = new AbortController();
  const answer = system.call(method, path, { signal: gone.signal, ...(body !== undefined && { body }) });
  // The test may end before the answer, and then this promise rejects.
  answer.catch(() => undefined);
  const leave = async (): Promise<void> => {
    gone.abort();
    await expect(answer).rejects.toThrow();
  };
  return { answer, leave };
}

test.each([
  ['ListFiles', 'GET', 'files?path=/', undefined],
  ['ReadFile', 'GET', 'files/content?path=/x', undefined],
  ['WriteFile', 'PUT', 'files/content', { path: '/x', content: 'y' }],
])('when a client disconnects, %s is cancelled on its machine too', async (name, method, path, body) => {
  const system = await aSystem();
  const agent = await scriptedMachine(system);
  const { leave } = askAndLeave(system, method, `/machines/${agent.identity.machineId}/${path}`, body);
  const { call_id, method: called } = await agent.next('call');
  expect(called).toBe(name);
  await leave();
  expect(await agent.next('cancel')).toEqual({ call_id });
  await expectAlive(system);
});

test.each(['refuses it', 'has begun'])(
  'HEAD of a watch ends when its machine %s, and the connection can be used again',
  async (how) => {
    const system = await aSystem();
    const agent = await scriptedMachine(system);
    const asked = (way: string, more: string): string =>
      `${way} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${system.key}\r\n${more}\r\n`;
    // Uses a socket, because fetch would close the connection after HEAD.
    const socket = await dialHttp(system);
    const received = everything(socket);
    socket.write(asked(`HEAD /api/v1/machines/${agent.identity.machineId}/files/watch?path=/x`, ''));
    socket.write(asked('GET /healthz', 'Connection: close\r\n'));
    const { call_id, method } = await agent.next('call');
    expect(method).toBe('WatchFiles');
    if (how === 'refuses it') {
      agent.send({ reply: { call_id, error: toWire(new AppError('file_not_found', 'no such file')) } });
      expect((await received).match(/HTTP\/1\.1 \d+/g)).toEqual(['HTTP/1.1 404', 'HTTP/1.1 200']);
      return;
    }
    const stream = agent.answer(call_id);
    stream.write({ message: agent.encode('WatchFiles', { path: Buffer.from('/x') }) });
    expect(await statusOf(stream)).toEqual(grpcStatus.CANCELLED);
    expect((await received).match(/HTTP\/1\.1 200/g)).toHaveLength(2);
  },
  // Less than 15 s. After 15 s without data the broker sends a comment on the stream, and this comment would end the
  // test.
  14_000,
);

interface StartedCommand {
  id: string;
  exit(event: object): void;
  leave(): Promise<void>;
}

/** Starts a command on a scripted machine, which reports `event` for it. */
async function startCommand(
  system: TestSystem,
  agent: ScriptedAgent,
  event?: object,
): Promise<StartedCommand> {
  const machine_id = agent.identity.machineId;
  const { leave } = askAndLeave(system, 'POST', '/commands', { machine_id, command: 'x', wait: 50_000 });
  const { id, call_id } = await nextCall(agent, 'StartProcess');
  const report = reporting(agent, call_id);
  if (event) report.send(event);
  return {
    id,
    leave,
    exit(one) {
      report.send({ exit: one });
      report.end();
    },
  };
}

test('a client that disconnects does not cancel its command', async () => {
  const system = await aSystem();
  const agent = await scriptedMachine(system);
  const command = await startCommand(system, agent, { started: { pid: 1, started_at_ms: Date.now() } });
  await command.leave();
  // The broker handles disconnects in order. So a second client starts a file call and disconnects as well: when the
  // broker cancels the file call, it has already handled the disconnect of the first client.
  const file = askAndLeave(system, 'GET', `/machines/${agent.identity.machineId}/files`);
  const { call_id, method } = await agent.next('call');
  expect(method).toBe('ListFiles');
  await file.leave();
  expect(await agent.next('cancel')).toEqual({ call_id });
  command.exit({ outcome: 'PROCESS_OUTCOME_EXITED', started_at_ms: Date.now(), finished_at_ms: Date.now() });
  await waitFor(async () => {
    const { status, exit_code } = (await system.call('GET', `/commands/${command.id}`)).body.data;
    expect([status, exit_code]).toEqual(['completed', 0]);
  });
  // The agent got only an acknowledgement for the command, and no call that cancels it.
  expect((await agent.next('call')).method).toBe('ForgetProcesses');
  agent.control.cancel();
  await expect(agent.next('call')).rejects.toThrow('the stream ended');
  await expect(agent.next('cancel')).rejects.toThrow('the stream ended');
});

const entry = { name: Buffer.from('a'), path: Buffer.from('/a'), size: 1 };

test.each<[string, string, string, unknown, object[]]>([
  ['a file without its entry', 'GET', 'files/content?path=/a', undefined, [{ head: { etag: '"1"' } }]],
  ['a file without its head', 'GET', 'files/content?path=/a', undefined, [{ chunk: Buffer.from('x') }]],
  ['nothing at all', 'GET', 'files/content?path=/a', undefined, []],
  [
    'an ETag that is no header',
    'GET',
    'files/content?path=/a',
    undefined,
    [{ head: { entry, etag: '"1"\r\nX-Evil: 1' } }],
  ],
  [
    'an ETag beyond Latin-1',
    'GET',
    'files/content?path=/a',
    undefined,
    [{ head: { entry, etag: '\u{1f600}' } }],
  ],
  [
    'a time that is no number',
    'GET',
    'files?path=/',
    undefined,
    [{ batch: { entries: [{ ...entry, modified_at_ms: Number.NaN }] } }],
  ],
  [
    'a written file with an ETag that is no header',
    'PUT',
    'files/content',
    { path: '/a', content: '' },
    [{ path: Buffer.from('/a'), etag: 'a\0b' }],
  ],
])(
  'a machine that answers with %s is machine_error, and the broker lives on',
  async (_what, method, path, body, parts) => {
    const system = await aSystem();
    const agent = await scriptedMachine(system);
    const { answer } = askAndLeave(system, method, `/machines/${agent.identity.machineId}/${path}`, body);
    agent.answerWith(await agent.next('call'), ...parts);
    expect(refusal(await answer)).toBe('503 machine_error');
    expect((await answer).headers.get('x-evil')).toBe(null);
    await expectAlive(system);
  },
);

test('a machine with an impossible time in its report breaks no answer', async () => {
  const system = await aSystem();
  const { identity } = await scriptedMachine(system, {
    metrics: { recorded_at_ms: 9e18, memory: {}, disk: {} },
  });
  const status = await system.call('GET', `/machines/${identity.machineId}/status`);
  expect([status.status, status.body.error?.code]).not.toEqual([500, 'internal_error']);
  expect((await system.call('GET', '/machines')).status).toBe(200);
});

/** Resolves when the event log has an event of these types about a command. */
async function logged(system: TestSystem, id: string, types: RegExp): Promise<void> {
  await waitFor(async () => {
    const { items } = await system.client.events.list({ limit: 100 });
    const found = items.filter(({ type, data }) => types.test(type) && data.command_id === id);
    expect(found).toHaveLength(1);
  });
}

const output = { output: { stream: 'OUTPUT_STREAM_STDOUT', offset: 2 ** 62, data: Buffer.from('x') } };

test.each<[string, object | undefined, object]>([
  ['started at a time that no calendar has', undefined, { started_at_ms: 9e18 }],
  ['started before all calendars', undefined, { started_at_ms: -9e18, finished_at_ms: 1 }],
  ['ended at a time that no calendar has', undefined, { started_at_ms: 1, finished_at_ms: 9e18 }],
  [
    'wrote more bytes than there are exact numbers',
    undefined,
    { stdout_bytes: 2 ** 62, stderr_bytes: 2 ** 62 },
  ],
  ['wrote more bytes than a database counts', undefined, { stdout_bytes: 1.8e19 }],
  ['writes on far beyond its end', output, { stdout_bytes: 2 ** 62 + 1 }],
])('a machine that says its command %s spoils no other command', async (_what, event, exit) => {
  const system = await aSystem();
  const agent = await scriptedMachine(system);
  const bad = await startCommand(system, agent, event);
  bad.exit({ outcome: 'PROCESS_OUTCOME_EXITED', ...exit });
  await logged(system, bad.id, /completed|failed/);
  const good = await startCommand(system, agent);
  good.exit({ outcome: 'PROCESS_OUTCOME_EXITED', started_at_ms: 1, finished_at_ms: 2 });
  await logged(system, good.id, /completed|failed/);
  const paths = [`/commands/${good.id}`, '/commands', '/events', `/commands/${bad.id}`];
  const received: unknown[] = [];
  for (const path of paths) received.push([path, (await system.call('GET', path)).status]);
  expect(received).toEqual(paths.map((path) => [path, 200]));
});

test('a machine that reports an impossible start time of a command does not prevent the start of the broker', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const command = await startCommand(system, agent, { started: { pid: 1, started_at_ms: 9e18 } });
  await logged(system, command.id, /started|failed/);
  await system.broker.close();
  const again = await startFarhand({ dataDir: system.dataDir });
  expect((await again.call('GET', '/commands')).status).toBe(200);
});
