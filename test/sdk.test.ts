// The SDK with a real broker and a real agent: requests arrive unchanged, and refusals become errors.
import { readFileSync, writeFileSync } from 'node:fs';
import { createServer } from 'node:http';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { Farhand } from '../shared/sdk/index.ts';
import { refusalOf } from './grpc-fixture.ts';
import { listenOnLoopback } from './listen-on-loopback.ts';
import { scriptedMachine } from './scripted-agent.ts';
import { startFarhand, startWithAgent, type TestSystem, temporaryFolder } from './start-farhand.ts';
import { waitFor } from './wait-for.ts';

/**
 * Starts a server that gives every request the same answer, like a proxy in front of the broker. Returns its address.
 */
async function between(status: number, type: string, body: string): Promise<string> {
  const server = createServer((_request, response) => {
    response.writeHead(status, { 'Content-Type': type, 'X-Request-Id': 'between' }).end(body);
  });
  return `http://127.0.0.1:${await listenOnLoopback(server)}`;
}

function addressOf(request: Parameters<typeof fetch>[0]): string {
  return request instanceof Request ? request.url : request.toString();
}

/** Creates a client that records its requests and the answers. */
function noting(system: TestSystem, baseUrl = system.url) {
  const sent: { method: string; url: string; headers: Headers; body: unknown }[] = [];
  const answers: Response[] = [];
  const client = new Farhand({
    baseUrl,
    apiKey: system.key,
    fetch: async (url, init) => {
      sent.push({
        method: init?.method ?? '',
        url: addressOf(url),
        headers: new Headers(init?.headers),
        body: init?.body,
      });
      const response = await fetch(url, init);
      answers.push(response);
      return response;
    },
  });
  return { client, sent, answers };
}

// ---- Failures

test('a refusal is a FarhandError with the code, status, details and request id of the broker’s answer', async () => {
  const system = await startFarhand();
  const { client, answers } = noting(system);
  const error = await refusalOf(client.machines.get({ machine_id: 'mach_none' }));
  expect(error).toMatchObject({
    name: 'FarhandError',
    code: 'machine_not_found',
    status: 404,
    message: 'no machine has the id mach_none',
    details: { machine_id: 'mach_none' },
  });
  expect(error.requestId).toMatch(/^req_/);
  expect(error.requestId).toBe(answers[0]?.headers.get('x-request-id'));
});

test('every kind of refusal becomes an error: no key, no right, an unknown id, a bad query, a bad body, an offline machine', async () => {
  const system = await startFarhand();
  const away = await system.agent({ name: 'away' });
  await away.close();
  const machine_id = away.machineId;
  const { client: reader } = await system.keyed(['machines:read']);
  const stranger = new Farhand({ baseUrl: system.url });
  const { client } = system;
  const calls: [() => Promise<unknown>, number, string, object][] = [
    [() => stranger.machines.list(), 401, 'unauthorized', {}],
    [() => reader.files.list({ machine_id }), 403, 'forbidden', { required_scope: 'files:read' }],
    [
      () => client.commands.get({ command_id: 'cmd_none' }),
      404,
      'command_not_found',
      { command_id: 'cmd_none' },
    ],
    [() => client.machines.list({ limit: 101 }), 400, 'invalid_request', { issues: [{ path: 'limit' }] }],
    [
      () => client.machines.update({ machine_id, name: '' }),
      422,
      'validation_failed',
      { issues: [{ path: 'name' }] },
    ],
    [() => client.files.list({ machine_id }), 503, 'machine_offline', { machine_id }],
  ];
  for (const [call, status, code, details] of calls) {
    const error = await refusalOf(call());
    expect([error.status, error.code]).toEqual([status, code]);
    expect(error.details).toMatchObject(details);
  }
});

test('an error answer that is not from the broker is a FarhandError with its status, whatever its body', async () => {
  for (const [status, type, body] of [
    [502, 'text/html', '<h1>Bad Gateway</h1>'],
    [503, 'application/json', '{"message":"no broker here"}'],
    [504, 'application/json', 'null'],
    [429, 'application/json', '{"error":"too many"}'],
    [500, 'text/plain', ''],
  ] as const) {
    const client = new Farhand({ baseUrl: await between(status, type, body), apiKey: 'x', retries: 0 });
    const error = await refusalOf(client.machines.list());
    expect([error.status, error.requestId, error.code]).toEqual([status, 'between', 'no_answer']);
    const message = `an answer with status ${status} did not come from the broker: check the address and any proxy in between`;
    expect([body, error.message, error.details]).toEqual([body, message, {}]);
  }
});

test('a success answer that is not from the broker is a FarhandError as well, never an empty result', async () => {
  for (const [type, body] of [
    ['text/html', '<h1>Please log in</h1>'],
    ['application/json', '{"ok":true}'],
    ['application/json', 'null'],
  ] as const) {
    const client = new Farhand({ baseUrl: await between(200, type, body), apiKey: 'x' });
    const error = await refusalOf(client.machines.get({ machine_id: 'mach_x' }));
    expect([body, error.status, error.requestId]).toEqual([body, 200, 'between']);
  }
});

test('the error of an unreachable broker names its origin, with the error of fetch as its cause', async () => {
  const system = await startFarhand();
  await system.broker.close();
  const error = await refusalOf(system.client.machines.list());
  expect(error).toMatchObject({ status: 0, code: 'no_answer', requestId: '', cause: expect.any(TypeError) });
  expect(error.message).toBe(`no answer from ${system.url}: ECONNREFUSED`);
});

test('an id stays one segment of a path, whatever characters it has', async () => {
  const system = await startFarhand();
  await system.agent();
  const { client, sent } = noting(system);
  const ids = ['a/b', '../keys', 'a?b=c', 'a#b', 'a%2Fb', 'a b', 'ü', '__proto__', '; rm', '\\..\\..'];
  for (const machine_id of ids) {
    const error = await refusalOf(client.machines.status({ machine_id }));
    expect([machine_id, error.code, error.details]).toEqual([
      machine_id,
      'machine_not_found',
      { machine_id },
    ]);
  }
  expect(sent.every(({ url }) => new URL(url).pathname.split('/').length === 6)).toBe(true);
});

test.each(['.', '..', ''])('an id of "%s" is refused, and calls no other route', async (machine_id) => {
  const system = await startFarhand();
  const { client, sent } = noting(system);
  const calls = [
    () => client.machines.get({ machine_id }),
    () => client.machines.remove({ machine_id }),
    () => client.files.list({ machine_id }),
    () => client.files.write({ machine_id, path: '/x', content: '' }),
  ];
  for (const call of calls) await expect(call()).rejects.toThrow();
  // URL() removes a path segment `.` or `..`, so the request would reach another route.
  const paths = sent.map(({ url }) => new URL(url).pathname);
  expect(paths.filter((path) => !path.startsWith('/api/v1/machines/'))).toEqual([]);
});

test('a call whose signal has already fired sends nothing, and one whose signal fires later is aborted', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const { machineId: machine_id } = agent.identity;
  const before = AbortSignal.abort();
  await expect(
    system.client.keys.create({ name: 'x', scopes: ['admin'] }, { signal: before }),
  ).rejects.toThrow(/abort/i);
  expect((await system.client.keys.list()).items.map(({ name }) => name)).toEqual(['test']);
  const gone = new AbortController();
  const listing = system.client.files.list({ machine_id }, { signal: gone.signal });
  const { call_id } = await agent.next('call');
  gone.abort();
  await expect(listing).rejects.toMatchObject({ name: 'AbortError' });
  expect(await agent.next('cancel')).toEqual({ call_id });
  expect((await system.client.machines.list()).total).toBe(1);
});

// ---- Successful calls

test('machines are listed, read, changed and removed', async () => {
  const system = await startFarhand();
  const { client } = system;
  const [one, two] = [await system.agent({ name: 'one', tags: 'a' }), await system.agent({ name: 'two' })];
  const list = await client.machines.list({ sort: 'name', limit: 1 });
  expect(list).toMatchObject({ total: 2, limit: 1, offset: 0, has_more: true });
  expect(list.items.map(({ id, name, status }) => [id, name, status])).toEqual([
    [one.machineId, 'one', 'online'],
  ]);
  const rest = await client.machines.list({ sort: 'name', limit: 1, offset: 1 });
  expect([rest.items[0]?.name, rest.offset, rest.has_more]).toEqual(['two', 1, false]);
  expect((await client.machines.list({ tags: 'a', search: 'ON', status: 'online' })).total).toBe(1);
  const machine_id = two.machineId;
  expect(await client.machines.get({ machine_id })).toMatchObject({ id: machine_id, ip: '127.0.0.1' });
  const status = await client.machines.status({ machine_id });
  expect([status.connected, status.memory.used + status.memory.free]).toEqual([true, status.memory.total]);
  expect(await client.machines.update({ machine_id, tags: ['b'] })).toMatchObject({
    name: 'two',
    tags: ['b'],
  });
  expect(await client.machines.remove({ machine_id })).toEqual({ deleted: true });
  await expect(two.ended).rejects.toThrow();
  expect((await refusalOf(client.machines.get({ machine_id }))).code).toBe('machine_not_found');
});

test('files are written, listed and read back to the byte', async () => {
  const { system, machine_id } = await startWithAgent();
  const { files } = system.client;
  const folder = temporaryFolder('sdk');
  const path = join(folder, 'naïve & 100% #1?.txt');
  const text = 'zwölf\r\n\u{1f600}\0';
  expect(await files.write({ machine_id, path, content: text, mode: '0600' })).toEqual({
    path,
    size: Buffer.byteLength(text),
    created: true,
  });
  expect(readFileSync(path, 'utf8')).toBe(text);
  expect(await files.read({ machine_id, path })).toEqual({
    path,
    content: text,
    size: Buffer.byteLength(text),
    encoding: 'utf-8',
  });
  const bytes = Buffer.from([0, 255, 128, 10]);
  const content = bytes.toString('base64');
  const binary = {
    machine_id,
    path: join(folder, 'a/b'),
    content,
    encoding: 'base64',
    create_parents: true,
  } as const;
  expect((await files.write(binary)).created).toBe(true);
  expect(readFileSync(binary.path)).toEqual(bytes);
  expect(await files.read({ machine_id, path: binary.path })).toMatchObject({
    content,
    encoding: 'base64',
    size: 4,
  });
  const part = await files.read({ machine_id, path, offset: -1, length: 1, encoding: 'base64' });
  expect(part.content).toBe('AA==');
  const listed = await files.list({ machine_id, path: folder });
  expect(listed.files.map(({ name, type, size }) => [name, type, size])).toEqual([
    ['a', 'directory', undefined],
    ['naïve & 100% #1?.txt', 'file', Buffer.byteLength(text)],
  ]);
  expect((await refusalOf(files.read({ machine_id, path: folder }))).code).toBe('is_a_directory');
});

test('commands run, are listed and read, and are cancelled', async () => {
  const { system, machine_id } = await startWithAgent();
  const { commands } = system.client;
  const done = await commands.create({ machine_id, command: 'echo out; echo err >&2; exit 3' });
  expect(done).toMatchObject({ status: 'failed', exit_code: 3, stdout: 'out\n', stderr: 'err\n' });
  const plain = await commands.create({
    machine_id,
    command: 'printenv',
    args: ['WORD'],
    env: { WORD: 'two words; $(x)' },
  });
  expect([plain.exit_code, plain.stdout]).toEqual([0, 'two words; $(x)\n']);
  const fed = await commands.create({ machine_id, command: 'cat', stdin: 'fed\u{1f600}' });
  expect(fed.stdout).toBe('fed\u{1f600}');
  const started = await commands.create({ machine_id, command: 'sleep 600', wait: 0 });
  expect(['queued', 'running']).toContain(started.status);
  const cancelled = await commands.cancel({ command_id: started.id });
  expect([cancelled.id, cancelled.status]).toEqual([started.id, 'cancelled']);
  expect(await commands.get({ command_id: done.id })).toEqual(done);
  const failed = await commands.list({ machine_id, status: 'failed' });
  expect([failed.total, failed.items]).toEqual([1, [done]]);
});

test('booleans, numbers and Dates are sent in a query as the broker reads them, and undefined values are left out', async () => {
  const { system, machine_id } = await startWithAgent();
  const folder = temporaryFolder('sdk');
  for (const name of ['.hidden', 'seen']) writeFileSync(join(folder, name), '');
  const names = async (hidden?: boolean): Promise<string[]> =>
    (
      await client.files.list({ machine_id, path: folder, ...(hidden !== undefined && { hidden }) })
    ).files.map(({ name }) => name);
  const { client, sent } = noting(system);
  expect([await names(true), await names(false), await names()]).toEqual([
    ['.hidden', 'seen'],
    ['seen'],
    ['seen'],
  ]);
  const [since, until] = [new Date('2026-01-01T00:00:00.000Z'), new Date('2026-01-02T00:00:00.000Z')];
  expect(await client.machines.metrics({ machine_id, since, until, step: 600 })).toEqual({
    since: since.toISOString(),
    until: until.toISOString(),
    step: 600,
    points: [],
  });
  expect((await client.events.list({ since: new Date(Date.now() + 86_400_000) })).items).toEqual([]);
  expect((await client.events.list({ since, type: 'machine.registered' })).total).toBe(1);
  expect((await client.machines.list({ limit: 7, offset: 3 })).limit).toBe(7);
  // A caller without TypeScript can pass `undefined`.
  const loose = { limit: undefined, search: undefined } as unknown as { limit: number };
  expect((await client.machines.list(loose)).limit).toBe(20);
  expect(sent.map(({ url }) => new URL(url).search).filter((search) => search.includes('undefined'))).toEqual(
    [],
  );
});

test('a Date in a body is sent as a timestamp', async () => {
  const { client } = await startFarhand();
  const expires_at = new Date(Date.now() + 60_000);
  const made = await client.keys.create({
    name: 'soon',
    scopes: ['files:read'],
    expires_at: expires_at.toISOString(),
  });
  expect(made.expires_at).toBe(expires_at.toISOString());
  const loose = { name: 'soon', scopes: ['files:read'], expires_at } as unknown as Parameters<
    typeof client.keys.create
  >[0];
  expect((await client.keys.create(loose)).expires_at).toBe(expires_at.toISOString());
});

test('if_match is sent as If-Match, and not in the body: a file is replaced only if it is unchanged', async () => {
  const { system, machine_id } = await startWithAgent();
  const { client, sent, answers } = noting(system);
  const path = join(temporaryFolder('sdk'), 'file');
  const none = await refusalOf(client.files.write({ machine_id, path, content: 'a', if_match: '*' }));
  expect([none.status, none.code]).toEqual([412, 'precondition_failed']);
  await client.files.write({ machine_id, path, content: 'a' });
  await client.files.read({ machine_id, path });
  const etag = answers.at(-1)?.headers.get('etag') ?? '';
  await client.files.write({ machine_id, path, content: 'b', if_match: etag });
  const again = await refusalOf(client.files.write({ machine_id, path, content: 'c', if_match: etag }));
  expect([again.status, again.code]).toEqual([412, 'precondition_failed']);
  expect(readFileSync(path, 'utf8')).toBe('b');
  const { headers, body } = sent.at(-1) ?? {};
  expect([headers?.get('if-match'), JSON.parse(String(body))]).toEqual([etag, { path, content: 'c' }]);
});

test('a call repeated with the same idempotencyKey gets the first answer, and nothing runs twice', async () => {
  const { system, machine_id } = await startWithAgent();
  const { client, sent } = noting(system);
  const file = join(temporaryFolder('sdk'), 'runs');
  const command = { machine_id, command: `echo ran >> ${file}` };
  const settings = { idempotencyKey: 'once-1' };
  const first = await client.commands.create(command, settings);
  expect(await client.commands.create(command, settings)).toEqual(first);
  expect([readFileSync(file, 'utf8'), (await client.commands.list()).total]).toEqual(['ran\n', 1]);
  expect(sent[1]?.headers.get('idempotency-key')).toBe('once-1');
  const other = await refusalOf(client.commands.create({ ...command, wait: 1 }, settings));
  expect([other.status, other.code]).toEqual([422, 'idempotency_mismatch']);
  const key = { name: 'made once', scopes: ['files:read' as const] };
  const made = await client.keys.create(key, { idempotencyKey: 'once-2' });
  const repeat = await refusalOf(client.keys.create(key, { idempotencyKey: 'once-2' }));
  expect([repeat.status, repeat.code, repeat.details]).toEqual([409, 'conflict', { id: made.id }]);
  const bad = await refusalOf(client.keys.create(key, { idempotencyKey: 'x'.repeat(256) }));
  expect(bad.code).toBe('invalid_request');
});

test('keys and join tokens are created, listed and revoked, and a key returns its identity', async () => {
  const { client, url } = await startFarhand();
  const made = await client.keys.create({ name: 'reader', scopes: ['machines:read'] });
  const reader = new Farhand({ baseUrl: url, apiKey: made.key });
  expect(await reader.keys.me()).toMatchObject({ id: made.id, name: 'reader', scopes: ['machines:read'] });
  expect((await client.keys.list({ sort: 'name' })).items.map(({ name }) => name)).toEqual([
    'reader',
    'test',
  ]);
  expect(await client.keys.remove({ key_id: made.id })).toEqual({
    deleted: true,
    schedules: [],
    webhooks: [],
    alert_channels: [],
    saved_commands: [],
  });
  expect((await refusalOf(reader.keys.me())).status).toBe(401);
  const { id, token, uses_left } = await client.joinTokens.create({});
  expect([token.length > 40, uses_left]).toEqual([true, 1]);
  expect((await client.joinTokens.list()).items.map((item) => item.id)).toEqual([id]);
  expect(await client.joinTokens.remove({ join_token_id: id })).toEqual({ deleted: true });
  expect((await client.joinTokens.list()).total).toBe(0);
});

test('routes without a JSON envelope return their text', async () => {
  const { client, grpc } = await startFarhand();
  expect(await client.service.healthz()).toBe('ok\n');
  expect(await client.service.readyz()).toBe('ready\n');
  expect(JSON.parse(await client.service.openapi()).openapi).toMatch(/^3\.1/);
  expect(await client.service.prometheus()).toContain('farhand_machines');
  expect(await client.service.docsFile({ file: 'page.js' })).toContain('openapi.json');
  expect((await client.service.info()).grpc_address).toBe(grpc);
});

test('a base URL may end in a slash or have a path of its own', async () => {
  const system = await startFarhand();
  const slashed = noting(system, `${system.url}/`);
  expect((await slashed.client.machines.list()).total).toBe(0);
  const asked: string[] = [];
  const proxied = new Farhand({
    baseUrl: 'https://example.org/farhand/',
    fetch: async (url) => {
      asked.push(addressOf(url));
      return Response.json({ data: [], meta: { total: 0, limit: 20, offset: 0, has_more: false } });
    },
  });
  await proxied.machines.list({ search: 'a&b=c d' });
  await proxied.service.healthz();
  expect(asked).toEqual([
    'https://example.org/farhand/api/v1/machines?search=a%26b%3Dc+d',
    'https://example.org/farhand/healthz',
  ]);
});

test('many calls at once do not mix up their answers', async () => {
  const { system, machine_id } = await startWithAgent();
  const folder = temporaryFolder('sdk');
  const numbers = Array.from({ length: 24 }, (_, n) => n);
  await Promise.all(
    numbers.map((n) =>
      system.client.files.write({ machine_id, path: join(folder, `${n}`), content: `${n}` }),
    ),
  );
  const read = await Promise.all(
    numbers.map((n) => system.client.files.read({ machine_id, path: join(folder, `${n}`) })),
  );
  expect(read.map(({ content }) => content)).toEqual(numbers.map(String));
  await waitFor(async () => expect((await system.client.machines.list()).items[0]?.status).toBe('online'));
});
