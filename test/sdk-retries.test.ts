// Retries of the SDK, with a server that counts requests and gives scripted answers.
import { readFileSync } from 'node:fs';
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http';
import { join } from 'node:path';
import { beforeEach, expect, onTestFinished, test, vi } from 'vitest';
import { Farhand } from '../shared/sdk/index.ts';
import { refusalOf } from './grpc-fixture.ts';
import { listenOnLoopback } from './listen-on-loopback.ts';
import { startFarhand, startWithAgent, temporaryFolder } from './start-farhand.ts';
import { startProxy } from './tcp-proxy.ts';
import { waitFor } from './wait-for.ts';

type Answer = (response: ServerResponse) => void;

const done = { data: {}, meta: {} };
const refuse =
  (status: number, code: string, details = {}): Answer =>
  (response) =>
    response.writeHead(status).end(JSON.stringify({ error: { code, message: 'no', details } }));
const cut: Answer = (response) => void response.destroy();
/** Sends the beginning of a body, then cuts the connection. */
const half: Answer = (response) => {
  response.writeHead(200, { 'Content-Length': 100 }).write('{"data":');
  setImmediate(() => response.destroy());
};
const proxyError: Answer = (response) => response.writeHead(502).end('<h1>Bad Gateway</h1>');

/** A server that gives these answers and then succeeds. It records its requests. */
async function scripted(...answers: Answer[]) {
  const came: { method: string; url: string; key: string; body: string }[] = [];
  const server = createServer((request: IncomingMessage, response) => {
    let body = '';
    request.on('data', (chunk) => {
      body += String(chunk);
    });
    request.on('error', () => {});
    request.on('end', () => {
      const { method = '', url = '', headers } = request;
      came.push({ method, url, key: String(headers['idempotency-key'] ?? ''), body });
      (answers.shift() ?? ((good) => good.end(JSON.stringify(done))))(response);
    });
  });
  const baseUrl = `http://127.0.0.1:${await listenOnLoopback(server)}`;
  return { came, baseUrl, client: new Farhand({ baseUrl, apiKey: 'k' }) };
}

const machine_id = 'mach_x';
type Calls = Record<string, (client: Farhand) => Promise<unknown>>;
const calls: Calls = {
  get: (client) => client.machines.get({ machine_id }),
  put: (client) => client.files.write({ machine_id, path: '/x', content: 'c' }),
  guarded: (client) => client.files.write({ machine_id, path: '/x', content: 'c', if_match: '"e"' }),
  created: (client) => client.files.write({ machine_id, path: '/x', content: 'c', if_none_match: '*' }),
  kept: (client) => client.files.put({ machine_id, path: '/x', content: 'c', overwrite: false }),
  patch: (client) => client.machines.update({ machine_id, name: 'n' }),
  remove: (client) => client.machines.remove({ machine_id }),
  run: (client) => client.commands.create({ machine_id, command: 'true' }),
  input: (client) => client.commands.input({ command_id: 'cmd_x', data: 'x' }),
};

beforeEach(() => {
  // Makes the random delays before retries zero.
  vi.spyOn(Math, 'random').mockReturnValue(0);
  onTestFinished(() => void vi.restoreAllMocks());
});

// ---- The table of docs/sdk.md: which calls are retried after which answers

test.each([
  ['a cut connection', cut, ['get', 'put', 'run']],
  ['half an answer', half, ['get', 'put', 'run']],
  ['a proxy without a broker', proxyError, ['get', 'put', 'run']],
  ['429', refuse(429, 'rate_limited'), Object.keys(calls)],
  [
    'unavailable',
    refuse(503, 'unavailable'),
    ['get', 'put', 'guarded', 'created', 'kept', 'patch', 'remove', 'run'],
  ],
  ['a conflict with its first attempt', refuse(409, 'conflict', { under_way: true }), ['get', 'put', 'run']],
  ['another conflict', refuse(409, 'conflict'), []],
  ['machine_offline', refuse(503, 'machine_offline'), []],
  ['machine_timeout', refuse(503, 'machine_timeout'), []],
  ['internal_error', refuse(500, 'internal_error'), []],
  ['a refusal', refuse(404, 'machine_not_found'), []],
])('after %s exactly the calls are sent again that docs/sdk.md allows', async (_what, answer, again) => {
  const repeated: string[] = [];
  for (const [name, call] of Object.entries(calls)) {
    const { came, client } = await scripted(answer);
    const ended = await call(client).then(
      () => true,
      () => false,
    );
    if (came.length > 1) repeated.push(name);
    expect([name, ended, came.length]).toEqual([name, came.length === 2, again.includes(name) ? 2 : 1]);
  }
  expect(repeated).toEqual(again);
});

test('every call to an unreachable broker is retried, because nothing was sent', async () => {
  const system = await startFarhand();
  await system.broker.close();
  for (const [name, call] of Object.entries(calls)) {
    let asked = 0;
    const counting: typeof fetch = (...args) => {
      asked += 1;
      return fetch(...args);
    };
    const error = await refusalOf(call(new Farhand({ baseUrl: system.url, apiKey: 'k', fetch: counting })));
    expect([name, error.code, asked]).toEqual([name, 'no_answer', 3]);
  }
});

test('a call is retried twice, or `retries` times; with 0 it is sent once and has no idempotency key', async () => {
  const always = Array.from({ length: 9 }, () => cut);
  const two = await scripted(...always);
  expect((await refusalOf(two.client.machines.list())).code).toBe('no_answer');
  expect(two.came.length).toBe(3);
  const { came, baseUrl } = await scripted(...always);
  await refusalOf(new Farhand({ baseUrl, retries: 4 }).machines.list());
  expect(came.length).toBe(5);
  const none = await scripted(cut);
  await refusalOf(calls.run!(new Farhand({ baseUrl: none.baseUrl, retries: 0 })));
  expect(none.came.map(({ key }) => key)).toEqual(['']);
});

test('all attempts of a POST have the same idempotency key, other calls have other keys, and a given key is used', async () => {
  const { came, client } = await scripted(cut, cut);
  await calls.run!(client);
  await calls.run!(client);
  await client.commands.create({ machine_id, command: 'true' }, { idempotencyKey: 'mine' });
  const keys = came.map(({ key }) => key);
  expect(keys[0]).toMatch(/^[0-9a-f]{32}$/);
  expect([keys[1], keys[2], keys[4]]).toEqual([keys[0], keys[0], 'mine']);
  expect(keys[3]).not.toBe(keys[0]);
  expect(new Set(came.map(({ body }) => body)).size).toBe(1);
});

test('a retry waits for the time in Retry-After; if that is more than a minute, the call rejects', async () => {
  const later = (seconds: string): Answer => {
    return (response) => {
      response.setHeader('Retry-After', seconds);
      refuse(429, 'rate_limited')(response);
    };
  };
  const date = new Date(Date.now() + 3_600_000).toUTCString();
  const dated = await refusalOf((await scripted(later(date))).client.machines.list());
  expect(dated.retryAfter).toBeGreaterThan(3_500_000);
  const { came, client } = await scripted(later('1'), later('61'));
  const started = performance.now();
  const error = await refusalOf(client.machines.list());
  expect([came.length, error.retryAfter]).toEqual([2, 61_000]);
  expect(performance.now() - started).toBeGreaterThan(990);
});

test('an aborted signal ends the wait for a retry at once', async () => {
  const { came, client } = await scripted((response) => {
    response.setHeader('Retry-After', '50');
    refuse(429, 'rate_limited')(response);
  });
  const gone = new AbortController();
  const call = client.machines.list({}, { signal: gone.signal });
  const ended = expect(call).rejects.toThrow('enough');
  await waitFor(() => expect(came.length).toBe(1));
  gone.abort(new Error('enough'));
  await ended;
});

test('a call with a stream as its content is not retried', async () => {
  const { came, client } = await scripted(refuse(429, 'rate_limited'));
  const content = new Blob(['once']).stream();
  const error = await refusalOf(client.files.put({ machine_id, path: '/x', content }));
  expect([error.code, came.length, came[0]?.body]).toEqual(['rate_limited', 1, 'once']);
  const again = await scripted(refuse(429, 'rate_limited'));
  await again.client.files.put({ machine_id, path: '/x', content: new Blob(['twice']) });
  expect(again.came.map(({ body }) => body)).toEqual(['twice', 'twice']);
});

test('a command whose answer is lost runs once, and the retry returns it', async () => {
  const { system, machine_id } = await startWithAgent();
  const proxy = await startProxy(new URL(system.url).host);
  const file = join(temporaryFolder('sdk'), 'runs');
  let asked = 0;
  const client = new Farhand({
    baseUrl: `http://${proxy.address}`,
    apiKey: system.key,
    fetch: async (...args) => {
      asked += 1;
      const answer = fetch(...args);
      if (asked > 1) return answer;
      // Waits until the command has run. Its answer is still held back.
      await waitFor(() => expect(readFileSync(file, 'utf8')).toBe('ran\n'));
      proxy.cut();
      return answer;
    },
  });
  const command = `echo ran >> ${file}; sleep 1; echo said`;
  const { id } = await client.commands.create({ machine_id, command });
  expect((await system.client.commands.list()).items.map((one) => one.id)).toEqual([id]);
  await expect.poll(async () => (await client.commands.get({ command_id: id })).stdout).toBe('said\n');
  expect([readFileSync(file, 'utf8'), asked > 1]).toEqual(['ran\n', true]);
});

test('no message contains a key, a password or a path, and an address only as its origin', async () => {
  for (const apiKey of ['service_apikey_secret\n', 'service_apikey_secret x', 'sécret']) {
    expect(() => new Farhand({ baseUrl: 'http://x', apiKey })).toThrow(/^apiKey must be visible ASCII/);
  }
  for (const baseUrl of ['https://me:hidden@example.org', 'ftp://example.org', 'example.org', '']) {
    expect(() => new Farhand({ baseUrl })).toThrow(/^baseUrl must be an http or https URL/);
  }
  const client = new Farhand({
    baseUrl: 'http://127.0.0.1:1/path/',
    apiKey: 'service_apikey_secret',
    retries: 0,
  });
  const error = await refusalOf(client.machines.get({ machine_id: 'mach_1' }));
  expect(error.message).toMatch(/^no answer from http:\/\/127\.0\.0\.1:1: [\w ]+$/);
  expect(JSON.stringify([error, error.stack])).not.toContain('secret');
});
