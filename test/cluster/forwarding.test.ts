// HTTP requests about machines of another broker, forwarded over the peer port, from the client to the disk of the
// machine and back.
import { createHash, randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { existsSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { Agent, request } from 'node:http';
import { join } from 'node:path';
import { text } from 'node:stream/consumers';
import { expect, onTestFinished, test, vi } from 'vitest';
import { withBroker } from '../../broker/cli/connect-to-broker.ts';
import { shared } from '../close-after-tests.ts';
import { gate, leapingClock } from '../commands-fixture.ts';
import { temporaryFolder } from '../start-farhand.ts';
import { waitFor } from '../wait-for.ts';
import { startTwoBrokers } from './two-brokers.ts';

const brokers = shared(startTwoBrokers);
const stat = '/files/stat?path=/etc/hostname';

const sha256 = (bytes: Uint8Array): string => createHash('sha256').update(bytes).digest('hex');

/** A request whose body the test sends in pieces, and whose answer it reads in pieces. */
async function plainRequest(
  path: string,
  { method = 'GET', headers = {} }: { method?: string; headers?: Record<string, string | number> },
) {
  const { front, key, machineId } = await brokers();
  const all = { Authorization: `Bearer ${key}`, ...headers };
  return request(`${front.url}/api/v1/machines/${machineId}${path}`, { method, headers: all });
}

// ---- Failures

test('requests for an owner that cannot be reached get 503 with Retry-After 1, until it is back', async () => {
  const { front, call, machineId, throughProxy } = await startTwoBrokers();
  const proxy = throughProxy();
  const get = () => call('GET', `/machines/${machineId}${stat}`);
  expect((await get()).status).toBe(200);
  proxy.forbid();
  for (let n = 0; n < 3; n += 1) {
    const { status, body, headers } = await get();
    expect([status, body.error.code, headers.get('retry-after')]).toEqual([503, 'unavailable', '1']);
  }
  proxy.allow();
  expect((await get()).status).toBe(200);
  const warnings = front.log.filter((line) => line.includes('did not answer at this URL'));
  expect([warnings.length, warnings[0]]).toEqual([1, expect.stringContaining(proxy.address)]);
});

test('requests for an owner that stalls at the TLS handshake get 503 after two seconds', async () => {
  const { call, machineId, throughProxy } = await startTwoBrokers();
  throughProxy().stall();
  const { status, body } = await call('GET', `/machines/${machineId}${stat}`);
  expect([status, body.error.details.retry_after]).toEqual([503, 1]);
});

test('a request and a stream over open connections to an owner that stalls end within 15 seconds', async () => {
  const { call, front, key, machineId, throughProxy } = await startTwoBrokers();
  const proxy = throughProxy();
  const get = () => call('GET', `/machines/${machineId}${stat}`);
  const path = `/api/v1/machines/${machineId}/files/watch?path=/tmp`;
  const stream = await fetch(front.url + path, { headers: { Authorization: `Bearer ${key}` } });
  expect([(await get()).status, stream.status]).toEqual([200, 200]);
  proxy.stall();
  const stalled = performance.now();
  const [{ status, headers }] = await Promise.all([get(), expect(stream.text()).rejects.toThrow()]);
  expect([status, headers.get('retry-after')]).toEqual([503, '1']);
  expect(performance.now() - stalled).toBeLessThan(15_000);
  proxy.resume();
  expect((await get()).status).toBe(200);
});

test('a request is answered although its owner stalls for 10 seconds, the length of a lease', async () => {
  const clock = leapingClock();
  const { call, machineId, owner, throughProxy } = await startTwoBrokers();
  const proxy = throughProxy();
  const { wait, open } = gate();
  const body = { machine_id: machineId, command: wait, wait: 50_000 };
  const waiting = call('POST', '/commands', { body });
  const running = () => owner.client.commands.list({ status: 'running' });
  await waitFor(async () => expect((await running()).items).toHaveLength(1));
  proxy.stall();
  // In the first of these two steps, the front broker begins to check its connection to the owner. The check must last
  // through the second step without failing.
  for (const ms of [5_000, 5_000]) clock.leap(ms);
  proxy.resume();
  open();
  expect((await waiting).body.data).toMatchObject({ status: 'completed' });
});

test('a client gets 503 if the owner is lost before its answer, and is disconnected if that happens during the answer', async () => {
  const { call, front, key, owner, machineId, throughProxy } = await startTwoBrokers();
  const proxy = throughProxy();
  const body = { machine_id: machineId, command: 'sleep 30', wait: 20_000 };
  const waiting = call('POST', '/commands', { body });
  await waitFor(async () =>
    expect((await owner.client.commands.list({ status: 'running' })).items).toHaveLength(1),
  );
  proxy.cut();
  expect((await waiting).status).toBe(503);
  const path = `/api/v1/machines/${machineId}/files/watch?path=/tmp`;
  const stream = await fetch(front.url + path, { headers: { Authorization: `Bearer ${key}` } });
  expect(stream.status).toBe(200);
  proxy.cut();
  await expect(stream.text()).rejects.toThrow();
});

test('a request waits until its machine’s open work is loaded', async () => {
  const { call, owner, key, machineId, loadWork } = await startTwoBrokers();
  const path = `/machines/${machineId}${stat}`;
  const loading = Promise.withResolvers<void>();
  loadWork(loading.promise);
  const waiting = [call('GET', path), owner.call('GET', path, { key })];
  const early = new Promise((resolve) => setTimeout(resolve, 500, 'no answer'));
  expect(await Promise.race([...waiting, early])).toBe('no answer');
  loading.resolve();
  expect((await Promise.all(waiting)).map(({ status }) => status)).toEqual([200, 200]);
});

test('a forwarded request is not forwarded again', async () => {
  const { call, machineId, own } = await startTwoBrokers();
  own((seenBy) => (seenBy === 'front' ? 'owner' : 'front'));
  const { status, body, headers } = await call('GET', `/machines/${machineId}${stat}`);
  expect([status, body.error.code, headers.get('retry-after')]).toEqual([503, 'unavailable', '1']);
  expect(body.error.details).toMatchObject({ machine_id: machineId, broker_id: 'front' });
});

test('the owner refuses what the key is not allowed to do', async () => {
  const { call, reader, machineId } = await brokers();
  for (const [method, path, body] of [
    ['DELETE', `/machines/${machineId}/files?path=/nonexistent`, undefined],
    ['POST', '/commands', { machine_id: machineId, command: 'true' }],
    ['POST', '/commands', '{"machine_id":'],
  ] as const) {
    const answer = await call(method, path, { key: reader, body });
    expect([method, path, answer.status]).toEqual([method, path, 403]);
  }
  expect((await call('GET', `/machines/${machineId}${stat}`, { key: reader })).status).toBe(200);
  expect((await call('GET', `/machines/${machineId}${stat}`, { key: 'fh_wrong' })).status).toBe(401);
});

test('the header that describes a forwarded client is ignored on all other ports', async () => {
  const { call, front, owner, reader, machineId } = await brokers();
  const forged = JSON.stringify({ address: '192.0.2.1', key_id: 'key_local', secure: true });
  const headers = { 'X-Farhand-Client': forged };
  for (const { url } of [front, owner])
    expect((await fetch(`${url}/api/v1/machines/${machineId}${stat}`, { headers })).status).toBe(401);
  const path = `/machines/${machineId}/files?path=/nonexistent`;
  expect((await call('DELETE', path, { key: reader, headers })).status).toBe(403);
});

test('a body that is too large or cannot be parsed is refused with the same code as without other brokers', async () => {
  const { call, machineId } = await brokers();
  const large = JSON.stringify({ path: '/tmp/x', mode: 'x'.repeat(1024 * 1024) });
  const mkdir = await call('POST', `/machines/${machineId}/files/mkdir`, { body: large });
  expect([mkdir.status, mkdir.body.error.code]).toEqual([413, 'payload_too_large']);
  const command = await call('POST', '/commands', { body: large });
  expect([command.status, command.body.error.code]).toEqual([413, 'payload_too_large']);
  const broken = await call('POST', '/commands', { body: `{"machine_id":"${machineId}"` });
  expect([broken.status, broken.body.error.code]).toEqual([400, 'invalid_request']);
});

test('an upload whose client leaves changes nothing on the machine', async () => {
  const folder = temporaryFolder('upload');
  const path = `/files/raw?path=${join(folder, 'file')}`;
  const upload = await plainRequest(path, { method: 'PUT', headers: { 'Content-Length': 4_000_000 } });
  upload.on('error', () => undefined);
  upload.write(randomBytes(1_000_000));
  await waitFor(() => expect(readdirSync(folder)).toHaveLength(1));
  upload.destroy();
  await waitFor(() => expect(readdirSync(folder)).toEqual([]));
});

test('a stream whose client leaves ends at the owner', async () => {
  const { front, key, machineId } = await brokers();
  const folder = temporaryFolder('watch');
  // A machine accepts at most 32 open watches. So all 40 requests succeed only if the watches of the clients that left
  // have ended.
  for (let n = 0; n < 40; n += 1) {
    await waitFor(async () => {
      const left = new AbortController();
      const headers = { Authorization: `Bearer ${key}` };
      const path = `/api/v1/machines/${machineId}/files/watch?path=${folder}`;
      const answer = await fetch(front.url + path, { headers, signal: left.signal });
      left.abort();
      expect(answer.status).toBe(200);
    });
  }
});

test('an upload that the owner refuses early does not break the next request on its connection', async () => {
  const { front, key, machineId } = await brokers();
  const agent = new Agent({ keepAlive: true, maxSockets: 1 });
  onTestFinished(() => agent.destroy());
  const send = (path: string, method: string, length: number) => {
    const headers = { Authorization: `Bearer ${key}`, 'Content-Length': length };
    return request(`${front.url}/api/v1/machines/${machineId}${path}`, { agent, method, headers });
  };
  for (let round = 0; round < 3; round += 1) {
    const upload = send('/files/raw?path=/nonexistent/folder/file', 'PUT', 4_000_000);
    upload.write(randomBytes(1_000_000));
    const [refused] = await once(upload, 'response');
    const { socket } = upload;
    expect([refused.statusCode, await text(refused)]).toEqual([404, expect.stringContaining('not_found')]);
    upload.end(randomBytes(3_000_000));
    const next = send(stat, 'GET', 0);
    next.end();
    const [answer] = await once(next, 'response');
    expect([answer.statusCode, next.socket === socket, await text(answer)]).toEqual([
      200,
      true,
      expect.stringContaining('hostname'),
    ]);
  }
});

test('a client that waits for 100 Continue sends no body that the owner refuses', async () => {
  const refused = await plainRequest('/files/raw?path=/nonexistent/folder/file&overwrite=nonsense', {
    method: 'PUT',
    headers: { 'Content-Length': 10, Expect: '100-continue' },
  });
  refused.flushHeaders();
  const continued = vi.fn();
  refused.once('continue', continued);
  const [answer] = await once(refused, 'response');
  expect([answer.statusCode, continued.mock.calls]).toEqual([400, []]);
  refused.destroy();
});

// ---- What is forwarded

test('an upload of several megabytes and its download are the same bytes, with ranges and conditions', async () => {
  const { front, key, machineId } = await brokers();
  const file = join(temporaryFolder('bytes'), 'file');
  const bytes = randomBytes(9_000_001);
  const at = `${front.url}/api/v1/machines/${machineId}/files`;
  const headers = { Authorization: `Bearer ${key}` };
  const put = await fetch(`${at}/raw?path=${file}`, { method: 'PUT', headers, body: bytes });
  expect(await put.json()).toMatchObject({ data: { size: bytes.length, sha256: sha256(bytes) } });
  expect(sha256(readFileSync(file))).toBe(sha256(bytes));
  const whole = await fetch(`${at}/download?path=${file}`, { headers });
  expect(sha256(new Uint8Array(await whole.arrayBuffer()))).toBe(sha256(bytes));
  expect(whole.headers.get('content-length')).toBe(String(bytes.length));
  const etag = whole.headers.get('etag') ?? '';
  const part = await fetch(`${at}/download?path=${file}`, { headers: { ...headers, Range: 'bytes=5-9' } });
  expect([part.status, part.headers.get('content-range')]).toEqual([206, `bytes 5-9/${bytes.length}`]);
  expect(Buffer.from(await part.arrayBuffer())).toEqual(bytes.subarray(5, 10));
  const same = await fetch(`${at}/download?path=${file}`, { headers: { ...headers, 'If-None-Match': etag } });
  expect([same.status, await same.text()]).toEqual([304, '']);
  const head = await fetch(`${at}/download?path=${file}`, { method: 'HEAD', headers });
  expect([head.status, head.headers.get('etag')]).toEqual([200, etag]);
});

test('a client that waits for 100 Continue gets it once the owner accepts', async () => {
  const file = join(temporaryFolder('continue'), 'file');
  const upload = await plainRequest(`/files/raw?path=${file}`, {
    method: 'PUT',
    headers: { 'Content-Length': 5, Expect: '100-continue' },
  });
  upload.flushHeaders();
  await once(upload, 'continue');
  upload.end('hello');
  const [answer] = await once(upload, 'response');
  expect([answer.statusCode, readFileSync(file, 'utf8')]).toEqual([200, 'hello']);
  answer.resume();
});

test('a body without a length and a form arrive as they are', async () => {
  const { front, key, machineId } = await brokers();
  const folder = temporaryFolder('forms');
  const upload = await plainRequest(`/files/raw?path=${join(folder, 'chunked')}`, { method: 'PUT' });
  upload.write('first ');
  upload.end('second');
  const [answer] = await once(upload, 'response');
  expect([answer.statusCode, readFileSync(join(folder, 'chunked'), 'utf8')]).toEqual([200, 'first second']);
  answer.resume();
  const form = new FormData();
  form.set('path', join(folder, 'form'));
  form.set('file', new Blob(['content']));
  const url = `${front.url}/api/v1/machines/${machineId}/files/upload`;
  const sent = await fetch(url, { method: 'POST', headers: { Authorization: `Bearer ${key}` }, body: form });
  expect([sent.status, readFileSync(join(folder, 'form'), 'utf8')]).toEqual([201, 'content']);
});

test('an event arrives while the stream is open', async () => {
  const { client, machineId } = await brokers();
  const folder = temporaryFolder('events');
  const events = await client.files.watch({ machine_id: machineId, path: folder });
  const seen: string[] = [];
  for await (const { event } of events) {
    seen.push(event);
    if (event === 'ready') writeFileSync(join(folder, 'new'), '');
    else break;
  }
  expect(seen).toEqual(['ready', 'change']);
});

test('a command whose machine is named in the body runs there, once for an Idempotency-Key', async () => {
  const { call, machineId } = await brokers();
  const file = join(temporaryFolder('once'), 'runs');
  const options = {
    body: { machine_id: machineId, command: `echo run >> ${file}; echo done`, wait: 10_000 },
    headers: { 'Idempotency-Key': 'forwarded-once' },
  };
  const first = await call('POST', '/commands', options);
  expect([first.status, first.body.data.status, first.body.data.stdout]).toEqual([
    201,
    'completed',
    'done\n',
  ]);
  const again = await call('POST', '/commands', options);
  expect([again.body.data.id, again.headers.get('idempotency-replayed')]).toEqual([
    first.body.data.id,
    'true',
  ]);
  expect(readFileSync(file, 'utf8')).toBe('run\n');
});

test('a request whose machine is optional is forwarded if the query or the body names a machine', async () => {
  const { call, machineId } = await brokers();
  const file = join(temporaryFolder('implied'), 'file');
  const written = await call('PUT', '/files/content', {
    body: { machine_id: machineId, path: file, content: 'a' },
  });
  expect([written.status, readFileSync(file, 'utf8')]).toEqual([200, 'a']);
  const read = await call('GET', `/files/content?machine_id=${machineId}&path=${file}`);
  expect(read.body.data.content).toBe('a');
  const query = `/files/content?machine_id=${machineId}`;
  expect((await call('PUT', query, { body: { path: file, content: 'b' } })).status).toBe(200);
  expect(readFileSync(file, 'utf8')).toBe('b');
});

test('the owner records the address and request id of the client, and the answer has each header once', async () => {
  const { front, owner, key, machineId } = await brokers();
  const headers = {
    Authorization: `Bearer ${key}`,
    'X-Request-Id': 'asked-by-a-test',
    'Content-Type': 'application/json',
  };
  const path = join(temporaryFolder('audited'), 'made');
  const url = `${front.url}/api/v1/machines/${machineId}/files/mkdir`;
  const answer = await fetch(url, { method: 'POST', headers, body: JSON.stringify({ path }) });
  expect([answer.status, existsSync(path), answer.headers.get('x-request-id')]).toEqual([
    201,
    true,
    'asked-by-a-test',
  ]);
  expect([...answer.headers.keys()].filter((name) => name.startsWith('x-'))).toEqual([
    'x-content-type-options',
    'x-frame-options',
    'x-request-id',
  ]);
  expect(await answer.json()).toMatchObject({ meta: { request_id: 'asked-by-a-test' } });
  await waitFor(async () => {
    const { items } = await owner.client.audit.list({});
    expect(items.find(({ request_id }) => request_id === 'asked-by-a-test')).toMatchObject({
      address: '127.0.0.1',
      action: 'files.mkdir',
      result: 'ok',
    });
  });
});

test('requests over the socket file are forwarded too', async () => {
  const { front, machineId } = await brokers();
  const found = await withBroker({ dataDir: front.dataDir, url: undefined, apiKey: undefined }, (local) =>
    local.files.stat({ machine_id: machineId, path: '/etc' }),
  );
  expect(found.type).toBe('directory');
});

test('small answers reuse one connection', async () => {
  const { call, machineId, throughProxy } = await startTwoBrokers();
  const proxy = throughProxy();
  const get = async () => (await call('GET', `/machines/${machineId}${stat}`)).status;
  expect(await get()).toBe(200);
  proxy.refuse();
  for (let n = 0; n < 20; n += 1) expect(await get()).toBe(200);
});

test('a request with as many headers as one broker accepts is accepted by the owner too', async () => {
  const { front, owner, key, machineId } = await brokers();
  const ask = async ({ url }: { url: string }, length: number): Promise<number> => {
    const many = Object.fromEntries(
      Array.from({ length: 90 }, (_, n) => [`x-header-${n}`, 'x'.repeat(length)]),
    );
    const headers = { ...many, Authorization: `Bearer ${key}` };
    return (await fetch(`${url}/api/v1/machines/${machineId}${stat}`, { headers })).status;
  };
  let longest = 180;
  while ((await ask(owner, longest)) !== 200) longest -= 1;
  expect(longest).toBeGreaterThan(150);
  expect(await ask(front, longest)).toBe(200);
});

test('a page of a list is answered without the owner', async () => {
  const { call, machineId, throughProxy } = await startTwoBrokers();
  throughProxy().forbid();
  expect((await call('GET', `/machines/${machineId}/commands`)).status).not.toBe(503);
  expect((await call('GET', '/events')).status).toBe(200);
});

test('a slow reader gets the whole answer, and other requests do not wait for it', async () => {
  const { machineId, client } = await brokers();
  const file = join(temporaryFolder('slow'), 'file');
  writeFileSync(file, randomBytes(6_000_000));
  const download = await plainRequest(`/files/download?path=${file}`, {});
  download.end();
  const [answer] = await once(download, 'response');
  answer.pause();
  expect((await client.files.stat({ machine_id: machineId, path: file })).size).toBe(6_000_000);
  expect((await text(answer.setEncoding('latin1'))).length).toBe(6_000_000);
});
