// Files over REST, from HTTP to a real disk and back.
import { existsSync, mkdirSync, readFileSync, statSync, symlinkSync, writeFileSync } from 'node:fs';
import { readdir } from 'node:fs/promises';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { type CallWish, type House, openHouse, temporaryFolder } from './house.ts';

async function onMachine(flags: string[] = []) {
  const house = await openHouse();
  const agent = await house.agent({ flags });
  const folder = temporaryFolder('files');
  const files = `/machines/${agent.machineId}/files`;
  return { house, agent, folder, files };
}

const content = (house: House, files: string, path: string, query = '') =>
  house.call('GET', `${files}/content?path=${encodeURIComponent(path)}${query}`);

const write = (house: House, files: string, body: object, options: CallWish = {}) =>
  house.call('PUT', `${files}/content`, { ...options, body });

test('what cannot be read is refused with the code of its reason', async () => {
  const { house, folder, files } = await onMachine();
  writeFileSync(join(folder, 'file'), 'x');
  for (const [path, status, code] of [
    [join(folder, 'none'), 404, 'file_not_found'],
    [folder, 400, 'is_a_directory'],
    [join(folder, 'file/below'), 400, 'not_a_directory'],
    ['/dev/zero', 400, 'unsupported_file'],
    [`${folder}/${'x'.repeat(300)}`, 400, 'invalid_path'],
    [`${folder}/a\0b`, 400, 'invalid_path'],
  ] as const) {
    const answer = await content(house, files, path);
    expect([path, answer.status, answer.body.error.code]).toEqual([path, status, code]);
  }
});

test('a write with a bad body changes nothing', async () => {
  const { house, folder, files } = await onMachine();
  const path = join(folder, 'a');
  for (const body of [
    { path, content: '\ud800' },
    { path, content: 'not base64!', encoding: 'base64' },
    { path, content: 'x', mode: '999' },
    { path, content: 'x', owner: 'root' },
    { content: 'x' },
  ]) {
    const answer = await write(house, files, body);
    expect([answer.status, answer.body.error.code]).toEqual([422, 'validation_failed']);
  }
  expect(existsSync(path)).toBe(false);
});

test('If-Match with another ETag is precondition_failed and keeps the old content', async () => {
  const { house, folder, files } = await onMachine();
  const path = join(folder, 'a');
  writeFileSync(path, 'old');
  const refused = await write(house, files, { path, content: 'new' }, { headers: { 'If-Match': '"other"' } });
  expect([refused.status, refused.body.error.code]).toEqual([412, 'precondition_failed']);
  expect(readFileSync(path, 'utf8')).toBe('old');
  const etag = (await content(house, files, path)).headers.get('etag') ?? '';
  const taken = await write(house, files, { path, content: 'new' }, { headers: { 'If-Match': etag } });
  expect(taken.status).toBe(200);
  expect(taken.headers.get('etag')).not.toBe(etag);
  expect(readFileSync(path, 'utf8')).toBe('new');
});

test('a file over 10 MiB is file_too_large as content, and a part of it is not', async () => {
  const { house, folder, files } = await onMachine();
  const path = join(folder, 'big');
  writeFileSync(path, Buffer.alloc(10 * 1024 * 1024 + 1, 'a'));
  const whole = await content(house, files, path);
  expect([whole.status, whole.body.error.code]).toEqual([413, 'file_too_large']);
  const part = await content(house, files, path, '&offset=-3&length=2');
  expect(part.body.data).toEqual({ path, content: 'aa', size: 10 * 1024 * 1024 + 1, encoding: 'utf-8' });
});

test('the agent refuses its own data directory, and everything outside its roots', async () => {
  const root = temporaryFolder('root');
  const { house, agent, folder, files } = await onMachine(['--root', `${root}`]);
  writeFileSync(join(folder, 'outside'), 'x');
  symlinkSync(join(folder, 'outside'), join(root, 'link'));
  for (const path of [join(agent.dataDir, 'identity.json'), join(folder, 'outside'), join(root, 'link')]) {
    const answer = await content(house, files, path);
    expect([path, answer.status, answer.body.error.code]).toEqual([path, 403, 'permission_denied']);
  }
  const outside = await write(house, files, { path: join(folder, 'new'), content: 'x' });
  expect([outside.status, outside.body.error.code]).toEqual([403, 'permission_denied']);
});

test('an agent started without files:write reads but does not write', async () => {
  const { house, folder, files } = await onMachine(['--allow', 'metrics,files:read']);
  writeFileSync(join(folder, 'a'), 'x');
  expect((await content(house, files, join(folder, 'a'))).body.data.content).toBe('x');
  const refused = await write(house, files, { path: join(folder, 'b'), content: 'x' });
  expect([refused.status, refused.body.error.code]).toEqual([403, 'permission_denied']);
  expect(existsSync(join(folder, 'b'))).toBe(false);
});

test('a written file is read back to the byte, as text or as base64', async () => {
  const { house, folder, files } = await onMachine();
  const path = join(folder, 'deep/er/grüße.txt');
  const text = 'first\nzweite Zeile 🙂\u2028\0end';
  const made = await write(house, files, { path, content: text, create_parents: true, mode: '0640' });
  expect(made.body.data).toEqual({ path, size: Buffer.byteLength(text), created: true });
  expect(readFileSync(path, 'utf8')).toBe(text);
  expect(statSync(path).mode & 0o777).toBe(0o640);
  const read = await content(house, files, path);
  expect(read.body.data).toEqual({ path, content: text, size: Buffer.byteLength(text), encoding: 'utf-8' });

  const bytes = Buffer.from(Array.from({ length: 256 }, (_, n) => n));
  const again = await write(house, files, { path, content: bytes.toString('base64'), encoding: 'base64' });
  expect(again.body.data).toEqual({ path, size: 256, created: false });
  expect(readFileSync(path)).toEqual(bytes);
  expect(statSync(path).mode & 0o777).toBe(0o640);
  const raw = await content(house, files, path);
  expect(raw.body.data).toMatchObject({ encoding: 'base64', content: bytes.toString('base64') });
  expect(await readdir(join(folder, 'deep/er'))).toEqual(['grüße.txt']);
});

test('12 MiB of content pass in one PUT, more than the limit does not', async () => {
  const { house, folder, files } = await onMachine();
  const path = join(folder, 'large');
  const large = await write(house, files, { path, content: 'y'.repeat(12 * 1024 * 1024) });
  expect(large.body.data).toMatchObject({ size: 12 * 1024 * 1024 });
  const larger = await write(house, files, { path, content: 'z'.repeat(16 * 1024 * 1024) });
  expect([larger.status, larger.body.error.code]).toEqual([413, 'payload_too_large']);
  expect(statSync(path).size).toBe(12 * 1024 * 1024);
});

test('a listing has directories first, then names, hides dot files, and pages', async () => {
  const { house, folder, files } = await onMachine();
  mkdirSync(join(folder, 'sub'));
  for (const name of ['b', 'a', '.hidden']) writeFileSync(join(folder, name), name, { mode: 0o600 });
  symlinkSync('sub', join(folder, 'to-sub'));
  const list = async (query = '') => (await house.call('GET', `${files}?path=${folder}${query}`)).body.data;
  const all = await list();
  expect(all.path).toBe(folder);
  expect(all.files.map(({ name }: { name: string }) => name)).toEqual(['sub', 'to-sub', 'a', 'b']);
  expect(all.files[1]).toMatchObject({ type: 'directory', link_target: 'sub' });
  expect(all.files[2]).toMatchObject({ type: 'file', size: 1, mode: '0600', path: join(folder, 'a') });
  expect(all.files[0]).not.toHaveProperty('size');
  expect((await list('&hidden=true')).files.map(({ name }: { name: string }) => name)).toContain('.hidden');
  const page = await list('&limit=2&offset=1');
  expect(page.files.map(({ name }: { name: string }) => name)).toEqual(['to-sub', 'a']);
  expect(page.has_more).toBe(true);
});

test('/proc files of size 0 are read whole', async () => {
  const { house, files } = await onMachine();
  const { body } = await content(house, files, '/proc/self/status');
  expect(body.data.content).toContain('Name:');
  expect(body.data.size).toBe(Buffer.byteLength(body.data.content));
});

test('files on an offline machine are machine_offline with a Retry-After', async () => {
  const { house, agent, files } = await onMachine();
  await agent.close();
  const answer = await content(house, files, '/etc/hostname');
  expect([answer.status, answer.body.error.code, answer.headers.get('retry-after')]).toEqual([
    503,
    'machine_offline',
    '5',
  ]);
});
