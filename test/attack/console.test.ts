// Attacks on the console's login, its files and its live updates, with and without a key.
import { once } from 'node:events';
import { mkdirSync, writeFileSync } from 'node:fs';
import { get, type IncomingMessage } from 'node:http';
import { connect } from 'node:net';
import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';
import { fakeClock } from '../fake-clock.ts';
import { call, startFarhand, type TestSystem, temporaryFolder } from '../start-farhand.ts';

const own = { 'Sec-Fetch-Site': 'same-origin', 'X-Farhand-Console': '1' };

async function logIn(system: TestSystem): Promise<{ id: string; cookie: string }> {
  const { headers, body } = await system.call('POST', '/logins', { body: {} });
  return { id: body.data.id, cookie: headers.get('set-cookie')?.split(';')[0] ?? '' };
}

/** Sends a GET request with unchanged headers, each character as one byte. */
async function answerTo(system: TestSystem, path: string, headers: Record<string, string>) {
  const request = get(`${system.url}/api/v1${path}`, { headers });
  onTestFinished(() => void request.destroy());
  const [response] = (await once(request, 'response')) as [IncomingMessage];
  return response;
}

/** Follows a stream of events. `text` collects all events. */
async function follow(system: TestSystem, topics: string, key: string): Promise<{ text: string }> {
  const headers = { Authorization: `Bearer ${key}` };
  const response = await answerTo(system, `/live?topics=${topics}`, headers);
  const heard = { text: '' };
  response.setEncoding('utf8').on('data', (piece: string) => {
    heard.text += piece;
  });
  response.on('error', () => undefined);
  await expect.poll(() => heard.text).toContain('event: ready');
  return heard;
}

test('a cookie whose name begins with unusual white space, which browsers do not protect, is not used as a login', async () => {
  const system = await startFarhand();
  const { cookie } = await logIn(system);
  const statusWith = async (Cookie: string) =>
    (await answerTo(system, '/machines', { ...own, Cookie })).statusCode;
  for (const space of ['\u00a0', '\u0085', '_'])
    expect([space, await statusWith(`${space}${cookie}`)]).toEqual([space, 401]);
  expect(await statusWith(`\u00a0__Host-farhand=wrong; ${cookie}`)).toBe(200);
});

test('a browser cannot load a file of a machine as a script or a style', async () => {
  const system = await startFarhand();
  const { machineId } = await system.agent();
  const { cookie } = await logIn(system);
  const path = join(temporaryFolder('files'), 'evil.js');
  writeFileSync(path, 'alert(1)');
  const statusFor = async (dest: string) =>
    (
      await answerTo(system, `/machines/${machineId}/files/download?path=${encodeURIComponent(path)}`, {
        ...own,
        Cookie: cookie,
        'Sec-Fetch-Dest': dest,
      })
    ).statusCode;
  for (const dest of ['script', 'style', 'worker', 'sharedworker', 'serviceworker', 'audioworklet'])
    expect([dest, await statusFor(dest)]).toEqual([dest, 403]);
  for (const dest of ['empty', 'document', 'image'])
    expect([dest, await statusFor(dest)]).toEqual([dest, 200]);
});

test('a key gets no further rights through a login whose confirmation is old', async () => {
  const clock = fakeClock(Date.parse('2026-11-23T10:00:00Z'));
  const system = await startFarhand();
  const weak = await system.client.keys.create({ name: 'weak', scopes: ['files:read'] });
  const { cookie } = await logIn(system);
  await clock.advance(15 * 60_000);
  const { status, body } = await system.call('PATCH', `/api-keys/${weak.id}`, {
    key: null,
    headers: { ...own, Cookie: cookie },
    body: { scopes: ['admin'] },
  });
  expect([status, body.error.code]).toEqual([403, 'confirmation_required']);
  expect((await system.client.keys.get({ key_id: weak.id })).scopes).toEqual(['files:read']);
});

test('live updates do not report a batch whose machines the key has lost', async () => {
  const system = await startFarhand();
  const [mine, other] = [await system.agent(), await system.agent()];
  const made = await system.client.keys.create({ name: 'limited', scopes: ['commands:read'] });
  const batch = await system.client.batches.create({
    ...{ machine_ids: [other.machineId], command: 'sleep 60', wait: 0 },
  });
  const live = await follow(system, `batches:${batch.id}`, made.key);
  await expect.poll(() => live.text).toMatch(/"batch":.*"total":1/);
  const before = live.text.length;
  await system.client.keys.update({ key_id: made.id, machine_ids: [mine.machineId] });
  await system.client.batches.cancel({ batch_id: batch.id });
  const again = await system.client.batches.create({
    ...{ machine_ids: [mine.machineId], command: 'true', wait: 0 },
  });
  const witness = await follow(system, `batches:${again.id}`, made.key);
  await expect.poll(() => witness.text).toContain('"status":"completed"');
  expect(live.text.slice(before)).toBe('');
});

test('live events stop when the key loses the scope of their stream, even if another scope covers them', async () => {
  const system = await startFarhand();
  const { machineId: machine_id } = await system.agent();
  const made = await system.client.keys.create({
    ...{ name: 'limited', scopes: ['machines:read', 'commands:read'] },
  });
  const live = await follow(system, 'events', made.key);
  await system.client.commands.create({ machine_id, command: 'echo before' });
  await expect.poll(() => live.text).toContain('echo before');
  const before = live.text.length;
  await system.client.keys.update({ key_id: made.id, scopes: ['commands:read'] });
  const witness = await follow(system, 'events', system.key);
  await system.client.commands.create({ machine_id, command: 'echo after' });
  await expect.poll(() => witness.text).toContain('echo after');
  expect(live.text.slice(before)).toBe('');
});

test('a topic that is named many times is followed and sent once', async () => {
  const system = await startFarhand();
  const { machineId: machine_id } = await system.agent();
  const live = await follow(system, Array(20).fill('machines').join(), system.key);
  await system.client.machines.update({ machine_id, name: 'renamed' });
  await expect.poll(() => live.text).toContain('renamed');
  expect(live.text.match(/event: machines/g)).toHaveLength(1);
});

// ---- The console's files

const script = 'x'.repeat(400_000);

async function withConsole(): Promise<TestSystem> {
  const folder = temporaryFolder('console');
  mkdirSync(join(folder, 'assets'));
  writeFileSync(join(folder, 'index.html'), '<!doctype html>');
  writeFileSync(join(folder, 'assets/main-ABCD1234.js'), script);
  return startFarhand({ tuning: { console: folder } });
}

test('an asset with a name longer than any file’s is not found, and logs no error', async () => {
  const system = await withConsole();
  for (const length of [101, 300, 5_000]) {
    const { status } = await call(`${system.url}/console/assets/${'a'.repeat(length)}-ABCD1234.js`, 'GET');
    expect([length, status]).toEqual([length, 404]);
  }
  expect(system.log.filter((line) => JSON.parse(line).level >= 50)).toEqual([]);
});

test('clients without a key that request assets and do not read cost little memory', async () => {
  const system = await withConsole();
  const { hostname, port } = new URL(system.url);
  const request = 'GET /console/assets/main-ABCD1234.js HTTP/1.1\r\nHost: b\r\n\r\n';
  const answered = async (): Promise<void> => {
    const socket = connect(Number(port), hostname);
    onTestFinished(() => void socket.destroy());
    socket.on('error', () => undefined);
    socket.write(request.repeat(16));
    await once(socket, 'readable');
  };
  const before = process.memoryUsage().arrayBuffers;
  await Promise.all(Array.from({ length: 60 }, answered));
  const grown = process.memoryUsage().arrayBuffers - before;
  // Requests that each read the file into memory would need 370 MB together.
  expect(grown).toBeLessThan(40 * 2 ** 20);
  expect(await (await fetch(`${system.url}/console/assets/main-ABCD1234.js`)).text()).toBe(script);
});
