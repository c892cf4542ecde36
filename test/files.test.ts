// Files over REST, from HTTP to a real disk and back.
import { execFileSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import {
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  statSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { readdir } from 'node:fs/promises';
import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';
import { shared } from './close-after-tests.ts';
import {
  type CallOptions,
  startFarhand,
  startWithAgent,
  type TestSystem,
  temporaryFolder,
} from './start-farhand.ts';

const machine = shared(startWithAgent);

/** Returns a system with one machine. With `flags` for the agent it is a new system, otherwise a shared one. */
async function onMachine(flags: string[] = []) {
  const { system, agent } = await (flags.length > 0 ? startWithAgent({ flags }) : machine());
  const folder = temporaryFolder('files');
  const files = `/machines/${agent.machineId}/files`;
  return { system, agent, folder, files };
}

const content = (system: TestSystem, files: string, path: string, query = '') =>
  system.call('GET', `${files}/content?path=${encodeURIComponent(path)}${query}`);

const write = (system: TestSystem, files: string, body: object, options: CallOptions = {}) =>
  system.call('PUT', `${files}/content`, { ...options, body });

test('an unreadable path is refused with the code of its reason', async () => {
  const { system, folder, files } = await onMachine();
  writeFileSync(join(folder, 'file'), 'x');
  for (const [path, status, code] of [
    [join(folder, 'none'), 404, 'file_not_found'],
    [folder, 400, 'is_a_directory'],
    [join(folder, 'file/below'), 400, 'not_a_directory'],
    ['/dev/zero', 400, 'unsupported_file'],
    [`${folder}/${'x'.repeat(300)}`, 400, 'invalid_path'],
    [`${folder}/a\0b`, 400, 'invalid_path'],
  ] as const) {
    const answer = await content(system, files, path);
    expect([path, answer.status, answer.body.error.code]).toEqual([path, status, code]);
  }
});

test('a write with a bad body changes nothing', async () => {
  const { system, folder, files } = await onMachine();
  const path = join(folder, 'a');
  for (const body of [
    { path, content: '\ud800' },
    { path, content: 'not base64!', encoding: 'base64' },
    { path, content: 'x', mode: '999' },
    { path, content: 'x', owner: 'root' },
    { content: 'x' },
  ]) {
    const answer = await write(system, files, body);
    expect([answer.status, answer.body.error.code]).toEqual([422, 'validation_failed']);
  }
  expect(existsSync(path)).toBe(false);
});

test('If-Match with another ETag is refused with precondition_failed and changes nothing', async () => {
  const { system, folder, files } = await onMachine();
  const path = join(folder, 'a');
  writeFileSync(path, 'old');
  const refused = await write(
    system,
    files,
    { path, content: 'new' },
    { headers: { 'If-Match': '"other"' } },
  );
  expect([refused.status, refused.body.error.code]).toEqual([412, 'precondition_failed']);
  expect(refused.body.error.message).toContain('does not match the ETag in If-Match:');
  expect(readFileSync(path, 'utf8')).toBe('old');
  const headers = { 'If-None-Match': '"other"' };
  const { status, body } = await write(system, files, { path, content: 'new' }, { headers });
  expect([status, body.error.message]).toEqual([400, 'header: If-None-Match: must be *']);
  expect(body.error.details.issues).toEqual([{ path: 'if_none_match', message: 'must be *' }]);
  const etag = (await content(system, files, path)).headers.get('etag') ?? '';
  const taken = await write(system, files, { path, content: 'new' }, { headers: { 'If-Match': etag } });
  expect(taken.status).toBe(200);
  expect(taken.headers.get('etag')).not.toBe(etag);
  expect(readFileSync(path, 'utf8')).toBe('new');
});

test('the content of a file over 10 MiB is refused with file_too_large, but a part of it is not', async () => {
  const { system, folder, files } = await onMachine();
  const path = join(folder, 'big');
  writeFileSync(path, Buffer.alloc(10 * 1024 * 1024 + 1, 'a'));
  const whole = await content(system, files, path);
  expect([whole.status, whole.body.error.code]).toEqual([413, 'file_too_large']);
  const part = await content(system, files, path, '&offset=-3&length=2');
  expect(part.body.data).toEqual({ path, content: 'aa', size: 10 * 1024 * 1024 + 1, encoding: 'utf-8' });
});

test('the agent refuses its own data directory, and everything outside its roots', async () => {
  const root = temporaryFolder('root');
  const { system, agent, folder, files } = await onMachine(['--root', `${root}`]);
  writeFileSync(join(folder, 'outside'), 'x');
  symlinkSync(join(folder, 'outside'), join(root, 'link'));
  for (const path of [join(agent.dataDir, 'identity.json'), join(folder, 'outside'), join(root, 'link')]) {
    const answer = await content(system, files, path);
    expect([path, answer.status, answer.body.error.code]).toEqual([path, 403, 'permission_denied']);
  }
  const outside = await write(system, files, { path: join(folder, 'new'), content: 'x' });
  expect([outside.status, outside.body.error.code]).toEqual([403, 'permission_denied']);
});

test('an agent started without files:write reads but does not write', async () => {
  const { system, folder, files } = await onMachine(['--allow', 'metrics,files:read']);
  writeFileSync(join(folder, 'a'), 'x');
  expect((await content(system, files, join(folder, 'a'))).body.data.content).toBe('x');
  const refused = await write(system, files, { path: join(folder, 'b'), content: 'x' });
  expect([refused.status, refused.body.error.code]).toEqual([403, 'permission_denied']);
  expect(existsSync(join(folder, 'b'))).toBe(false);
});

test('a written file is read back to the byte, as text or as base64', async () => {
  const { system, folder, files } = await onMachine();
  const path = join(folder, 'deep/er/grüße.txt');
  const text = 'first\nzweite Zeile 🙂\u2028\0end';
  const made = await write(system, files, { path, content: text, create_parents: true, mode: '0640' });
  expect(made.body.data).toEqual({ path, size: Buffer.byteLength(text), created: true });
  expect(readFileSync(path, 'utf8')).toBe(text);
  expect(statSync(path).mode & 0o777).toBe(0o640);
  const read = await content(system, files, path);
  expect(read.body.data).toEqual({ path, content: text, size: Buffer.byteLength(text), encoding: 'utf-8' });

  const bytes = Buffer.from(Array.from({ length: 256 }, (_, n) => n));
  const again = await write(system, files, { path, content: bytes.toString('base64'), encoding: 'base64' });
  expect(again.body.data).toEqual({ path, size: 256, created: false });
  expect(readFileSync(path)).toEqual(bytes);
  expect(statSync(path).mode & 0o777).toBe(0o640);
  const raw = await content(system, files, path);
  expect(raw.body.data).toMatchObject({ encoding: 'base64', content: bytes.toString('base64') });
  expect(await readdir(join(folder, 'deep/er'))).toEqual(['grüße.txt']);
});

test('a PUT accepts 12 MiB of content, but not more than the limit', async () => {
  const { system, folder, files } = await onMachine();
  const path = join(folder, 'large');
  const large = await write(system, files, { path, content: 'y'.repeat(12 * 1024 * 1024) });
  expect(large.body.data).toMatchObject({ size: 12 * 1024 * 1024 });
  const larger = await write(system, files, { path, content: 'z'.repeat(16 * 1024 * 1024) });
  expect([larger.status, larger.body.error.code]).toEqual([413, 'payload_too_large']);
  expect(statSync(path).size).toBe(12 * 1024 * 1024);
});

test('a listing has directories first, is sorted by name, hides dot files, and comes in pages', async () => {
  const { system, folder, files } = await onMachine();
  mkdirSync(join(folder, 'sub'));
  for (const name of ['b', 'a', '.hidden']) writeFileSync(join(folder, name), name, { mode: 0o600 });
  symlinkSync('sub', join(folder, 'to-sub'));
  const list = async (query = '') => (await system.call('GET', `${files}?path=${folder}${query}`)).body.data;
  const all = await list();
  expect(all.path).toBe(folder);
  expect(all.files.map(({ name }: { name: string }) => name)).toEqual(['sub', 'to-sub', 'a', 'b']);
  expect(all.files[1]).toMatchObject({ type: 'directory', link_target: 'sub' });
  expect(all.files[2]).toMatchObject({ type: 'file', size: 1, mode: '0600', path: join(folder, 'a') });
  expect(all.files[0]).not.toHaveProperty('size');
  expect((await list('&hidden=true')).files.map(({ name }: { name: string }) => name)).toContain('.hidden');
  const page = await list('&limit=2&offset=1');
  expect(page.files.map(({ name }: { name: string }) => name)).toEqual(['to-sub', 'a']);
  const { body } = await system.call('GET', `${files}?path=${folder}&limit=2&offset=1`);
  expect(body.meta).toMatchObject({ total: 4, limit: 2, offset: 1, has_more: true });
});

test('a page of a directory names the next page in its Link header, as other lists do', async () => {
  const { system, folder, files } = await onMachine();
  for (const name of ['a', 'b', 'c']) writeFileSync(join(folder, name), '');
  const list = async (query: string) =>
    (await system.call('GET', `${files}?path=${folder}&${query}`)).headers.get('Link');
  const next = await list('limit=2');
  const query = new URLSearchParams(/^<[^?]+\?([^>]+)>; rel="next"$/.exec(next ?? '')?.[1]);
  expect(Object.fromEntries(query)).toEqual({ path: folder, limit: '2', offset: '2' });
  expect(await list('limit=2&offset=2')).toBeNull();
});

test('a file with a time after the year 275,760 is listed with that year', async ({ skip }) => {
  const { system, folder, files } = await onMachine();
  const path = join(folder, 'far');
  writeFileSync(path, '');
  execFileSync('touch', ['-d', '@9000000000000', path]);
  skip(statSync(path).mtimeMs < 8.64e15, 'needs a file system that stores such times, such as tmpfs');
  for (const query of [`?path=${folder}`, `/stat?path=${path}`]) {
    const { status, body } = await system.call('GET', files + query);
    const [entry = body.data] = body.data.files ?? [];
    expect([status, entry.modified_at]).toEqual([200, '+275760-09-13T00:00:00.000Z']);
  }
});

test('/proc files of size 0 are read whole', async () => {
  const { system, files } = await onMachine();
  const { body } = await content(system, files, `/proc/${process.ppid}/status`);
  expect(body.data.content).toContain('Name:');
  expect(body.data.size).toBe(Buffer.byteLength(body.data.content));
});

test('file requests for an offline machine are refused as machine_offline with a Retry-After', async () => {
  const { system, agent } = await startWithAgent();
  const files = `/machines/${agent.machineId}/files`;
  await agent.close();
  const answer = await content(system, files, '/etc/os-release');
  expect([answer.status, answer.body.error.code, answer.headers.get('retry-after')]).toEqual([
    503,
    'machine_offline',
    '5',
  ]);
});

test('a file request with missing or invalid fields is refused, and does nothing', async () => {
  const { system, files } = await onMachine();
  for (const [method, path, body, status] of [
    ['GET', '/stat', undefined, 400],
    ['GET', '/stat?path=/tmp&checksum=md5', undefined, 400],
    ['GET', '/download', undefined, 400],
    ['GET', '/download?path=/tmp&archive=zip', undefined, 400],
    ['GET', '/search?path=/tmp', undefined, 400],
    ['GET', '/search?path=/tmp&name=*&limit=0', undefined, 400],
    ['GET', '/watch?recursive=1', undefined, 400],
    ['DELETE', '', undefined, 400],
    ['POST', '/mkdir', {}, 422],
    ['POST', '/mkdir', { path: '/tmp/x', mode: '8' }, 422],
    ['POST', '/move', { source: '/tmp/x' }, 422],
    ['POST', '/copy', { source: '/tmp/x', destination: '/tmp/y', more: 1 }, 422],
    ['POST', '/copy', { source: '/a', destination: '/b', destination_machine_id: 'mach_none' }, 404],
    ['PATCH', '', { mode: '0600' }, 422],
    ['POST', '/extract', undefined, 400],
    ['PUT', '/raw', undefined, 400],
  ] as const) {
    const answer = await system.call(method, files + path, { body });
    expect([method, path, answer.status]).toEqual([method, path, status]);
  }
});

test('the root and the home cannot be deleted, nor a full directory without recursive', async () => {
  const root = temporaryFolder('root');
  const { system, files } = await onMachine(['--root', root]);
  mkdirSync(join(root, 'd'));
  writeFileSync(join(root, 'd/a'), 'x');
  const remove = (path: string, more = '') =>
    system.call('DELETE', `${files}?path=${encodeURIComponent(path)}${more}`);
  for (const path of ['/', '~', root, `${root}/d/..`]) {
    const answer = await remove(path, '&recursive=true');
    expect([path, answer.status, answer.body.error.code]).toEqual([path, 403, 'permission_denied']);
  }
  const full = await remove(join(root, 'd'));
  expect([full.status, full.body.error.code]).toEqual([409, 'directory_not_empty']);
  const gone = await remove(join(root, 'd'), '&recursive=true');
  expect([gone.status, gone.body.data]).toEqual([200, { deleted: true, path: join(root, 'd') }]);
  const { items } = await system.client.events.list({ type: 'file.deleted' });
  expect(items.map(({ data }) => data)).toMatchObject([{ path: join(root, 'd'), recursive: true }]);
});

test('a directory is made, a file moved, copied, changed and described', async () => {
  const { system, folder, agent } = await onMachine();
  const at = (name: string) => join(folder, name);
  const machine_id = agent.machineId;
  const { files } = system.client;
  expect(await files.mkdir({ machine_id, path: at('d/e'), parents: true, mode: '0700' })).toMatchObject({
    path: at('d/e'),
    type: 'directory',
    mode: '0700',
  });
  await expect(files.mkdir({ machine_id, path: at('d/e'), parents: true })).rejects.toMatchObject({
    status: 409,
    code: 'already_exists',
  });
  writeFileSync(at('a'), 'content');
  expect(await files.move({ machine_id, source: at('a'), destination: at('d/b') })).toMatchObject({
    path: at('d/b'),
  });
  const copied = await files.copy({ machine_id, source: at('d'), destination: at('c') });
  expect(copied).toMatchObject({ path: at('c'), type: 'directory', files_copied: 1, bytes_copied: 7 });
  expect(await files.change({ machine_id, path: at('c/b'), mode: '4750' })).toMatchObject({
    mode: '0750',
    setuid: true,
  });
  const stat = await files.stat({ machine_id, path: at('c/b'), checksum: 'sha256' });
  expect(stat).toMatchObject({ size: 7, sha256: createHash('sha256').update('content').digest('hex') });
  expect(existsSync(at('a'))).toBe(false);
});

test('a directory is downloaded as a tar and uploaded again, and GNU tar reads it', async () => {
  const { system, folder, agent } = await onMachine();
  const machine_id = agent.machineId;
  mkdirSync(join(folder, 'd/below'), { recursive: true });
  writeFileSync(join(folder, 'd/below/a'), 'x');
  symlinkSync('below/a', join(folder, 'd/link'));
  for (const archive of ['tar', 'tar.gz'] as const) {
    const sent = await system.client.files.download({ machine_id, path: join(folder, 'd'), archive });
    expect(sent.headers.get('content-disposition')).toBe(`attachment; filename="d.${archive}"`);
    const bytes = Buffer.from(await sent.arrayBuffer());
    mkdirSync(join(folder, archive));
    execFileSync('tar', [archive === 'tar' ? '-xf' : '-xzf', '-', '-C', join(folder, archive)], {
      input: bytes,
    });
    expect(execFileSync('diff', ['-r', join(folder, 'd'), join(folder, archive)]).toString()).toBe('');
    const path = join(folder, `again.${archive}`);
    const taken = await system.client.files.extract({ machine_id, path, content: bytes });
    expect(taken).toMatchObject({
      path,
      files: 1,
      bytes: 1,
      sha256: createHash('sha256').update(bytes).digest('hex'),
    });
    expect(execFileSync('diff', ['-r', join(folder, 'd'), path]).toString()).toBe('');
  }
  await expect(
    system.client.files.extract({ machine_id, path: join(folder, 'bad'), content: 'no tar' }),
  ).rejects.toMatchObject({ status: 400, code: 'invalid_request' });
});

test('a search ends with a line that says whether the matches are complete', async () => {
  const { system, folder, agent } = await onMachine();
  const machine_id = agent.machineId;
  for (const name of ['a.txt', 'c.bin']) writeFileSync(join(folder, name), 'one\ntwo needle\nthree');
  const search = async (more: object) => {
    const lines = [];
    for await (const line of await system.client.files.search({ machine_id, path: folder, ...more }))
      lines.push(line);
    return lines;
  };
  expect(await search({ name: '*.txt' })).toMatchObject([
    { entry: { name: 'a.txt' } },
    { end: { matches: 1, truncated: false, unreadable: 0 } },
  ]);
  expect(await search({ content: 'NEEDLE', ignore_case: true, limit: 1 })).toMatchObject([
    { line: 2, text: 'two needle' },
    { end: { matches: 1, truncated: true } },
  ]);
});

test('a watch reports that it is ready, then each change, and ends with its client', async () => {
  const { system, folder, agent } = await onMachine();
  const stop = new AbortController();
  const events = await system.client.files.watch(
    { machine_id: agent.machineId, path: folder },
    { signal: stop.signal },
  );
  const seen: unknown[] = [];
  await expect(
    (async () => {
      for await (const event of events) {
        seen.push(event);
        if (event.event === 'ready') writeFileSync(join(folder, 'new'), 'x');
        if (event.event === 'change') stop.abort();
      }
    })(),
  ).rejects.toMatchObject({ name: 'AbortError' });
  expect(seen).toMatchObject([
    { event: 'ready' },
    { event: 'change', data: { path: join(folder, 'new'), kind: 'added', type: 'file' } },
  ]);
});

test('routes without a machine in the path need none while there is only one, and check the key’s machines', async () => {
  const system = await startFarhand();
  const folder = temporaryFolder('anywhere');
  const path = join(folder, 'a');
  const none = await system.call('GET', `/files?path=${folder}`);
  expect([none.status, none.body.error.details.issues[0].path]).toEqual([400, 'machine_id']);
  const one = (await system.agent()).machineId;
  const { key } = await system.keyed(['files:read', 'files:write'], {
    tags: ['other'],
  });
  const outside = await system.call('GET', `/files?path=${folder}`, { key });
  expect([outside.status, outside.body.error.code]).toEqual([403, 'forbidden']);
  const written = await system.call('PUT', '/files/content', { body: { path, content: 'x' } });
  expect([written.status, written.body.data]).toEqual([200, { path, size: 1, created: true }]);
  expect((await system.call('GET', `/files/content?path=${path}`)).body.data.content).toBe('x');
  expect((await system.call('GET', `/files?path=${folder}`)).body.data.files).toHaveLength(1);
  const two = (await system.agent()).machineId;
  for (const [method, query, body] of [
    ['GET', `/files?path=${folder}`, undefined],
    ['GET', `/files/content?path=${path}`, undefined],
    ['PUT', '/files/content', { path, content: 'y' }],
    ['DELETE', `/files?path=${path}`, undefined],
  ] as const) {
    const unnamed = await system.call(method, query, { body });
    expect([method, unnamed.status, unnamed.body.error.code]).toEqual([method, 400, 'invalid_request']);
    expect(unnamed.body.error.message).toContain('machine_id');
  }
  const named = await system.call('PUT', '/files/content', { body: { path, content: 'z', machine_id: two } });
  expect(named.body.data).toEqual({ path, size: 1, created: false });
  expect((await system.call('DELETE', `/files?path=${path}&machine_id=${one}`)).body.data).toEqual({
    deleted: true,
    path,
  });
});

/** Mounts a file system; undefined if the test may not do that. */
function mounted(options: string): string | undefined {
  const at = temporaryFolder('mount');
  try {
    execFileSync('mount', ['-t', 'tmpfs', '-o', options, 'farhand-test', at], { stdio: 'ignore' });
  } catch {
    return undefined;
  }
  onTestFinished(() => void execFileSync('umount', ['-l', at]));
  return at;
}
const mayMount = process.getuid?.() === 0 && existsSync('/usr/bin/mount');

test.skipIf(!mayMount)(
  'a write to a full disk is no_space, and leaves the old content and no temporary files (needs root to mount)',
  async () => {
    const { system, agent } = await onMachine();
    const disk = mounted('size=4m');
    if (!disk) return expect.fail('mounting a tmpfs is not allowed here');
    const machine_id = agent.machineId;
    const path = join(disk, 'a');
    writeFileSync(path, 'old');
    const content = new Uint8Array(8 * 1024 * 1024);
    const { files } = system.client;
    const full = { status: 507, code: 'no_space' };
    await expect(files.put({ machine_id, path, content })).rejects.toMatchObject(full);
    await expect(files.upload({ machine_id, path, content: new Blob([content]) })).rejects.toMatchObject(
      full,
    );
    const folder = temporaryFolder('full');
    writeFileSync(join(folder, 'big'), content);
    const tar = execFileSync('tar', ['-cf', '-', '-C', folder, 'big'], { maxBuffer: 1e8 });
    const packed = files.extract({ machine_id, path: join(disk, 'd'), content: tar });
    await expect(packed).rejects.toMatchObject(full);
    const copied = files.copy({ machine_id, source: folder, destination: join(disk, 'c') });
    await expect(copied).rejects.toMatchObject(full);
    expect(readdirSync(disk)).toEqual(['a']);
    expect(readFileSync(path, 'utf8')).toBe('old');
  },
);

test.skipIf(!mayMount)('a write to a read-only disk is permission_denied (needs root to mount)', async () => {
  const { system, agent } = await onMachine();
  const disk = mounted('size=1m');
  if (!disk) return expect.fail('mounting a tmpfs is not allowed here');
  writeFileSync(join(disk, 'a'), 'old');
  execFileSync('mount', ['-o', 'remount,ro', disk]);
  const machine_id = agent.machineId;
  const path = join(disk, 'a');
  const { files } = system.client;
  const refused = { status: 403, code: 'permission_denied' };
  await expect(files.write({ machine_id, path, content: 'new' })).rejects.toMatchObject(refused);
  await expect(files.remove({ machine_id, path })).rejects.toMatchObject(refused);
  await expect(files.mkdir({ machine_id, path: join(disk, 'd') })).rejects.toMatchObject(refused);
  await expect(files.change({ machine_id, path, mode: '0600' })).rejects.toMatchObject(refused);
  await expect(files.move({ machine_id, source: path, destination: join(disk, 'b') })).rejects.toMatchObject(
    refused,
  );
  expect(await files.read({ machine_id, path })).toMatchObject({ content: 'old' });
});
