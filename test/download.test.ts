// Downloads from a real disk over HTTP: conditions, ranges, names, files that change meanwhile, and clients that stop
// reading.
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { mkdirSync, truncateSync, utimesSync, writeFileSync } from 'node:fs';
import { request } from 'node:http';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { shared } from './close-after-tests.ts';
import { leapingClock } from './commands-fixture.ts';
import { scriptedMachine } from './scripted-agent.ts';
import { startFarhand, startWithAgent, type TestSystem, temporaryFolder } from './start-farhand.ts';

const machine = shared(startWithAgent);

async function onMachine(opened = machine()) {
  const { system, machine_id: machineId } = await opened;
  const folder = temporaryFolder('download');
  const download = (path: string, headers: Record<string, string> = {}, method = 'GET', more = '') =>
    fetch(
      `${system.url}/api/v1/machines/${machineId}/files/download?path=${encodeURIComponent(path)}${more}`,
      {
        method,
        headers: { Authorization: `Bearer ${system.key}`, ...headers },
      },
    );
  return { system, machineId, folder, download };
}

const codeOf = async (response: Response): Promise<unknown> =>
  ((await response.json()) as { error: { code: string } }).error.code;

/** Resolves with all events of a type once the event log has one. */
async function eventsOf(system: TestSystem, type: 'file.downloaded') {
  for (;;) {
    const { items } = await system.client.events.list({ type });
    if (items.length > 0) return items;
  }
}

test('a path that is not a file is refused before a byte is sent', async () => {
  const { folder, download } = await onMachine();
  for (const [path, status, code] of [
    [join(folder, 'none'), 404, 'file_not_found'],
    [folder, 400, 'is_a_directory'],
    ['/dev/zero', 400, 'unsupported_file'],
    ['a\0b', 400, 'invalid_path'],
    ['x'.repeat(5_000), 400, 'invalid_path'],
    ['y'.repeat(12_000), 400, 'invalid_path'],
  ] as const) {
    const answer = await download(path);
    expect([answer.status, await codeOf(answer)]).toEqual([status, code]);
    const ranged = await download(path, { Range: 'bytes=0-1' });
    expect([ranged.status, await codeOf(ranged)]).toEqual([status, code]);
  }
});

test('a range beyond the end is 416 and names the size', async () => {
  const { folder, download } = await onMachine();
  writeFileSync(join(folder, 'a'), '0123456789');
  for (const range of ['bytes=10-', 'bytes=99-100', 'bytes=-0']) {
    const answer = await download(join(folder, 'a'), { Range: range });
    expect([range, answer.status, answer.headers.get('content-range')]).toEqual([range, 416, 'bytes */10']);
    expect(await codeOf(answer)).toBe('range_not_satisfiable');
  }
});

test('a file that shrinks while it is sent never looks complete', async () => {
  const { system, machineId, folder } = await onMachine();
  const path = join(folder, 'big');
  writeFileSync(path, randomBytes(64 * 1024 * 1024));
  const asked = request(`${system.url}/api/v1/machines/${machineId}/files/download?path=${path}`, {
    headers: { Authorization: `Bearer ${system.key}` },
  });
  asked.end();
  const [response] = await once(asked, 'response');
  // The download has begun and waits for its client, because the flow-control windows are much smaller than the file.
  truncateSync(path, 1_000);
  let got = 0;
  const failed = new Promise((resolve) => response.once('error', resolve));
  response.on('data', (chunk: Buffer) => {
    got += chunk.length;
  });
  expect(await failed).toMatchObject({ code: 'ECONNRESET' });
  expect(got).toBeLessThan(64 * 1024 * 1024);
});

test('a machine that sends more or less than it announced cuts the answer', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const entry = { name: Buffer.from('a'), path: Buffer.from('/a'), size: 10, mode: 0o644 };
  for (const sent of [5, 15]) {
    const answer = fetch(`${system.url}/api/v1/machines/${agent.identity.machineId}/files/download?path=/a`, {
      headers: { Authorization: `Bearer ${system.key}` },
    });
    const head = { entry, etag: '"1"', offset: 0, length: 10 };
    agent.answerWith(await agent.next('call'), { head }, { chunk: Buffer.alloc(sent) });
    const outcome = await answer
      .then((response) => response.arrayBuffer())
      .then(
        (body) => body.byteLength,
        () => 'cut',
      );
    // The broker never sends more bytes than Content-Length.
    expect(outcome).toBe(sent < 10 ? 'cut' : 10);
  }
});

test('a range of a log that grows between check and read is sent, unless a condition names its version', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const entry = { name: Buffer.from('a'), path: Buffer.from('/a'), mode: 0o644 };
  const grown = { entry: { ...entry, size: 12 }, etag: '"2"', offset: 0, length: 4 };
  for (const [headers, status] of [
    [{}, 206],
    [{ 'If-None-Match': '"0"' }, 206],
    [{ 'If-Range': '"1"' }, 409],
    [{ 'If-Match': '"1"' }, 409],
  ] as const) {
    const answer = fetch(`${system.url}/api/v1/machines/${agent.identity.machineId}/files/download?path=/a`, {
      headers: { Authorization: `Bearer ${system.key}`, Range: 'bytes=0-3', ...headers },
    });
    const looked = await agent.nextCallOf('StatFile');
    const response = agent.encode('StatFile', { entry: { ...entry, size: 10 }, etag: '"1"' });
    agent.send({ reply: { call_id: looked.call_id, response } });
    agent.answerWith(await agent.nextCallOf('ReadFile'), { head: grown }, { chunk: Buffer.from('0123') });
    const { status: got, headers: sent } = await answer;
    expect([headers, got]).toEqual([headers, status]);
    if (status === 206) expect(sent.get('content-range')).toBe('bytes 0-3/12');
  }
});

test('a download has the type, name, size and validators of its file, and HEAD has the same', async () => {
  const { system, folder, download } = await onMachine(startWithAgent());
  const path = join(folder, '日 "x"\n.ts');
  const content = randomBytes(700_001);
  writeFileSync(path, content);
  utimesSync(path, 1_700_000_000.5, 1_700_000_000.5);
  const get = await download(path);
  expect(Buffer.from(await get.arrayBuffer()).equals(content)).toBe(true);
  expect(Object.fromEntries(get.headers)).toMatchObject({
    'content-type': 'text/plain',
    'content-length': '700001',
    'last-modified': 'Tue, 14 Nov 2023 22:13:20 GMT',
    'accept-ranges': 'bytes',
    'x-content-type-options': 'nosniff',
    'content-disposition': `attachment; filename="? \\"x\\"_.ts"; filename*=UTF-8''%E6%97%A5%20%22x%22_.ts`,
  });
  const head = await download(path, {}, 'HEAD');
  const same = ['content-type', 'content-length', 'etag', 'last-modified', 'content-disposition'];
  for (const name of same) expect([name, head.headers.get(name)]).toEqual([name, get.headers.get(name)]);
  const [event] = await eventsOf(system, 'file.downloaded');
  expect(event?.data).toMatchObject({ path, size: 700_001 });
});

test('a name with characters of Latin-1 is sent as UTF-8', async () => {
  const { folder, download } = await onMachine();
  const path = join(folder, 'é.txt');
  writeFileSync(path, 'x');
  const named = (await download(path)).headers.get('content-disposition');
  expect(named).toBe(`attachment; filename="?.txt"; filename*=UTF-8''%C3%A9.txt`);
});

test('one range is answered with its bytes; several or invalid ranges with the whole file', async () => {
  const { folder, download } = await onMachine();
  const path = join(folder, 'a');
  writeFileSync(path, '0123456789');
  for (const [range, status, body, printed] of [
    ['bytes=2-4', 206, '234', 'bytes 2-4/10'],
    ['bytes=7-', 206, '789', 'bytes 7-9/10'],
    ['bytes=-3', 206, '789', 'bytes 7-9/10'],
    ['bytes=-99', 206, '0123456789', 'bytes 0-9/10'],
    ['bytes=0-99', 206, '0123456789', 'bytes 0-9/10'],
    ['bytes=4-2', 200, '0123456789', null],
    ['bytes=0-1,3-4', 200, '0123456789', null],
    ['lines=1-2', 200, '0123456789', null],
    ['bytes=', 200, '0123456789', null],
  ] as const) {
    const answer = await download(path, { Range: range });
    expect([range, answer.status, await answer.text(), answer.headers.get('content-range')]).toEqual([
      range,
      status,
      body,
      printed,
    ]);
  }
});

test('with conditions an unchanged file is not sent, and a download of a replaced file is not resumed', async () => {
  const { folder, download } = await onMachine();
  const path = join(folder, 'a');
  writeFileSync(path, '0123456789');
  const first = await download(path);
  const etag = first.headers.get('etag') ?? '';
  const date = first.headers.get('last-modified') ?? '';
  const past = 'Tue, 14 Nov 2000 22:13:20 GMT';
  for (const [headers, status] of [
    [{ 'If-None-Match': etag }, 304],
    [{ 'If-None-Match': `"x", W/${etag}` }, 304],
    [{ 'If-None-Match': '"x"', 'If-Modified-Since': date }, 200],
    [{ 'If-Modified-Since': date }, 304],
    [{ 'If-Modified-Since': past }, 200],
    [{ 'If-Modified-Since': 'never' }, 200],
    [{ 'If-Match': etag }, 200],
    [{ 'If-Match': '"x"' }, 412],
    [{ 'If-Unmodified-Since': past }, 412],
    [{ 'If-Unmodified-Since': date }, 200],
    [{ Range: 'bytes=0-1', 'If-Range': etag }, 206],
    [{ Range: 'bytes=0-1', 'If-Range': date }, 206],
    [{ Range: 'bytes=0-1', 'If-Range': '"x"' }, 200],
    [{ Range: 'bytes=0-1', 'If-Range': past }, 200],
  ] as const) {
    const answer = await download(path, headers);
    expect([headers, answer.status]).toEqual([headers, status]);
    if (status === 304) expect([await answer.text(), answer.headers.get('etag')]).toEqual(['', etag]);
  }
});

test('an empty file and a file of /proc are sent whole, also with a Range', async () => {
  const { folder, download } = await onMachine();
  writeFileSync(join(folder, 'empty'), '');
  const empty = await download(join(folder, 'empty'), { Range: 'bytes=0-5' });
  expect([empty.status, await empty.text(), empty.headers.get('content-length')]).toEqual([200, '', '0']);
  const proc = await download(`/proc/${process.ppid}/status`, { Range: 'bytes=0-5' });
  expect([proc.status, proc.headers.get('content-length')]).toEqual([200, null]);
  expect(await proc.text()).toContain('VmRSS');
});

test('a client that disconnects in the middle releases the machine', async () => {
  const { system, machineId, folder } = await onMachine(startWithAgent());
  writeFileSync(join(folder, 'big'), Buffer.alloc(64 * 1024 * 1024));
  // A machine can have at most 32 open downloads. So all 40 downloads succeed only if the aborted ones no longer count
  // as open.
  for (let n = 0; n < 40; n += 1) {
    const abort = new AbortController();
    const answer = await fetch(
      `${system.url}/api/v1/machines/${machineId}/files/download?path=${join(folder, 'big')}`,
      { headers: { Authorization: `Bearer ${system.key}` }, signal: abort.signal },
    );
    expect(answer.status).toBe(200);
    abort.abort();
  }
});

test('thirty-two stalled downloads delay neither lists nor contents; one more is unavailable after 10 s', async () => {
  const clock = leapingClock();
  const { system, machineId, folder } = await onMachine(startWithAgent());
  mkdirSync(join(folder, 'd'));
  writeFileSync(join(folder, 'd/a'), 'x');
  writeFileSync(join(folder, 'big'), Buffer.alloc(64 * 1024 * 1024));
  const client = system.client.files;
  const stalled = await Promise.all(
    Array.from({ length: 32 }, () => client.download({ machine_id: machineId, path: join(folder, 'big') })),
  );
  const listed = await client.list({ machine_id: machineId, path: join(folder, 'd') });
  expect(listed.files.map(({ name }) => name)).toEqual(['a']);
  expect((await client.read({ machine_id: machineId, path: join(folder, 'd/a') })).content).toBe('x');
  const refused = client.download({ machine_id: machineId, path: join(folder, 'big') });
  refused.catch(() => undefined);
  // This later request is answered while the 33rd download still waits.
  await client.list({ machine_id: machineId, path: join(folder, 'd') });
  clock.leap(10_001);
  await expect(refused).rejects.toMatchObject({ code: 'unavailable' });
  for (const { body } of stalled) await body?.cancel();
});

test('an offset and a length in the query select a part, from the end if negative', async () => {
  const { folder, download } = await onMachine();
  writeFileSync(join(folder, 'a'), '0123456789');
  for (const [query, status, text] of [
    ['&offset=3', 200, '3456789'],
    ['&offset=3&length=2', 200, '34'],
    ['&offset=-4&length=2', 200, '67'],
    ['&length=0', 200, ''],
    ['&offset=10', 200, ''],
  ] as const) {
    const answer = await download(join(folder, 'a'), {}, 'GET', query);
    expect([query, answer.status, answer.headers.get('content-length'), await answer.text()]).toEqual([
      query,
      status,
      String(text.length),
      text,
    ]);
  }
  const beyond = await download(join(folder, 'a'), {}, 'GET', '&offset=11');
  expect([beyond.status, await codeOf(beyond)]).toEqual([416, 'range_not_satisfiable']);
});
