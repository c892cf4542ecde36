// Lists, streams and bodies of the SDK: lists return all pages, event streams continue after a cut, and bodies are
// complete.
import { createHash } from 'node:crypto';
import { writeFileSync } from 'node:fs';
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http';
import { join } from 'node:path';
import { Readable } from 'node:stream';
import { expect, test } from 'vitest';
import { Farhand, FarhandError } from '../shared/sdk/index.ts';
import { fakeClock } from './fake-clock.ts';
import { listenOnLoopback } from './listen-on-loopback.ts';
import { startFarhand, startWithAgent, temporaryFolder } from './start-farhand.ts';
import { startProxy } from './tcp-proxy.ts';
import { waitFor } from './wait-for.ts';
import { startWebhookSystem } from './webhook-receivers.ts';

/** Starts a server that answers as the test chooses. Returns a client of this server. */
async function served(answer: (response: ServerResponse, request: IncomingMessage, count: number) => void) {
  let count = 0;
  const server = createServer((request, response) => {
    count += 1;
    answer(response, request, count);
  });
  const baseUrl = `http://127.0.0.1:${await listenOnLoopback(server)}`;
  return { baseUrl, client: new Farhand({ baseUrl, apiKey: 'k' }) };
}

const noAnswer = expect.objectContaining({ code: 'no_answer', status: 0 });

// ---- Bodies

test('an incomplete download rejects, however it is read, and a complete one does not', async () => {
  const { client } = await served((response, _request, count) => {
    response.writeHead(200, { 'Content-Length': 10 });
    if (count === 3) return void response.end('0123456789');
    response.write('01234');
    setTimeout(() => response.destroy(), 5);
  });
  const input = { machine_id: 'mach_x', path: '/x' };
  await expect((await client.files.download(input)).text()).rejects.toEqual(noAnswer);
  const reading = Array.fromAsync((await client.files.download(input)).body!);
  await expect(reading).rejects.toEqual(noAnswer);
  expect(await (await client.files.download(input)).text()).toBe('0123456789');
});

test('a body that ends normally, but before its declared length, also rejects', async () => {
  const short = new Response('0123', { headers: { 'Content-Length': '10' } });
  const client = new Farhand({ baseUrl: 'http://broker', fetch: () => Promise.resolve(short) });
  const response = await client.files.download({ machine_id: 'mach_x', path: '/x' });
  await expect(response.bytes()).rejects.toThrow('no answer from http://broker');
  const packed = new Response('0123', { headers: { 'Content-Length': '10', 'Content-Encoding': 'gzip' } });
  const other = new Farhand({ baseUrl: 'http://broker', fetch: () => Promise.resolve(packed) });
  expect(await (await other.files.download({ machine_id: 'mach_x', path: '/x' })).text()).toBe('0123');
});

test('content is uploaded as a string, bytes, a Blob or a stream, plain and in a form, and downloaded unchanged', async () => {
  const { system, machine_id } = await startWithAgent();
  const { files } = system.client;
  const bytes = Uint8Array.from({ length: 300_000 }, (_, n) => n % 251);
  const sha256 = createHash('sha256').update(bytes).digest('hex');
  const file = join(temporaryFolder('sdk'), 'source');
  writeFileSync(file, bytes);
  const { createReadStream } = await import('node:fs');
  const contents = [
    () => bytes,
    () => new Blob([bytes]),
    () => new Blob([bytes]).stream(),
    () => Readable.toWeb(createReadStream(file)) as ReadableStream<Uint8Array>,
  ];
  const folder = temporaryFolder('sdk');
  for (const [index, content] of contents.entries()) {
    const [plain, form] = [join(folder, `${index}`), join(folder, `${index} ü"form`)];
    expect(await files.put({ machine_id, path: plain, content: content() })).toMatchObject({ sha256 });
    const sent = await files.upload({ machine_id, path: form, mode: '0600', content: content() });
    expect(sent).toMatchObject({ path: form, size: bytes.length, sha256 });
    const got = await (await files.download({ machine_id, path: form })).bytes();
    expect(createHash('sha256').update(got).digest('hex')).toBe(sha256);
  }
  await files.put({ machine_id, path: join(folder, 'text'), content: 'grün' });
  expect((await files.read({ machine_id, path: join(folder, 'text') })).content).toBe('grün');
  const wrong = { machine_id, path: join(folder, 'x'), content: 5 as unknown as string };
  await expect(files.put(wrong)).rejects.toThrow(TypeError);
});

// ---- Lists

test('a list is one page when awaited and all items when iterated, and sends no request before that', async () => {
  const { client, url, key } = await startFarhand();
  for (let n = 0; n < 7; n += 1) await client.keys.create({ name: `k${n}`, scopes: ['files:read'] });
  let asked = 0;
  const counting = new Farhand({
    baseUrl: `${url}/api/v1/`,
    apiKey: key,
    fetch: (...args) => {
      asked += 1;
      return fetch(...args);
    },
  });
  const listing = counting.keys.list({ sort: 'name', limit: 3 });
  expect(asked).toBe(0);
  const page = await listing;
  expect([page.items.length, page.total, page.has_more, asked]).toEqual([3, 8, true, 1]);
  expect((await Array.fromAsync(listing)).map(({ name }) => name)).toEqual([
    ...[0, 1, 2, 3, 4, 5, 6].map((n) => `k${n}`),
    'test',
  ]);
  expect(asked).toBe(4);
  expect((await Array.fromAsync(counting.keys.list({ sort: 'name', offset: 6 }))).length).toBe(2);
  for await (const _ of counting.keys.list({ limit: 2 })) break;
  expect(asked).toBe(6);
  await expect(Array.fromAsync(counting.keys.list({ limit: 101 }))).rejects.toBeInstanceOf(FarhandError);
});

test('items created or removed between two pages cause no other item to be repeated or left out', async () => {
  const { client } = await startFarhand();
  const make = (name: string) => client.keys.create({ name, scopes: ['files:read'] });
  const made = [];
  for (let n = 0; n < 9; n += 1) made.push(await make(`k${n}`));
  const names: string[] = [];
  for await (const { name } of client.keys.list({ limit: 2 })) {
    names.push(name);
    // The list is newest first. New items move the others to later pages, and deleted items move them to earlier pages.
    if (names.length === 2) for (const late of ['new1', 'new2', 'new3']) await make(late);
    if (names.length === 6) for (const key of made.slice(4)) await client.keys.remove({ key_id: key.id });
  }
  const stayed = ['k3', 'k2', 'k1', 'k0', 'test'];
  expect(names.filter((name) => stayed.includes(name))).toEqual(stayed);
  expect(new Set(names).size).toBe(names.length);
});

test('an item without an id is not repeated when it moves to the next page', async () => {
  const { client, agent } = await startFarhand();
  const { machineId: machine_id } = await agent({ tags: 'b,c,d' });
  const seen: string[] = [];
  for await (const { name } of client.tags.list({ limit: 2 })) {
    seen.push(name);
    if (name === 'c') await client.machines.update({ machine_id, tags: ['a', 'b', 'c', 'd'] });
  }
  expect(seen).toEqual(['b', 'c', 'd']);
});

// ---- Events

test('events are parsed by the standard: any line end, split anywhere, comments, data in several lines', async () => {
  const text =
    '\ufeff: hello\r\nid: 1\r\nevent: output\r\ndata: {"a":\r\ndata: "grü\u{1f600}n"}\r\n\r\n' +
    ':\rid:2\revent:output\rdata:{}\r\r' +
    'unknown: x\nretry: 5\nevent: empty\n\ndata\ndata: 7\n\nid: 9\0\nevent: output\ndata: 3\n\n' +
    'event: exit\ndata: {"end":true}\n\nevent: never\ndata: 0';
  const bytes = new TextEncoder().encode(text);
  for (const size of [1, 2, 3, 7, bytes.length]) {
    const pieces = Array.from({ length: Math.ceil(bytes.length / size) }, (_, n) =>
      bytes.subarray(n * size, (n + 1) * size),
    );
    const body = ReadableStream.from(pieces) as ReadableStream<Uint8Array>;
    const client = new Farhand({ baseUrl: 'http://broker', fetch: async () => new Response(body) });
    expect(await Array.fromAsync(client.commands.stream({ command_id: 'cmd_x' }))).toEqual([
      { event: 'output', data: { a: 'grü\u{1f600}n' }, id: '1' },
      { event: 'output', data: {}, id: '2' },
      { event: 'message', data: 7 },
      { event: 'output', data: 3 },
      { event: 'exit', data: { end: true } },
    ]);
  }
});

test('a refused stream rejects, and so does a resume after an event that is no longer stored', async () => {
  const system = await startFarhand();
  await expect(
    Array.fromAsync(system.client.commands.stream({ command_id: 'cmd_none' })),
  ).rejects.toMatchObject({
    code: 'command_not_found',
  });
  await expect(system.client.events.stream({ last_event_id: 'evt_gone' })).rejects.toMatchObject({
    code: 'range_not_satisfiable',
  });
  const { client } = await served((response, _request, count) => {
    if (count > 1)
      return response.writeHead(416).end('{"error":{"code":"range_not_satisfiable","message":"x"}}');
    response.write('id: a\nevent: machine.online\ndata: 1\n\n');
    setTimeout(() => response.destroy(), 5);
  });
  const seen: unknown[] = [];
  const reading = (async () => {
    for await (const event of client.events.stream()) seen.push(event.id);
  })();
  await expect(reading).rejects.toMatchObject({ code: 'range_not_satisfiable' });
  expect(seen).toEqual(['a']);
});

test('with retries: 0, and for a stream that cannot resume, a cut is an error', async () => {
  const { baseUrl } = await served((response) => {
    response.write('id: a\nevent: ready\ndata: 1\n\n');
    setTimeout(() => response.destroy(), 5);
  });
  const still = new Farhand({ baseUrl, retries: 0 });
  await expect(Array.fromAsync(still.events.stream())).rejects.toEqual(noAnswer);
  const watching = new Farhand({ baseUrl }).files.watch({ machine_id: 'mach_x', path: '/x' });
  await expect(Array.fromAsync(watching)).rejects.toEqual(noAnswer);
});

test('events continue after every cut without loss or repeats, also before the first event', async () => {
  const system = await startWebhookSystem();
  const proxy = await startProxy(new URL(system.url).host);
  const client = new Farhand({ baseUrl: `http://${proxy.address}`, apiKey: system.key });
  const gone = new AbortController();
  await system.happen('machine.offline', { n: -1 });
  const stream = await client.events.stream({ types: 'machine.online' }, { signal: gone.signal });
  const seen: unknown[] = [];
  const reading = (async () => {
    for await (const { data } of stream) seen.push(data.data.n);
  })();
  const ended = expect(reading).rejects.toThrow('enough');
  for (let n = 0; n < 6; n += 1) {
    proxy.forbid();
    await system.happen('machine.online', { n });
    proxy.allow();
    await system.happen('machine.online', { n: n + 0.5 });
    await waitFor(() => expect(seen.length).toBe(2 * (n + 1)));
  }
  gone.abort(new Error('enough'));
  await ended;
  expect(seen).toEqual([0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5]);
});

test('a command’s stream continues at the same byte after cuts, and ends with its exit', async () => {
  const { system, machine_id } = await startWithAgent();
  const proxy = await startProxy(new URL(system.url).host);
  const client = new Farhand({ baseUrl: `http://${proxy.address}`, apiKey: system.key });
  const loop =
    'i=0; while [ $i -lt 2000 ]; do i=$((i+1)); echo line $i; [ $((i%400)) -eq 0 ] && sleep 0.1; done; exit 3';
  const { id } = await client.commands.async({ machine_id, command: loop });
  let text = '';
  let last = '';
  let cuts = 0;
  for await (const { event, data } of client.commands.stream({ command_id: id })) {
    last = event;
    if ('data' in data && typeof data.data === 'string') text += data.data;
    if (cuts < 3 && text.length > cuts * 4000) {
      cuts += 1;
      proxy.cut();
    }
  }
  const lines = Array.from({ length: 2000 }, (_, n) => `line ${n + 1}\n`).join('');
  expect([last, text === lines, cuts]).toEqual(['exit', true, 3]);
});

test('a silent stream counts as lost and is reconnected', async () => {
  const clock = fakeClock(1_800_000_000_000);
  const asked: (string | undefined)[] = [];
  const { client } = await served((response, { headers }) => {
    asked.push(headers['last-event-id'] as string | undefined);
    response.writeHead(200);
    response.write('id: a.1\nevent: output\ndata: {}\n\n');
    if (asked.length > 1) response.end('event: exit\ndata: {}\n\n');
  });
  const iterator = client.commands.stream({ command_id: 'cmd_x' })[Symbol.asyncIterator]();
  expect((await iterator.next()).value?.event).toBe('output');
  const next = iterator.next();
  await waitFor(async () => {
    await clock.advance(20_000);
    expect(asked).toEqual([undefined, 'a.1']);
  });
  expect((await next).value?.event).toBe('output');
  expect((await iterator.next()).value?.event).toBe('exit');
  expect((await iterator.next()).done).toBe(true);
});

test('leaving the loop over a stream closes its connection', async () => {
  const closed = Promise.withResolvers<void>();
  const { client } = await served((response) => {
    response.on('close', () => closed.resolve());
    response.write('id: a\nevent: output\ndata: {}\n\n');
  });
  for await (const { id } of client.commands.stream({ command_id: 'cmd_x' })) {
    expect(id).toBe('a');
    break;
  }
  await closed.promise;
});
