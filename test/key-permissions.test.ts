// Rights of a key that change while its requests run, and changes that must not exceed the rights of a key.
import { join } from 'node:path';
import { describe, expect, onTestFinished, test } from 'vitest';
import { createAudit } from '../broker/audit-log.ts';
import type { History } from '../broker/history/history-database.ts';
import { openHistory } from '../broker/history/open-sqlite-file.ts';
import { createAuditRecorder } from '../broker/request-checks/audit-request.ts';
import { AuthorizedRequest, guardOf, handlerOf } from '../broker/request-checks/authorize-and-perform.ts';
import { brokerSettings } from '../broker/settings-schema.ts';
import { type Closers, createParts } from '../broker/start/create-parts.ts';
import type { Key, Machine } from '../broker/state/index.ts';
import type { Scope } from '../shared/api/route.ts';
import { allRoutes } from '../shared/api/route-table.ts';
import type { KeyId, MachineId } from '../shared/api/shared-schemas.ts';
import { readSettings } from '../shared/read-settings.ts';
import { quiet, startFarhand, temporaryFolder } from './start-farhand.ts';

const day = 86_400_000;

/**
 * Creates the parts of a broker without its servers. Requests that are started together are committed together, in
 * order.
 */
async function startBench() {
  const closers: Closers = [];
  onTestFinished(async () => {
    for (const close of closers.reverse()) await close();
  });
  const argv = ['--data-dir', temporaryFolder('rights')];
  const parts = await createParts({
    settings: readSettings(brokerSettings, { argv, env: {} }),
    tuning: {},
    status: { ready: true, url: '', grpc: '', publicGrpc: '', pin: '' },
    publicUrl: () => '',
    closers,
    log: quiet,
  });
  closers.push(() => parts.schedules.stop());

  async function key(name: string, scopes: Scope[], more: Partial<Key> = {}): Promise<Key> {
    const made: Key = {
      id: `key_${name}` as KeyId,
      ...{ name, hash: name, scopes, machine_ids: null, tags: null, previous: null },
      ...{ created_at: new Date().toISOString(), created_by: null, expires_at: null, ...more },
    };
    await parts.state.change((draft) => draft.put('keys', made));
    return made;
  }

  async function machine(name: string, tags: string[] = []): Promise<MachineId> {
    const id = `mach_${name}` as MachineId;
    const created_at = new Date().toISOString();
    const made: Machine = { id, name, tags, public_key: name, join_token_id: 'join_x' as never, created_at };
    await parts.state.change((draft) => draft.put('machines', made));
    return id;
  }

  /** Authorizes a request. Returns a function that runs its handler. */
  function ask(by: Key, action: string, params: object, body: object = {}): () => Promise<unknown> {
    const [noun = '', operation = ''] = action.split('.');
    const route = allRoutes().find((one) => one.noun === noun && one.operation === operation)?.route;
    if (!route) throw new Error(`no ${action}`);
    const request = new AuthorizedRequest(guardOf(route, parts), { address: '', key: by }, `req_${by.name}`);
    const raw = { params: { ...params }, query: {}, headers: {}, body: route.body && { ...body } };
    const { input, caller } = request.admit(raw, new AbortController(), false);
    return async () => handlerOf(parts.handlers, noun, operation)(input, caller);
  }

  /** Starts these requests at once, so that they share a commit. Returns their results. */
  async function together(...deeds: (() => Promise<unknown>)[]): Promise<unknown[]> {
    const first = parts.state.change(() => undefined);
    const outcomes = await Promise.allSettled(deeds.map((act) => act()));
    await first;
    return outcomes.map((one) => (one.status === 'fulfilled' ? 'done' : one.reason.code));
  }
  return { parts, key, machine, ask, together };
}

describe('a right that is removed cannot be used in the same commit:', () => {
  test('a key that is limited by tags adds no tags to its machine', async () => {
    const { parts, key, machine, ask, together } = await startBench();
    const [admin, own] = [await key('admin', ['admin']), await key('own', ['admin'])];
    const machine_id = await machine('one', ['a']);
    const outcomes = await together(
      ask(admin, 'keys.update', { key_id: own.id }, { tags: ['a'] }),
      ask(own, 'machines.update', { machine_id }, { tags: ['a', 'b'] }),
    );
    expect([...outcomes, parts.state.machines.get(machine_id)?.tags]).toEqual(['done', 'forbidden', ['a']]);
  });

  test('a key that is revoked, expired or not admin creates, changes and removes nothing', async () => {
    const { parts, key, machine, ask, together } = await startBench();
    const admin = await key('admin', ['admin']);
    const machine_id = await machine('one');
    const [made, kept] = [await key('made', ['files:read']), parts.state];
    await ask(admin, 'joinTokens.create', {})();
    const [join_token_id = ''] = [...kept.join_tokens.keys()];
    const ends: [string, string, object][] = [
      ['keys.remove', 'unauthorized', {}],
      ['keys.update', 'unauthorized', { expires_at: '2001-01-01T00:00:00Z' }],
      ['keys.update', 'forbidden', { scopes: ['machines:read'] }],
    ];
    for (const [n, [how, code, body]] of ends.entries()) {
      const own = await key(`own${n}`, ['admin']);
      const others = () => [...kept.keys.keys()].filter((id) => id !== own.id);
      const before = others();
      const outcomes = await together(
        ask(admin, how, { key_id: own.id }, body),
        ask(own, 'joinTokens.create', {}),
        ask(own, 'joinTokens.remove', { join_token_id }),
        ask(own, 'machines.remove', { machine_id }),
        ask(own, 'machines.update', { machine_id }, { name: 'x' }),
        ask(own, 'keys.remove', { key_id: made.id }),
        ask(own, 'keys.create', {}, { name: 'x', scopes: ['files:read'] }),
        ask(own, 'webhooks.create', {}, { url: 'http://example.org/', events: ['command.*'] }),
      );
      expect([how, ...outcomes]).toEqual([how, 'done', ...Array(7).fill(code)]);
      expect(others()).toEqual(before);
      expect([kept.join_tokens.size, kept.machines.get(machine_id)?.name]).toEqual([1, 'one']);
    }
  });

  test('a limited key creates and removes no join tokens', async () => {
    const { parts, key, ask, together } = await startBench();
    const admin = await key('admin', ['admin']);
    await ask(admin, 'joinTokens.create', {})();
    const [join_token_id = ''] = [...parts.state.join_tokens.keys()];
    const own = await key('own', ['admin']);
    const outcomes = await together(
      ask(admin, 'keys.update', { key_id: own.id }, { tags: ['a'] }),
      ask(own, 'joinTokens.create', {}),
      ask(own, 'joinTokens.remove', { join_token_id }),
    );
    expect(outcomes).toEqual(['done', 'forbidden', 'forbidden']);
    expect([...parts.state.join_tokens.keys()]).toEqual([join_token_id]);
  });

  test('a schedule that is moved is neither changed nor removed by a key that may not use its new machine', async () => {
    const { parts, key, machine, ask, together } = await startBench();
    const [a, b] = [await machine('a', ['a']), await machine('b')];
    const admin = await key('admin', ['admin']);
    const own = await key('own', ['schedules:write', 'commands:execute'], { tags: ['a'] });
    const params = { machine_id: a, name: 'x', command: 'theirs', cron: '@yearly' };
    await ask(admin, 'schedules.create', {}, params)();
    const [schedule_id = ''] = [...parts.state.schedules.keys()];
    const outcomes = await together(
      ask(admin, 'schedules.update', { schedule_id }, { machine_id: b }),
      ask(own, 'schedules.update', { schedule_id }, { command: 'mine' }),
      ask(own, 'schedules.update', { schedule_id }, { machine_id: a, command: 'mine' }),
      ask(own, 'schedules.remove', { schedule_id }),
    );
    expect(outcomes).toEqual(['done', 'forbidden', 'forbidden', 'forbidden']);
    expect(parts.state.schedules.get(schedule_id)).toMatchObject({
      ...{ machine_id: b, command: 'theirs', requested_by: admin.id },
    });
  });

  test('a key can neither redirect nor remove a webhook that sends more than the key may read', async () => {
    const { parts, key, ask, together } = await startBench();
    const [admin, own] = [await key('admin', ['admin']), await key('own', ['admin'])];
    const params = { url: 'http://example.org/', events: ['command.*'] };
    await ask(admin, 'webhooks.create', {}, params)();
    const [webhook_id = ''] = [...parts.state.webhooks.keys()];
    const outcomes = await together(
      ask(admin, 'keys.update', { key_id: own.id }, { tags: ['a'] }),
      ask(own, 'webhooks.update', { webhook_id }, { url: 'http://example.net/' }),
      ask(own, 'webhooks.remove', { webhook_id }),
    );
    expect([...outcomes, parts.state.webhooks.get(webhook_id)?.url]).toEqual([
      ...['done', 'forbidden', 'forbidden'],
      'http://example.org/',
    ]);
  });

  test('no change restores what was removed', async () => {
    const { parts, key, machine, ask, together } = await startBench();
    const admin = await key('admin', ['admin']);
    const machine_id = await machine('one');
    const params = { machine_id, name: 'x', command: 'true', cron: '@yearly' };
    await ask(admin, 'schedules.create', {}, params)();
    const [schedule_id = ''] = [...parts.state.schedules.keys()];
    const outcomes = await together(
      ask(admin, 'machines.remove', { machine_id }),
      ask(admin, 'machines.update', { machine_id }, { name: 'back' }),
      ask(admin, 'schedules.update', { schedule_id }, { name: 'back' }),
      ask(admin, 'schedules.create', {}, params),
    );
    expect(outcomes).toEqual(['done', 'machine_not_found', 'schedule_not_found', 'machine_not_found']);
    expect([parts.state.machines.size, parts.state.schedules.size]).toEqual([0, 0]);
  });
});

test('a running request reads nothing more once its key is revoked', async () => {
  const { key, machine, ask } = await startBench();
  const [admin, own] = [await key('admin', ['admin']), await key('own', ['machines:read'])];
  await machine('one');
  const list = ask(own, 'machines.list', {});
  expect(await list()).toMatchObject({ total: 1 });
  await ask(admin, 'keys.remove', { key_id: own.id })();
  await expect(list()).rejects.toMatchObject({ code: 'unauthorized' });
});

test('a key that expires creates no key that lasts beyond the year 9999, although such a time sorts first as text', async () => {
  const { key, ask, together } = await startBench();
  const short = await key('short', ['admin'], { expires_at: new Date(Date.now() + day).toISOString() });
  const { id: key_id } = await key('long', ['files:read'], { expires_at: '+010000-01-01T23:58:59.000Z' });
  const outcomes = await together(
    ask(short, 'keys.update', { key_id }, { name: 'x' }),
    ask(short, 'keys.rotate', { key_id }),
  );
  expect(outcomes).toEqual(['forbidden', 'forbidden']);
  const unwritable = { expires_at: '9999-12-31T23:59:59-23:59' };
  const requests: [string, object, object][] = [
    ['keys.create', {}, { name: 'x', scopes: ['files:read'], ...unwritable }],
    ['keys.update', { key_id: short.id }, unwritable],
    ['keys.rotate', { key_id: short.id }, unwritable],
    ['keys.update', { key_id: short.id }, { expires_at: '0000-01-01T00:00:00+00:01' }],
  ];
  for (const [action, params, body] of requests) {
    expect(() => ask(short, action, params, body)).toThrow(/expires_at: must be an ISO 8601 time/);
  }
});

test('a key limited by tags needs at least one tag, and an older key without any tag still loads', async () => {
  const { key, machine, ask, together } = await startBench();
  const admin = await key('admin', ['admin']);
  const writer = await key('writer', ['machines:write']);
  const machine_id = await machine('one');
  const params = { name: 'x', scopes: ['files:read'], tags: [] };
  expect(() => ask(admin, 'keys.create', {}, params)).toThrow(/tags: must contain at least one/);
  expect(() => ask(admin, 'keys.update', { key_id: writer.id }, { tags: [] })).toThrow(/tags/);
  const tag = ask(writer, 'machines.update', { machine_id }, { tags: ['a'] });
  await key('older', ['files:read'], { tags: [] });
  expect(await together(tag)).toEqual(['done']);
  await key('tagged', ['files:read'], { tags: ['a'] });
  expect(await together(tag)).toEqual(['forbidden']);
});

test('a committed change is recorded once for each of its machines, although its caller got an error', async () => {
  const history = openHistory(join(temporaryFolder('history'), 'history.db'), 'one', quiet);
  onTestFinished(() => history.close());
  const { record } = await createAudit(history, day);
  const recorder = createAuditRecorder({ history, record }, quiet);
  onTestFinished(() => recorder.close());
  const who = { key_id: 'key_one' as KeyId, key_name: 'one', request_id: 'req_one', address: '' };
  const machines = ['mach_a', 'mach_b'] as MachineId[];
  const recording = recorder.begin('files.copy', who, () => ({ machines, what: {} }));
  await history.write((journal) => recording.commit(journal));
  // The disk did not confirm the commit, so the caller got an error.
  await recording.settle(new Error('the disk was slow to say so'));
  const rows = await history.all('SELECT machine_id, result FROM audit ORDER BY rowid');
  expect(rows).toEqual(machines.map((machine_id) => ({ machine_id, result: 'ok' })));
});

/** A key that may use only the machine `inside`, and a schedule of this key. move() moves the schedule to `outside`. */
async function movedAway() {
  let history: History | undefined;
  const system = await startFarhand({
    tuning: {
      onStores(parts) {
        ({ history } = parts);
      },
    },
  });
  const [inside, outside] = [(await system.agent()).machineId, (await system.agent()).machineId];
  const scopes: Scope[] = ['schedules:write', 'schedules:read', 'commands:execute'];
  const { key } = await system.keyed(scopes, { machine_ids: [inside] });
  const body = { machine_id: inside, name: 'x', command: 'true', cron: '@yearly' };
  const ask = () => system.call('POST', '/schedules', { key, body, headers: { 'Idempotency-Key': 'once' } });
  const schedule_id = String((await ask()).body.data.id);
  const move = () =>
    system.client.schedules.update({
      schedule_id,
      machine_id: outside,
      command: 'theirs',
      env: { A: 'theirs' },
    });
  return { system, inside, outside, ask, schedule_id, move, forget: () => forgetAnswers(history) };
}

/** Deletes the stored answers. A crash after a commit, before the answer is stored, has the same effect. */
async function forgetAnswers(history: History | undefined): Promise<void> {
  await history?.write((transaction) => transaction.run('UPDATE idempotency SET answer = NULL'));
}

test('a repeated request reveals nothing of a resource that was moved to a machine beyond its key’s limit', async () => {
  const { ask, schedule_id, move, forget } = await movedAway();
  expect((await ask()).body.data.id).toBe(schedule_id);
  await move();
  for (const crash of [() => undefined, forget]) {
    await crash();
    const answer = await ask();
    expect([answer.status, answer.body.error?.code]).toEqual([403, 'forbidden']);
    expect(JSON.stringify(answer.body)).not.toContain('theirs');
  }
});

test('a repeated batch is answered without the machines that its key has lost', async () => {
  const system = await startFarhand();
  const machines = [await system.agent({ tags: 'ours' }), await system.agent({ tags: 'ours' })];
  const [left = '', gone = ''] = machines.map(({ machineId }) => machineId);
  const { key } = await system.keyed(['commands:execute'], { tags: ['ours'] });
  const params = { key, body: { tags: ['ours'], command: 'true' }, headers: { 'Idempotency-Key': 'once' } };
  const received = async (): Promise<string[]> => {
    const { results } = (await system.call('POST', '/commands/batch', params)).body.data;
    return results.map(({ machine_id }: { machine_id: string }) => machine_id).sort();
  };
  expect([await received(), await received()]).toEqual(Array(2).fill([left, gone].sort()));
  await system.client.machines.update({ machine_id: gone, tags: [] });
  expect(await received()).toEqual([left]);
});

test('a change that moves something between machines is reported only to keys that may use both', async () => {
  const { system, inside, outside, schedule_id, move } = await movedAway();
  await move();
  const { key } = await system.keyed(['admin'], { machine_ids: [inside] });
  const seen = await system.call('GET', '/audit?action=schedules.update', { key });
  expect(seen.body.data).toMatchObject([{ machine_id: inside, what: {} }]);
  expect(JSON.stringify(seen.body.data)).not.toContain('theirs');
  const all = await system.client.audit.list({ action: 'schedules.update' });
  expect(new Set(all.items.map(({ machine_id }) => machine_id))).toEqual(new Set([inside, outside]));
  expect(all.items[0]?.what).toMatchObject({ schedule_id, command: 'theirs' });
});

test('a request that names no machine gets the same error whether there are several machines or none', async () => {
  const system = await startFarhand();
  const { key } = await system.keyed(['files:read', 'files:write'], { tags: ['none'] });
  const ask = async (how: { key?: string } = {}): Promise<unknown[]> => {
    const answers = [
      await system.call('GET', '/files?path=/', how),
      await system.call('PUT', '/files/content', { ...how, body: { path: '/nowhere', content: '' } }),
    ];
    return answers.map(({ status, body }) => [status, body.error?.code, body.error?.message]);
  };
  const none = await ask({ key });
  expect(none[0]).toMatchObject([400, 'invalid_request', expect.stringMatching(/machine_id: is missing/)]);
  expect(new Set(none.map(String)).size).toBe(1);
  expect(await ask()).toEqual(none);
  await system.agent();
  // Now there is a single machine, so a request without machine_id is for this machine. The key may not use it, which
  // is refused before all other checks.
  expect((await ask({ key })).map(String)).toEqual(Array(2).fill(expect.stringMatching(/^403,forbidden,/)));
  expect((await system.call('GET', '/files?path=/')).status).toBe(200);
  await system.agent();
  expect(await ask({ key })).toEqual(none);
  expect(await ask()).toEqual(none);
});
