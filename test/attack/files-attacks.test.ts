// Attacks on the file API over HTTP. Each of them succeeded in an earlier version, and must be refused now.
import { mkdirSync, readdirSync, readFileSync, symlinkSync, writeFileSync } from 'node:fs';
import { connect } from 'node:net';
import { homedir } from 'node:os';
import { join } from 'node:path';
import { setImmediate as turn } from 'node:timers/promises';
import { expect, onTestFinished, test, vi } from 'vitest';
import type { Scope } from '../../shared/api/route.ts';
import { scriptedMachine } from '../scripted-agent.ts';
import { startFarhand, type TestSystem, temporaryFolder } from '../start-farhand.ts';

const readsAndWrites: Scope[] = ['files:read', 'files:write'];

async function onMachine(flags: string[] = []) {
  const system = await startFarhand();
  const { machineId } = await system.agent({ flags });
  const folder = temporaryFolder('adversary');
  return { system, machineId, folder, files: `/machines/${machineId}/files` };
}

/**
 * Sends the head of a request and the first bytes of its body. The test can send more on `socket`. `answer` resolves
 * with all bytes from the broker.
 */
function raw(system: TestSystem, head: string[], begin: Buffer | string) {
  const { hostname, port } = new URL(system.url);
  const socket = connect(Number(port), hostname);
  let received = '';
  socket.setEncoding('latin1');
  socket.on('data', (text: string) => {
    received += text;
  });
  socket.on('error', () => undefined);
  const answer = new Promise<string>((resolve) => socket.once('close', () => resolve(received)));
  socket.write(`${head.join('\r\n')}\r\nHost: x\r\nConnection: close\r\n\r\n`);
  socket.write(begin);
  return { socket, answer, received: () => received };
}

const part = (name: string, value: string, charset: BufferEncoding = 'utf8') =>
  Buffer.from(`--XX\r\nContent-Disposition: form-data; name="${name}"\r\n\r\n${value}\r\n`, charset);
const formType = 'Content-Type: multipart/form-data; boundary=XX';

/**
 * Uploads a form whose fields `late` come after the file. Sends these fields only when the machine has begun to write
 * the file.
 */
async function lateForm(
  system: TestSystem,
  files: string,
  folder: string,
  early: Buffer,
  late: Buffer,
  query = '',
) {
  const file = Buffer.concat([early, part('file', 'content')]);
  const end = Buffer.concat([late, Buffer.from('--XX--\r\n')]);
  const head = [
    `POST /api/v1${files}/upload${query} HTTP/1.1`,
    `Authorization: Bearer ${system.key}`,
    formType,
    `Content-Length: ${file.length + end.length}`,
  ];
  const sent = raw(system, head, file);
  const begun = () =>
    readdirSync(folder, { recursive: true }).some((name) => String(name).includes('.farhand-'));
  while (!begun() && !sent.received()) await turn();
  sent.socket.write(end);
  return Number((await sent.answer).split(' ')[1]);
}

test('a revoked key’s watch is closed and sends nothing more', async () => {
  const { system, folder, files } = await onMachine();
  const { key, client } = await system.keyed(readsAndWrites);
  const { id } = await client.keys.me();
  const watching = raw(
    system,
    [`GET /api/v1${files}/watch?path=${folder} HTTP/1.1`, `Authorization: Bearer ${key}`],
    '',
  );
  while (!watching.received().includes('ready')) await turn();
  await system.client.keys.remove({ key_id: id });
  writeFileSync(join(folder, 'secret'), 'x');
  const received = new Promise((resolve) => {
    watching.socket.on('data', () => watching.received().includes('secret') && resolve('reported'));
  });
  expect(await Promise.race([received, watching.answer.then(() => 'closed')])).toBe('closed');
});

test('an upload whose key is revoked meanwhile is not written', async () => {
  const { system, folder, files } = await onMachine();
  const { key, client } = await system.keyed(readsAndWrites);
  const { id } = await client.keys.me();
  const head = [
    `PUT /api/v1${files}/raw?path=${folder}/a HTTP/1.1`,
    `Authorization: Bearer ${key}`,
    'Content-Length: 10',
  ];
  const sent = raw(system, head, '01234');
  while (readdirSync(folder).length === 0) await turn();
  await system.client.keys.remove({ key_id: id });
  sent.socket.write('56789');
  await sent.answer;
  expect(readdirSync(folder)).not.toContain('a');
});

test('a repeated Idempotency-Key with different content gets idempotency_mismatch, not the first answer', async () => {
  const { system, folder, files } = await onMachine();
  const upload = (content: string) =>
    fetch(`${system.url}/api/v1${files}/upload`, {
      method: 'POST',
      body: Buffer.concat([part('path', `${folder}/a`), part('file', content), Buffer.from('--XX--\r\n')]),
      headers: {
        Authorization: `Bearer ${system.key}`,
        'Content-Type': 'multipart/form-data; boundary=XX',
        'Idempotency-Key': 'one',
      },
    });
  expect((await upload('first')).status).toBe(201);
  expect((await upload('other')).status).toBe(422);
  expect(readFileSync(join(folder, 'a'), 'utf8')).toBe('first');
});

test('a path that is no base64 is refused, and does not become the home', async () => {
  const { system, files } = await onMachine();
  const answer = await system.call('GET', `${files}/stat?path=!!!!&path_encoding=base64`);
  expect(answer.body.data?.path).not.toBe(homedir());
  expect([400, 422]).toContain(answer.status);
  const made = await system.call('POST', `${files}/mkdir`, {
    body: { path: '====', path_encoding: 'base64' },
  });
  expect([400, 422]).toContain(made.status);
});

test('a path whose bytes are not UTF-8 is refused, never written under another name', async () => {
  const { system, folder, files } = await onMachine();
  const headers = { Authorization: `Bearer ${system.key}` };
  const url = `${system.url}/api/v1${files}`;
  const body = Buffer.concat([
    part('path', `${folder}/caf\xe9`, 'latin1'),
    part('file', 'x'),
    Buffer.from('--XX--\r\n'),
  ]);
  await fetch(`${url}/upload`, {
    method: 'POST',
    body,
    headers: { ...headers, 'Content-Type': 'multipart/form-data; boundary=XX' },
  });
  await fetch(`${url}/raw?path=${folder}/caf%E9`, { method: 'PUT', body: 'x', headers });
  expect(readdirSync(folder)).toEqual([]);
});

/** Waits until the temporary file of a refused upload is removed. */
async function cleared(folder: string): Promise<void> {
  for (let left = readdirSync(folder); left.length > 0; left = readdirSync(folder)) {
    expect(left).toEqual([expect.stringMatching(/^\.farhand-/)]);
    await turn();
  }
}

test('create_parents after the file is refused, never ignored', async () => {
  const { system, folder, files } = await onMachine();
  const late = part('create_parents', 'true');
  expect(await lateForm(system, files, folder, part('path', `${folder}/b`), late)).toBe(422);
  await cleared(folder);
});

test('a path_encoding after the file is refused, never ignored', async () => {
  // The path is base64. Until path_encoding arrives, the broker takes this text for a path relative to the home
  // directory, and the upload begins there. So the test sets the home directory.
  const home = temporaryFolder('home');
  vi.stubEnv('HOME', home);
  onTestFinished(() => void vi.unstubAllEnvs());
  const { system, folder, files } = await onMachine();
  const path = part('path', Buffer.from(join(folder, 'a')).toString('base64url'));
  expect(await lateForm(system, files, home, path, part('path_encoding', 'base64'))).toBe(422);
  await cleared(home);
});

test('a path after the file that contradicts the one in the query is refused', async () => {
  const { system, folder, files } = await onMachine();
  const status = await lateForm(
    system,
    files,
    folder,
    Buffer.alloc(0),
    part('path', `${folder}/other`),
    `?path=${folder}/a`,
  );
  expect(status).toBe(422);
  await cleared(folder);
});

test('deeply nested details of an agent’s error do not break the envelope', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const answer = system.call('GET', `/machines/${agent.identity.machineId}/files/stat?path=/a`);
  const details = `{"a":${'['.repeat(25_000)}${']'.repeat(25_000)}}`;
  const { call_id } = await agent.next('call');
  agent.send({ reply: { call_id, error: { code: 'conflict', message: 'm', details } } });
  const { status, headers } = await answer;
  expect([status === 500, headers.get('content-type')]).toEqual([false, 'application/json; charset=utf-8']);
});

test('an Expect header with an unknown value is answered with the error envelope', async () => {
  const { system, files } = await onMachine();
  const head = [
    `GET /api/v1${files}?path=/ HTTP/1.1`,
    `Authorization: Bearer ${system.key}`,
    'Expect: wonders',
  ];
  expect(await raw(system, head, '').answer).toContain('{"data":{"path":"/"');
});

test('a directory with symlinks to absolute paths is copied to another machine', async () => {
  const { system, machineId, folder } = await onMachine();
  const other = await system.agent();
  mkdirSync(join(folder, 'a'));
  symlinkSync('/usr/bin/env', join(folder, 'a/link'));
  const copied = await system.call('POST', `/machines/${machineId}/files/copy`, {
    body: { source: `${folder}/a`, destination: `${folder}/b`, destination_machine_id: other.machineId },
  });
  expect([copied.status, copied.body.error?.message]).toEqual([201, undefined]);
});

test('HEAD of an empty file does not count as a download', async () => {
  const { system, folder, files } = await onMachine();
  writeFileSync(join(folder, 'empty'), '');
  writeFileSync(join(folder, 'full'), 'x');
  const url = `${system.url}/api/v1${files}/download?path=${folder}`;
  const headers = { Authorization: `Bearer ${system.key}` };
  await fetch(`${url}/empty`, { method: 'HEAD', headers });
  await (await fetch(`${url}/full`, { headers })).text();
  for (;;) {
    const { items } = await system.client.events.list({ type: 'file.downloaded' });
    const paths = items.map(({ data }) => data.path);
    if (!paths.includes(`${folder}/full`)) continue;
    expect(paths).toEqual([`${folder}/full`]);
    return;
  }
});

test('a route without a machine in the path answers a key without rights with 403 before all other checks', async () => {
  const { system } = await onMachine();
  const { key } = await system.keyed(readsAndWrites, { tags: ['elsewhere'] });
  const read = await system.call('GET', '/files?path=/&limit=0', { key });
  const write = await system.call('PUT', '/files/content', { key, body: { nonsense: 1 } });
  expect([read.status, write.status]).toEqual([403, 403]);
});

test('a write without a machine in the path that names two machines is refused', async () => {
  const { system, machineId, folder } = await onMachine();
  const other = await system.agent();
  const body = { machine_id: other.machineId, path: `${folder}/a`, content: 'x' };
  const answer = await system.call('PUT', `/files/content?machine_id=${machineId}`, { body });
  expect([answer.status >= 400, readdirSync(folder)]).toEqual([true, []]);
});

test('a symlink that leads out of the roots does not reveal its target', async () => {
  const root = temporaryFolder('root');
  const outside = temporaryFolder('outside');
  writeFileSync(join(outside, 'there'), 'x');
  symlinkSync(outside, join(root, 'out'));
  const { system, files } = await onMachine(['--root', root]);
  const codes = await Promise.all(
    ['there', 'missing', 'there/below'].map(async (name) => {
      const answer = await system.call('GET', `${files}?path=${root}/out/${name}`);
      return [name, answer.body.error.code];
    }),
  );
  expect(codes).toEqual(['there', 'missing', 'there/below'].map((name) => [name, 'permission_denied']));
});

test('a PUT with Content-Range is refused, and does not replace the whole file', async () => {
  const { system, folder, files } = await onMachine();
  writeFileSync(join(folder, 'a'), '0123456789');
  const answer = await fetch(`${system.url}/api/v1${files}/raw?path=${folder}/a`, {
    method: 'PUT',
    body: 'xx',
    headers: { Authorization: `Bearer ${system.key}`, 'Content-Range': 'bytes 2-3/10' },
  });
  expect([answer.status, readFileSync(join(folder, 'a'), 'utf8')]).toEqual([400, '0123456789']);
});
