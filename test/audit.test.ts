// The audit log: every call that changes or runs something, no secret, and a limit on refusals.
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { pino } from 'pino';
import { describe, expect, onTestFinished, test } from 'vitest';
import { createAudit } from '../broker/audit-log.ts';
import type { History } from '../broker/history/history-database.ts';
import { openHistory } from '../broker/history/open-sqlite-file.ts';
import { brokerSettings } from '../broker/settings-schema.ts';
import { startBroker } from '../broker/start/index.ts';
import type { Deed } from '../shared/api/audit.ts';
import { now } from '../shared/clock.ts';
import { newTimedId } from '../shared/ids-and-secrets.ts';
import { readSettings } from '../shared/read-settings.ts';
import { leapingClock, soon } from './commands-fixture.ts';
import { giveAway } from './find-leaked-secrets.ts';
import { hearing, line, refusalOf, streamsOf } from './grpc-fixture.ts';
import { quiet, startFarhand, startWithAgent, type TestSystem, temporaryFolder } from './start-farhand.ts';

type Query = Parameters<TestSystem['client']['audit']['list']>[0];

async function rows({ client }: TestSystem, query: Query = {}) {
  return (await client.audit.list({ sort: 'created_at', limit: 100, ...query })).items;
}

/** Returns `action result` of each audit record, oldest first. */
async function entries(system: TestSystem, query: Query = {}): Promise<string[]> {
  return (await rows(system, query)).map(({ action, result }) => `${action} ${result}`);
}

/** A system with one machine and a folder on it. */
async function onMachine() {
  return { ...(await startWithAgent()), folder: temporaryFolder('audit') };
}

// ---- Refused calls

describe('a refusal', () => {
  test('is recorded with its code for a valid key, and not for an invalid one', async () => {
    const { system, machine_id } = await onMachine();
    const { key, client } = await system.keyed(['machines:write', 'commands:execute'], { tags: ['none'] });
    const { id, name } = await client.keys.me();
    const asked = [
      ['PATCH', `/machines/${machine_id}`, { name: 'x' }],
      ['POST', '/webhooks', {}],
      ['POST', '/commands', '{"machine_id":'],
      ['POST', '/commands', { command: 'true' }],
      ['DELETE', '/commands/cmd_none', undefined],
      ['GET', `/machines/${machine_id}`, undefined],
      ['GET', '/api-keys', undefined],
    ] as const;
    for (const [method, path, body] of asked) {
      expect((await system.call(method, path, { key, body })).status).toBeGreaterThanOrEqual(400);
      expect((await system.call(method, path, { key: 'wrong', body })).status).toBe(401);
    }
    expect(await entries(system, { key: id })).toEqual([
      'machines.update forbidden',
      'webhooks.create forbidden',
      'commands.create invalid_request',
      'commands.create validation_failed',
      'commands.cancel command_not_found',
    ]);
    const [first] = await rows(system, { key: id });
    expect(first).toMatchObject({ key_name: name, machine_id, what: {}, address: '127.0.0.1' });
    expect((await entries(system)).filter((row) => row.includes('unauthorized'))).toEqual([]);
  });

  test('of the machine is recorded as well, and found by its request id', async () => {
    const { system, machine_id, folder } = await onMachine();
    const answer = await system.call('DELETE', `/machines/${machine_id}/files?path=${folder}/none`);
    expect(answer.body.error.code).toBe('file_not_found');
    const request_id = answer.headers.get('x-request-id') ?? '';
    expect(await rows(system, { request_id })).toMatchObject([
      {
        action: 'files.remove',
        machine_id,
        what: { path: `${folder}/none` },
        result: 'file_not_found',
        request_id,
      },
    ]);
  });

  test('repeated seventy times makes sixty rows, and one row with the number of the others', async () => {
    const clock = leapingClock();
    const system = await startFarhand();
    const { key, client } = await system.keyed(['machines:read']);
    const { id } = await client.keys.me();
    for (let n = 0; n < 70; n += 1) await system.call('POST', '/commands', { key, body: {} });
    expect(await entries(system, { key: id })).toEqual(Array(60).fill('commands.create forbidden'));
    clock.leap(60_000);
    const [last] = await rows(system, { key: id, action: 'refusals' });
    expect(last).toMatchObject({ key_id: id, machine_id: null, what: { left_out: 10 }, result: 'forbidden' });
    await system.call('POST', '/commands', { key, body: {} });
    expect((await entries(system, { key: id, action: 'commands.create' })).length).toBe(61);
  });

  test('of a request without a valid key is logged with its address and no secret, a few times a minute', async () => {
    const clock = leapingClock();
    const lines: string[] = [];
    const argv = ['--data-dir', temporaryFolder('broker'), '--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0'];
    const log = pino({ level: 'warn' }, { write: (text: string) => void lines.push(text) });
    const broker = await startBroker(readSettings(brokerSettings, { argv, env: {} }), log);
    onTestFinished(() => broker.close());
    for (let n = 0; n < 30; n += 1) {
      const headers = { Authorization: 'Bearer service_apikey_guess' };
      expect((await fetch(`${broker.url}/api/v1/auth/me`, { headers })).status).toBe(401);
    }
    clock.leap(60_000);
    expect(lines.length).toBe(11);
    expect(JSON.parse(lines[0] ?? '')).toMatchObject({ address: '127.0.0.1' });
    expect(JSON.parse(lines[10] ?? '')).toMatchObject({ address: '127.0.0.1', more: 20 });
    expect(lines.join('')).not.toContain('guess');
  });
});

// ---- Calls that succeed

test('files, commands, input and settings are recorded by path and command line, never by content', async () => {
  const { system, machine_id, folder } = await onMachine();
  const secret = 'correct-horse-battery';
  const { client } = system;
  await client.files.write({ machine_id, path: join(folder, 'a'), content: secret });
  await client.files.put({ machine_id, path: join(folder, 'b'), content: new Blob([secret]) });
  await client.files.upload({ machine_id, path: join(folder, 'c'), content: new Blob([secret]) });
  const late = new FormData();
  late.set('file', new Blob([secret]));
  late.set('path', join(folder, 'd'));
  const headers = { Authorization: `Bearer ${system.key}` };
  const url = `${system.url}/api/v1/machines/${machine_id}/files/upload`;
  expect((await fetch(url, { method: 'POST', body: late, headers })).status).toBe(201);
  await client.files.read({ machine_id, path: join(folder, 'a') });
  await client.commands.create({ machine_id, command: 'cat', stdin: secret, env: { PASSWORD: secret } });
  const cat = await client.commands.async({ machine_id, command: 'cat', input: true });
  await soon(async () => (await client.commands.get({ command_id: cat.id })).status).toBe('running');
  await client.commands.input({ command_id: cat.id, data: secret, end: true });
  await client.webhooks.create({ url: `http://example.org/?${secret}`, events: ['command.*'], secret });
  giveAway(secret);
  const found = await rows(system);
  expect(found.slice(-8).map(({ action, what }) => [action, what.path ?? what.command ?? ''])).toEqual([
    ['files.write', join(folder, 'a')],
    ['files.put', join(folder, 'b')],
    ['files.upload', join(folder, 'c')],
    ['files.upload', join(folder, 'd')],
    ['commands.create', 'cat'],
    ['commands.async', 'cat'],
    ['commands.input', ''],
    ['webhooks.create', ''],
  ]);
  expect(found.slice(-8, -1).map((row) => row.machine_id)).toEqual(Array(7).fill(machine_id));
  expect(JSON.stringify(found)).not.toContain(secret);
});

test('gRPC calls are recorded like REST calls, except those that only read', async () => {
  const { system, machine_id, folder } = await onMachine();
  const client = await streamsOf(system);
  const path = join(folder, 'a');
  const before = (await rows(system)).length;
  await client.writeFile([{ open: { machine_id, path } }, { chunk: Buffer.from('x') }, { commit: {} }]);
  await Array.fromAsync(client.readFile({ machine_id, path }));
  const asked = line<object>({ start: { machine_id, command: 'cat' } });
  const heard = Array.fromAsync(client.exec(asked.requests));
  await soon(async () => (await system.client.commands.list({ status: 'running' })).total).toBe(1);
  asked.send({ signal: 'SIGTERM' });
  await heard;
  const failed = await refusalOf(client.exec([{ start: { machine_id: 'mach_none', command: 'true' } }]));
  expect(failed.code).toBe('machine_not_found');
  const found = (await rows(system)).slice(before);
  expect(found.map(({ action, result }) => `${action} ${result}`)).toEqual([
    'files.put ok',
    'commands.create ok',
    'commands.signal ok',
    'commands.create machine_not_found',
  ]);
  expect(found[1]).toMatchObject({
    machine_id,
    what: { command: 'cat', command_id: expect.stringMatching(/^cmd_/) },
  });
  expect(found.map(({ address }) => address)).toEqual(Array(4).fill('127.0.0.1'));
  expect(found[3]?.request_id).toBe(failed.requestId);
});

test('each signal over gRPC is recorded', async () => {
  const { system, machine_id } = await onMachine();
  const client = await streamsOf(system);
  const command = "trap 'echo caught' USR1; echo ready; while :; do sleep 0.05; done";
  const asked = line<object>({ start: { machine_id, command } });
  const { heard, take } = hearing();
  let sent = 0;
  for await (const { output } of client.exec(asked.requests)) {
    take(output);
    const lines = heard.stdout.toString().split('\n').length - 1;
    if (lines > sent) asked.send({ signal: lines < 4 ? 'SIGUSR1' : 'SIGKILL' });
    sent = lines;
  }
  const signals = await rows(system, { action: 'commands.signal' });
  expect(signals.map(({ what, result }) => [what.signal, result])).toEqual([
    ...Array.from({ length: 3 }, () => ['SIGUSR1', 'ok']),
    ['SIGKILL', 'ok'],
  ]);
});

test('a declared change and its row are one commit', async () => {
  const { system, machine_id } = await onMachine();
  await system.client.machines.update({ machine_id, name: 'renamed' });
  const { machines, outbox } = JSON.parse(readFileSync(join(system.dataDir, 'state.json'), 'utf8'));
  expect(machines[0].name).toBe('renamed');
  const [row] = await rows(system, { action: 'machines.update' });
  expect(outbox).toContainEqual(
    expect.objectContaining({ kind: 'audit', id: row?.id, deed: expect.objectContaining({ machine_id }) }),
  );
});

/**
 * Starts a broker and counts the write transactions of its history (`writes`), and those of them that append an entry,
 * such as an audit record (`appending`).
 */
async function counting() {
  const count = { writes: 0, appending: 0 };
  const system = await startFarhand({
    tuning: {
      onStores({ history }) {
        const write = history.write.bind(history);
        history.write = (change) => {
          count.writes += 1;
          return write(async (transaction) => {
            let appends = 0;
            const append: typeof transaction.append = (entry) => {
              appends = 1;
              transaction.append(entry);
            };
            const result = await change({ ...transaction, append });
            count.appending += appends;
            return result;
          });
        };
      },
    },
  });
  return { system, count };
}

test('a change of a file, its event and its row are one transaction', async () => {
  const { system, count } = await counting();
  const { machineId: machine_id } = await system.agent();
  const path = join(temporaryFolder('audit'), 'file');
  await system.client.files.write({ machine_id, path, content: 'x' });
  count.appending = 0;
  await system.client.files.write({ machine_id, path, content: 'y' });
  await system.client.files.remove({ machine_id, path });
  expect(count.appending).toBe(2);
  expect(await entries(system, { machine_id })).toEqual([
    'files.write ok',
    'files.write ok',
    'files.remove ok',
  ]);
  const { items } = await system.client.events.list({ machine_id, sort: 'created_at' });
  expect(items.slice(-3).map(({ type }) => type)).toEqual(['file.uploaded', 'file.uploaded', 'file.deleted']);
});

test('the row of an upload has the path that was written, if the form and the query name two', async () => {
  const { system, machine_id } = await startWithAgent();
  const folder = temporaryFolder('audit');
  const form = new FormData();
  form.set('path', join(folder, 'real'));
  form.set('file', new Blob(['x']));
  const url = `${system.url}/api/v1/machines/${machine_id}/files/upload?path=${folder}/other`;
  const headers = { Authorization: `Bearer ${system.key}` };
  expect((await fetch(url, { method: 'POST', headers, body: form })).status).toBe(201);
  expect(readdirSync(folder)).toEqual(['real']);
  const { items } = await system.client.audit.list({ action: 'files.upload' });
  expect(items).toMatchObject([{ what: { path: join(folder, 'real') } }]);
});

test('a command and its row are stored in a single transaction', async () => {
  const { system, count } = await counting();
  const agent = await system.agent();
  await agent.close();
  await soon(async () => (await system.client.machines.list({ status: 'offline' })).total).toBe(1);
  count.writes = 0;
  const params = { machine_id: agent.machineId, command: 'true', queue_for: 60_000 };
  const { id } = await system.client.commands.async(params);
  expect(count.writes).toBe(1);
  expect(await rows(system, { action: 'commands.async' })).toMatchObject([{ what: { command_id: id } }]);
});

test('a batch has a row for each of its machines, and the row of a repeated request says that it did nothing', async () => {
  const system = await startFarhand();
  const machine_ids = [(await system.agent()).machineId, (await system.agent()).machineId];
  const ask = () =>
    system.client.batches.create({ machine_ids, command: 'true' }, { idempotencyKey: 'once' });
  const { id } = await ask();
  const found = await rows(system, { action: 'batches.create' });
  expect(found.map(({ machine_id }) => machine_id)).toEqual(machine_ids);
  expect(found[0]?.what).toEqual({ command: 'true', batch_id: id });
  await ask();
  const again = (await rows(system, { action: 'batches.create' })).slice(2);
  expect(again).toMatchObject([{ result: 'ok', what: { replayed: true } }]);
});

// ---- Who may read the audit log

test('a limited admin reads the rows of its machines and its own, without details of other machines', async () => {
  const system = await startFarhand();
  const [mine, other] = [(await system.agent()).machineId, (await system.agent()).machineId];
  const { key, client } = await system.keyed(['admin'], { machine_ids: [mine] });
  expect(
    (await system.call('GET', '/audit', { key: (await system.keyed(['machines:read'])).key })).status,
  ).toBe(403);
  const folder = temporaryFolder('audit');
  await system.client.files.write({ machine_id: other, path: join(folder, 'theirs'), content: '' });
  await system.client.files.write({ machine_id: mine, path: join(folder, 'mine'), content: '' });
  const copy = { source: join(folder, 'theirs'), destination: join(folder, 'copied') };
  await system.client.files.copy({ machine_id: other, ...copy, destination_machine_id: mine });
  await system.client.joinTokens.create({});
  await client.keys.create({ name: 'own', scopes: ['files:read'], machine_ids: [mine] });
  const seen = await client.audit.list({ sort: 'created_at' });
  expect(seen.items.map(({ action, machine_id, what }) => [action, machine_id, what.path])).toEqual([
    ['files.write', mine, join(folder, 'mine')],
    ['files.copy', mine, undefined],
    ['keys.create', null, undefined],
  ]);
  expect(seen.total).toBe(3);
  expect(JSON.stringify(seen)).not.toMatch(new RegExp(`${other}|theirs`));
  const copied = await rows(system, { action: 'files.copy' });
  expect(new Set(copied.map(({ machine_id }) => machine_id))).toEqual(new Set([mine, other]));
  expect(copied[0]?.what).toMatchObject(copy);
  expect((await system.call('DELETE', '/audit', { key })).status).toBe(405);
});

test('an entry is found by its id among others, also an entry of version 0.1.0, whose id has no time', async () => {
  const stores: { history: History }[] = [];
  const system = await startFarhand({ tuning: { onStores: (opened) => void stores.push(opened) } });
  const { client } = system;
  for (const name of ['one', 'two', 'three']) await client.keys.create({ name, scopes: ['machines:read'] });
  const all = await rows(system);
  expect(all.length).toBeGreaterThan(2);
  for (const { id } of all) expect(await rows(system, { id })).toEqual(all.filter((one) => one.id === id));
  for (const id of ['aud_none', 'aud_0000000000000000000000', '_', 'é'])
    expect(await rows(system, { id })).toEqual([]);
  // Version 0.1.0 made random ids. The search must find such an id, even if it looks like an id with a time in the
  // future, long ago or now.
  const randomIds = ['aud_zzzzzzzzzzzzzzzzzzzzzz', 'aud_0000zzzzzzzzzzzzzzzzzz', newTimedId('audit', now())];
  for (const old of randomIds) {
    await stores[0]?.history.write((transaction) =>
      transaction.run('UPDATE audit SET id = ? WHERE seq = (SELECT max(seq) FROM audit)', old),
    );
    expect((await rows(system, { id: old })).map(({ id }) => id)).toEqual([old]);
  }
});

test('rows are deleted by age and by number, the oldest first, and an action is recorded once', async () => {
  const history = openHistory(join(temporaryFolder('history'), 'history.db'), 'one', quiet);
  onTestFinished(() => history.close());
  const audit = await createAudit(history, 3_600_000, 10);
  const deed = (n: number): Deed => ({
    ...{ key_id: 'key_one', key_name: 'one', machine_id: null, what: { n }, result: 'ok' },
    ...{ action: 'machines.update', request_id: `req_${n}`, address: '' },
  });
  await history.write((journal) => {
    for (let n = 0; n < 25; n += 1) audit.record(journal, deed(n), `aud_${n}`);
    audit.record(journal, { ...deed(24), what: { n: 99 } }, 'aud_24');
  });
  await history.prune();
  const kept = await history.all('SELECT what FROM audit ORDER BY rowid');
  expect(kept.map(({ what }) => JSON.parse(String(what)).n)).toEqual([
    15, 16, 17, 18, 19, 20, 21, 22, 23, 24,
  ]);
});
