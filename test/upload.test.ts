// Uploads over HTTP to a real disk: forms with the path before or after the file, plain bodies, and incomplete uploads.
import { createHash, randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { existsSync, mkdirSync, readdirSync, readFileSync, statSync, writeFileSync } from 'node:fs';
import { request } from 'node:http';
import { connect } from 'node:net';
import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';
import { shared } from './close-after-tests.ts';
import { scriptedMachine } from './scripted-agent.ts';
import { startFarhand, startWithAgent, temporaryFolder } from './start-farhand.ts';

const machine = shared(startWithAgent);

async function onMachine(opened = machine()) {
  const { system, machine_id: machineId } = await opened;
  const folder = temporaryFolder('upload');
  const files = `${system.url}/api/v1/machines/${machineId}/files`;
  const headers = { Authorization: `Bearer ${system.key}` };
  const send = async (
    path: string,
    init: Omit<RequestInit, 'headers'> & { headers?: Record<string, string> },
  ) => {
    const response = await fetch(files + path, { ...init, headers: { ...headers, ...init.headers } });
    // biome-ignore lint/suspicious/noExplicitAny: JSON of any shape
    return { status: response.status, body: (await response.json()) as any };
  };
  return { system, machineId, folder, files, headers, send };
}

/** Makes a form whose parts are in this order. */
function formOf(...parts: [string, string | Buffer][]): FormData {
  const form = new FormData();
  for (const [name, value] of parts) {
    if (typeof value === 'string') form.append(name, value);
    else form.append(name, new Blob([new Uint8Array(value)]), 'name.bin');
  }
  return form;
}

const post = (body: FormData, headers = {}) => ({ method: 'POST', body, headers });

test('a form with missing or unknown fields is refused and writes nothing', async () => {
  const { folder, send } = await onMachine();
  const path = join(folder, 'a');
  const file = Buffer.from('x');
  for (const [form, status] of [
    [formOf(['path', path]), 422],
    [formOf(['file', file]), 422],
    [formOf(['path', path], ['mode', '999'], ['file', file]), 422],
    [formOf(['path', path], ['owner', 'root'], ['file', file]), 422],
    [formOf(['path', path], ['file', file], ['owner', 'root']), 422],
    [formOf(['path', path], ['file', file], ['mode', '8']), 422],
    [formOf(['path', path], ['path', path], ['file', file]), 422],
    [formOf(['path', path], ['file', file], ['file', file]), 422],
    [formOf(['path', path], ['data', file]), 422],
    [formOf(['path', path], ['overwrite', 'maybe'], ['file', file]), 422],
    [formOf(['path', `${folder}/none/a`], ['file', file]), 404],
    [formOf(['path', folder], ['file', file]), 400],
  ] as const) {
    const answer = await send('/upload', post(form));
    expect([[...form.keys()], answer.status]).toEqual([[...form.keys()], status]);
  }
  const json = await send('/upload', {
    method: 'POST',
    body: '{}',
    headers: { 'Content-Type': 'application/json' },
  });
  expect([json.status, json.body.error.code]).toEqual([400, 'invalid_request']);
  const boundless = await send('/upload', {
    method: 'POST',
    body: 'x',
    headers: { 'Content-Type': 'multipart/form-data' },
  });
  expect([boundless.status, boundless.body.error.code]).toEqual([400, 'invalid_request']);
  expect(readdirSync(folder)).toEqual([]);
});

test.each([0.01, 0.5, 0.99, 1])(
  'a form that ends after a share of %f leaves the old content and nothing else',
  async (share) => {
    const { system, machineId, folder } = await onMachine();
    const path = join(folder, 'a');
    writeFileSync(path, 'old');
    const boundary = 'edge';
    const body = Buffer.concat([
      Buffer.from(
        `--${boundary}\r\nContent-Disposition: form-data; name="path"\r\n\r\n${path}\r\n` +
          `--${boundary}\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n`,
      ),
      randomBytes(4_000_000),
      // Only the closing boundary is missing.
      Buffer.from('\r\n'),
    ]);
    const last = `--${boundary}--\r\n`;
    const head = (length: number): string =>
      `POST /api/v1/machines/${machineId}/files/upload HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${system.key}\r\n` +
      `Content-Type: multipart/form-data; boundary=${boundary}\r\nContent-Length: ${length}\r\n\r\n`;
    const { hostname, port } = new URL(system.url);
    const socket = connect(Number(port), hostname);
    // Both requests send only a part of the form. The first declares the length of the whole form, so its connection
    // ends too early. The second declares the length of this part, so only its form is incomplete.
    const short = body.subarray(0, Math.floor(body.length * share));
    for (const announced of [body.length + last.length, short.length]) {
      const one = announced === short.length ? connect(Number(port), hostname) : socket;
      one.on('error', () => undefined);
      one.write(head(announced));
      one.write(short, () => void (announced === short.length || one.end()));
      const answer: Buffer[] = [];
      for await (const chunk of one) {
        answer.push(chunk);
        if (announced === short.length) one.end();
      }
      if (announced === short.length) expect(Buffer.concat(answer).toString()).toContain('400 Bad Request');
    }
    // Another upload succeeds afterwards. The machine may remove leftovers of the incomplete uploads a moment later.
    const after = await system.client.files.put({
      machine_id: machineId,
      path: join(folder, 'b'),
      content: 'b',
    });
    expect(after.size).toBe(1);
    while (readdirSync(folder).length > 2) await new Promise(setImmediate);
    expect(readdirSync(folder).sort()).toEqual(['a', 'b']);
    expect(readFileSync(path, 'utf8')).toBe('old');
  },
);

test('a plain body that ends too early changes nothing', async () => {
  const { system, machineId, folder } = await onMachine();
  const path = join(folder, 'a');
  writeFileSync(path, 'old');
  const upload = request(`${system.url}/api/v1/machines/${machineId}/files/raw?path=${path}`, {
    method: 'PUT',
    headers: { Authorization: `Bearer ${system.key}`, 'Content-Length': '1000000' },
  });
  upload.on('error', () => undefined);
  upload.write(Buffer.alloc(500_000));
  while (readdirSync(folder).length === 1) await new Promise(setImmediate);
  upload.destroy();
  while (readdirSync(folder).length > 1) await new Promise(setImmediate);
  expect(readFileSync(path, 'utf8')).toBe('old');
});

test('an early refusal of the machine is answered while the client still sends', async () => {
  const { system, folder, files, headers } = await onMachine();
  const answer = await fetch(`${files}/raw?path=${folder}`, {
    method: 'PUT',
    headers,
    body: new Uint8Array(32 * 1024 * 1024),
  });
  expect([answer.status, ((await answer.json()) as { error: { code: string } }).error.code]).toEqual([
    400,
    'is_a_directory',
  ]);
  expect((await system.call('GET', '/machines')).status).toBe(200);
});

test('a refused upload with Expect: 100-continue gets no 100 Continue', async () => {
  const { system, machineId, folder } = await onMachine();
  for (const [key, path, status] of [
    ['service_apikey_wrong', join(folder, 'a'), 401],
    [system.key, join(folder, 'a'), 200],
  ] as const) {
    const upload = request(`${system.url}/api/v1/machines/${machineId}/files/raw?path=${path}`, {
      method: 'PUT',
      headers: { Authorization: `Bearer ${key}`, 'Content-Length': '3', Expect: '100-continue' },
    });
    let asked = false;
    upload.on('continue', () => {
      asked = true;
      upload.end('abc');
    });
    upload.flushHeaders();
    const response = await new Promise<import('node:http').IncomingMessage>((resolve) =>
      upload.on('response', resolve),
    );
    response.resume();
    expect([response.statusCode, asked]).toEqual([status, status === 200]);
    upload.destroy();
  }
});

test('a field that must come before the file is refused after it, also if the whole form arrives at once', async () => {
  const { folder, send } = await onMachine();
  const path = join(folder, 'none/a');
  const form = formOf(['path', path], ['file', Buffer.from('x')], ['create_parents', 'true']);
  const answer = await send('/upload', post(form));
  expect([answer.status, answer.body.error.details?.issues]).toEqual([
    422,
    [expect.objectContaining({ path: 'create_parents' })],
  ]);
  expect(readdirSync(folder)).toEqual([]);
});

test('overwrite=false leaves an existing file unchanged, as a field before or after the file', async () => {
  const { folder, send } = await onMachine();
  const path = join(folder, 'a');
  writeFileSync(path, 'old');
  const file = Buffer.from('new');
  for (const form of [
    formOf(['path', path], ['overwrite', 'false'], ['file', file]),
    formOf(['path', path], ['file', file], ['overwrite', 'false']),
    formOf(['file', file], ['path', path], ['overwrite', 'false']),
  ]) {
    const answer = await send('/upload', post(form));
    expect([answer.status, answer.body.error.code]).toEqual([409, 'already_exists']);
  }
  const raw = await send(`/raw?path=${path}&overwrite=false`, { method: 'PUT', body: 'new' });
  expect([raw.status, raw.body.error.code]).toEqual([409, 'already_exists']);
  expect(readFileSync(path, 'utf8')).toBe('old');
  expect(readdirSync(folder)).toEqual(['a']);
});

test('a form is accepted in either order, with its fields anywhere and its path in the query', async () => {
  const { folder, send, system } = await onMachine(startWithAgent());
  const content = randomBytes(3_000_000);
  const sha256 = createHash('sha256').update(content).digest('hex');
  const at = (name: string) => join(folder, name);
  for (const [name, query, form] of [
    ['first', '', formOf(['path', at('first')], ['mode', '0600'], ['file', content])],
    ['last', '', formOf(['file', content], ['path', at('last')], ['mode', '600'])],
    ['split', '', formOf(['path', at('split')], ['file', content], ['mode', '0600'])],
    ['query', `?path=${at('query')}`, formOf(['file', content], ['mode', '0600'])],
  ] as const) {
    const answer = await send(`/upload${query}`, post(form));
    expect([name, answer.status, answer.body.data]).toEqual([
      name,
      201,
      { path: at(name), size: content.length, created: true, sha256 },
    ]);
    expect(readFileSync(at(name)).equals(content)).toBe(true);
    expect(statSync(at(name)).mode & 0o777).toBe(0o600);
  }
  // The broker unlinks a spooled file while it is open, so the directory looks empty.
  expect(readdirSync(join(system.dataDir, 'spool'))).toEqual([]);
  const { items } = await system.client.events.list({ type: 'file.uploaded' });
  expect(items.map(({ data }) => String(data.path)).sort()).toEqual(
    ['first', 'last', 'query', 'split'].map(at).sort(),
  );
});

test('an empty file, and one without a file name, are uploads too', async () => {
  const { folder, send } = await onMachine();
  const empty = await send(
    '/upload',
    post(formOf(['path', join(folder, 'empty')], ['file', Buffer.alloc(0)])),
  );
  expect([empty.status, empty.body.data.size]).toEqual([201, 0]);
  const nameless = await send('/upload', post(formOf(['path', join(folder, 'text')], ['file', 'text'])));
  expect([nameless.status, readFileSync(join(folder, 'text'), 'utf8')]).toEqual([201, 'text']);
  const raw = await send(`/raw?path=${join(folder, 'raw')}`, { method: 'PUT' });
  expect([raw.status, raw.body.data.size]).toEqual([200, 0]);
});

test('a plain body is written whole: mode, parents, If-Match, and a chunked one of unknown length', async () => {
  const { folder, send } = await onMachine();
  const path = join(folder, 'x/y/a');
  const content = randomBytes(5_000_000);
  const stream = new Blob([new Uint8Array(content)]).stream();
  const first = await send(`/raw?path=${path}&create_parents=true&mode=0640`, {
    method: 'PUT',
    body: stream,
    duplex: 'half',
  });
  expect([first.status, first.body.data]).toEqual([
    200,
    { path, size: content.length, created: true, sha256: createHash('sha256').update(content).digest('hex') },
  ]);
  expect(statSync(path).mode & 0o777).toBe(0o640);
  const refused = await send(`/raw?path=${path}`, {
    method: 'PUT',
    body: 'x',
    headers: { 'If-Match': '"other"' },
  });
  expect(refused.status).toBe(412);
  expect(readFileSync(path).equals(content)).toBe(true);
});

test('an upload repeated with the same Idempotency-Key gets the first answer and writes nothing', async () => {
  const { folder, send } = await onMachine();
  const path = join(folder, 'a');
  const again = () =>
    send(`/upload?path=${path}`, post(formOf(['file', Buffer.from('one')]), { 'Idempotency-Key': 'k' }));
  const first = await again();
  writeFileSync(path, 'changed since');
  const second = await again();
  expect(second.body.data).toEqual(first.body.data);
  expect(readFileSync(path, 'utf8')).toBe('changed since');
  const other = await send(
    `/upload?path=${path}-other`,
    post(formOf(['file', Buffer.from('other one')]), { 'Idempotency-Key': 'k' }),
  );
  expect([other.status, other.body.error.code]).toEqual([422, 'idempotency_mismatch']);
});

test('an upload with the Idempotency-Key of an upload with other form fields is refused, and writes nothing', async () => {
  const { folder, send } = await onMachine();
  const [one, two] = [join(folder, 'one'), join(folder, 'two')];
  const file = Buffer.from('content');
  const upload = (path: string, mode: string) =>
    send(
      '/upload',
      post(formOf(['path', path], ['mode', mode], ['file', file]), { 'Idempotency-Key': 'fields' }),
    );
  expect((await upload(one, '0600')).status).toBe(201);
  expect((await upload(one, '0600')).status).toBe(201);
  for (const [path, mode] of [
    [two, '0600'],
    [one, '0644'],
  ] as const) {
    const other = await upload(path, mode);
    expect([other.status, other.body.error?.code]).toEqual([422, 'idempotency_mismatch']);
  }
  expect(existsSync(two)).toBe(false);
  expect(statSync(one).mode & 0o777).toBe(0o600);
});

test('with If-None-Match: * a file that exists is not replaced', async () => {
  const { folder, send } = await onMachine();
  const path = join(folder, 'only-new');
  const headers = { 'If-None-Match': '*' };
  const put = (body: string) => send(`/raw?path=${path}`, { method: 'PUT', body, headers });
  expect((await put('first')).status).toBe(200);
  const second = await put('second');
  expect([second.status, second.body.error?.code]).toEqual([412, 'precondition_failed']);
  const body = JSON.stringify({ path, content: 'third' });
  const json = { ...headers, 'Content-Type': 'application/json' };
  expect((await send('/content', { method: 'PUT', body, headers: json })).status).toBe(412);
  expect(readFileSync(path, 'utf8')).toBe('first');
  const other = { 'If-None-Match': '"an-etag"' };
  expect((await send(`/raw?path=${path}`, { method: 'PUT', body: 'x', headers: other })).status).toBe(400);
});

test('an upload in progress is in no copy, archive, search or watch of its directory', async () => {
  const { system, machineId: machine_id, folder, files, headers } = await onMachine();
  const source = join(folder, 'source');
  mkdirSync(source);
  writeFileSync(join(source, 'a'), 'a');
  const watched = new AbortController();
  const { signal } = watched;
  onTestFinished(() => watched.abort());
  const stream = await system.client.files.watch({ machine_id, path: source }, { signal });
  const changes = stream[Symbol.asyncIterator]();
  await changes.next();
  const upload = request(`${files}/raw?path=${source}/target`, { method: 'PUT', headers });
  upload.write('half of');
  await expect.poll(() => readdirSync(source).filter((name) => name.startsWith('.farhand-'))).toHaveLength(1);
  const to = { source, destination: join(folder, 'copy') };
  await system.client.files.copy({ machine_id, ...to });
  expect(readdirSync(to.destination)).toEqual(['a']);
  const found = [];
  for await (const line of await system.client.files.search({
    machine_id,
    path: source,
    name: '*',
    hidden: 'true',
  }))
    if ('entry' in line) found.push(line.entry.name);
  expect(found).toEqual(['a']);
  const archive = await fetch(`${files}/download?path=${source}&archive=tar`, { headers });
  expect(Buffer.from(await archive.arrayBuffer()).includes('.farhand-')).toBe(false);
  upload.end(' it');
  const [response] = await once(upload, 'response');
  response.resume();
  const { value } = await changes.next();
  expect(value).toMatchObject({ data: { path: join(source, 'target'), kind: 'added' } });
});

test('a slow upload does not count toward the machine’s idle timeout', async () => {
  const system = await startFarhand({ tuning: { link: { callIdleMs: 200 } } });
  const { machineId } = await system.agent();
  const path = join(temporaryFolder('slow'), 'a');
  const upload = request(`${system.url}/api/v1/machines/${machineId}/files/raw?path=${path}`, {
    method: 'PUT',
    headers: { Authorization: `Bearer ${system.key}`, 'Content-Length': '6' },
  });
  const answered = new Promise<number | undefined>((resolve) =>
    upload.on('response', (r) => resolve(r.statusCode)),
  );
  upload.write('abc');
  // Waits until the upload has been idle for longer than the idle timeout: a later call to a machine that does not
  // answer has ended with machine_timeout.
  const silent = await scriptedMachine(system);
  const never = system.client.files.read({ machine_id: silent.identity.machineId, path: '/a' });
  silent.answer((await silent.next('call')).call_id);
  await expect(never).rejects.toMatchObject({ code: 'machine_timeout' });
  upload.end('def');
  expect(await answered).toBe(200);
  expect(readFileSync(path, 'utf8')).toBe('abcdef');
});

test('a machine that never answers a complete upload is machine_timeout', async () => {
  const system = await startFarhand({ tuning: { link: { callIdleMs: 200 } } });
  const agent = await scriptedMachine(system);
  const answer = system.client.files.put({ machine_id: agent.identity.machineId, path: '/a', content: 'x' });
  agent.answer((await agent.next('call')).call_id).resume();
  await expect(answer).rejects.toMatchObject({ code: 'machine_timeout' });
});
