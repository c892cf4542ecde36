// API keys and join tokens: authentication, limits of keys, idempotency, and uses of tokens.
import { createHash, generateKeyPairSync } from 'node:crypto';
import { once } from 'node:events';
import { readdirSync, readFileSync } from 'node:fs';
import { type IncomingMessage, request } from 'node:http';
import { join } from 'node:path';
import { text } from 'node:stream/consumers';
import { describe, expect, test, vi } from 'vitest';
import { enrollWith } from '../agent/link/dial.ts';
import type { Tuning } from '../broker/start/index.ts';
import type { EnrollRequest } from '../proto/types/farhand/link/v1/EnrollRequest.ts';
import { rawPublicKey } from '../shared/identity-proof.ts';
import { parseJoinToken } from '../shared/join-token.ts';
import { leapingClock } from './commands-fixture.ts';
import { dividedSystem } from './keys-fixture.ts';
import { storedState } from './read-stored-state.ts';
import { joinScripted, linkScripted, scriptedMachine } from './scripted-agent.ts';
import {
  type CallOptions,
  call,
  startFarhand,
  startWithAgent,
  statusAndCode,
  type TestSystem,
} from './start-farhand.ts';

const hour = 3_600_000;

const sha256 = (secret: string): string => createHash('sha256').update(secret).digest('hex');

/** Returns all files of the broker as one text. */
function diskOf({ dataDir }: TestSystem): string {
  return readdirSync(dataDir)
    .filter((name) => !['broker.sock', 'spool'].includes(name))
    .map((name) => readFileSync(join(dataDir, name), 'latin1'))
    .join('\n');
}

async function documents({ dataDir }: TestSystem): Promise<{
  keys: { id: string; hash: string }[];
  join_tokens: { id: string; hash: string; uses_left: number }[];
}> {
  return await storedState(dataDir);
}

// ---- Authentication

/** Kinds of invalid credentials, each derived from a valid key. */
const strangers: Record<string, (key: string) => Record<string, string>> = {
  'no key': () => ({}),
  'an empty Authorization': () => ({ Authorization: '' }),
  'a scheme without a key': () => ({ Authorization: 'Bearer' }),
  'another scheme': (key) => ({ Authorization: `Basic ${btoa(`x:${key}`)}` }),
  'a key without a scheme': (key) => ({ Authorization: key }),
  'a key in another header': (key) => ({ 'X-Api-Key': key }),
  'a key without its prefix': (key) => ({ Authorization: `Bearer ${key.replace(/^.*_/, '')}` }),
  'a key cut short': (key) => ({ Authorization: `Bearer ${key.slice(0, -1)}` }),
  'a key with one more character': (key) => ({ Authorization: `Bearer ${key}a` }),
  'a key in capitals': (key) => ({ Authorization: `Bearer ${key.toUpperCase()}` }),
  'two keys': (key) => ({ Authorization: `Bearer ${key} ${key}` }),
  'the hash of a key': (key) => ({ Authorization: `Bearer ${sha256(key)}` }),
  'a key that was never created': () => ({ Authorization: `Bearer service_apikey_${'a'.repeat(43)}` }),
  'an empty key': () => ({ Authorization: 'Bearer service_apikey_' }),
};

describe('401', () => {
  test('for no key and for every wrong one, with the envelope, the scheme and no secret', async () => {
    const system = await startFarhand();
    for (const [what, headers] of Object.entries(strangers)) {
      for (const path of ['/auth/me', '/machines/mach_none', '/nothing/here']) {
        const answer = await system.call('GET', path, { key: null, headers: headers(system.key) });
        expect([what, path, ...statusAndCode(answer)]).toEqual([what, path, 401, 'unauthorized']);
        expect(answer.headers.get('www-authenticate')).toBe('Bearer');
        expect(answer.body.error.details).toEqual({});
        expect(JSON.stringify(answer.body)).not.toContain(system.key.slice(-20));
      }
    }
  });

  test('for a key in the query string', async () => {
    const system = await startFarhand();
    for (const name of ['key', 'api_key', 'token', 'access_token']) {
      const answer = await system.call('GET', `/auth/me?${name}=${system.key}`, { key: null });
      expect([name, answer.status]).toEqual([name, 401]);
    }
  });

  test('for an expired key, from that moment on', async () => {
    const system = await startFarhand();
    const expires_at = new Date(Date.now() + hour).toISOString();
    const { key } = await system.client.keys.create({ name: 'brief', scopes: ['machines:read'], expires_at });
    expect((await system.call('GET', '/machines', { key })).status).toBe(200);
    const clock = leapingClock();
    clock.set(Date.now() + hour - 60_000);
    expect((await system.call('GET', '/machines', { key })).status).toBe(200);
    clock.set(Date.now() + hour);
    expect(statusAndCode(await system.call('GET', '/machines', { key }))).toEqual([401, 'unauthorized']);
    expect((await system.call('GET', '/machines')).status).toBe(200);
  });

  test('for a revoked key, from the answer of the revocation on, and after a restart', async () => {
    const system = await startFarhand();
    const made = await system.client.keys.create({ name: 'brief', scopes: ['machines:read'] });
    expect((await system.call('GET', '/machines', { key: made.key })).status).toBe(200);
    const removed = await system.call('DELETE', `/api-keys/${made.id}`);
    expect([removed.status, removed.body.data]).toEqual([
      200,
      { deleted: true, schedules: [], webhooks: [], alert_channels: [], saved_commands: [] },
    ]);
    expect(statusAndCode(await system.call('GET', '/machines', { key: made.key }))).toEqual([
      401,
      'unauthorized',
    ]);
    expect(statusAndCode(await system.call('DELETE', `/api-keys/${made.id}`))).toEqual([
      404,
      'key_not_found',
    ]);
    await system.broker.close();
    const again = await startFarhand({ dataDir: system.dataDir });
    expect((await again.call('GET', '/machines', { key: made.key })).status).toBe(401);
    expect((await again.call('GET', '/machines', { key: system.key })).status).toBe(200);
  });
});

test('GET /auth/me returns the key of the request, and works with any key', async () => {
  const { system, agent } = await startWithAgent();
  const expires_at = new Date(Date.now() + hour).toISOString();
  const limits = { machine_ids: [agent.machineId], tags: ['dev'], expires_at };
  const params = { name: 'ci', scopes: ['files:read' as const], ...limits };
  const { key, ...made } = await system.client.keys.create(params);
  const me = await system.call('GET', '/auth/me', { key });
  const used = { last_used_at: expect.any(String), last_used_ip: '127.0.0.1' };
  expect([me.status, me.body.data]).toEqual([200, { ...made, ...used }]);
  expect(made).toEqual({
    id: expect.stringMatching(/^key_[0-9A-Za-z]{22}$/),
    created_at: expect.any(String),
    created_by: (await system.client.keys.me()).id,
    last_used_at: null,
    last_used_ip: null,
    ...params,
  });
  expect((await system.call('GET', '/auth/me')).body.data).toMatchObject({
    scopes: ['admin'],
    machine_ids: null,
    tags: null,
    expires_at: null,
  });
});

test('a secret is in one answer only: no list, file or log of the broker has it, and the state has its hash', async () => {
  const system = await startFarhand();
  const made = await system.call('POST', '/api-keys', {
    body: { name: 'ci', scopes: ['machines:read'] },
    headers: { 'Idempotency-Key': 'once' },
  });
  const { id, key } = made.body.data as { id: string; key: string };
  expect([made.status, key]).toEqual([201, expect.stringMatching(/^service_apikey_[0-9A-Za-z]{43}$/)]);
  const list = await system.call('GET', '/api-keys');
  expect(list.body.data).toContainEqual(expect.objectContaining({ id, name: 'ci' }));
  expect(Object.keys(list.body.data[0]).sort()).toEqual(
    [
      ...['created_at', 'created_by', 'expires_at', 'id', 'last_used_at', 'last_used_ip'],
      ...['machine_ids', 'name', 'scopes', 'tags'],
    ].sort(),
  );
  expect((await documents(system)).keys.find((one) => one.id === id)?.hash).toBe(sha256(key));
  const secret = key.replace('service_apikey_', '');
  expect(JSON.stringify(list.body)).not.toContain(secret);
  expect(diskOf(system)).not.toContain(secret);
});

// ---- The limits of a key

describe('a key cannot create a stronger one:', () => {
  test('a key that expires creates none that lasts longer', async () => {
    const system = await startFarhand();
    const until = (hours: number): string => new Date(Date.now() + hours * 3_600_000).toISOString();
    const { key } = await system.client.keys.create({
      name: 'short',
      scopes: ['admin'],
      expires_at: until(1),
    });
    for (const [expires_at, status] of [
      [undefined, 403],
      [until(2), 403],
      [until(0.5), 201],
    ] as const) {
      const body = { name: 'x', scopes: ['admin'], expires_at };
      expect((await system.call('POST', '/api-keys', { key, body })).status).toBe(status);
    }
  });

  test('a key without admin creates, lists and removes no keys and no join tokens', async () => {
    const system = await startFarhand();
    const { key } = await system.keyed([
      'machines:read',
      'machines:write',
      'files:read',
      'files:write',
      'commands:read',
      'commands:execute',
      'sessions:read',
      'sessions:attach',
      'schedules:read',
      'schedules:write',
      'webhooks:read',
      'webhooks:write',
    ]);
    const before = await documents(system);
    const own = before.keys.at(-1)!.id;
    for (const [method, path, body] of [
      ['POST', '/api-keys', { name: 'x', scopes: ['machines:read'] }],
      ['POST', '/api-keys', { name: 'x', scopes: ['admin'] }],
      ['GET', '/api-keys', undefined],
      ['DELETE', `/api-keys/${own}`, undefined],
      ['DELETE', '/api-keys/key_none', undefined],
      ['POST', '/join-tokens', {}],
      ['GET', '/join-tokens', undefined],
    ] as const) {
      const answer = await system.call(method, path, { key, body });
      expect([method, path, ...statusAndCode(answer)]).toEqual([method, path, 403, 'forbidden']);
      expect(answer.body.error.details).toEqual({ required_scope: 'admin' });
    }
    expect(await documents(system)).toEqual(before);
  });

  test('a key limited to machines or tags creates none for others', async () => {
    const { system, inside, outside, byId, byTag } = await dividedSystem();
    const before = (await documents(system)).keys.length;
    const requests = {
      'no limit': {},
      'another machine': { machine_ids: [outside] },
      'another machine besides its own': { machine_ids: [inside, outside] },
      'a machine that is not there': { machine_ids: ['mach_none'] },
      'another tag': { tags: ['b'] },
      'another tag besides its own': { tags: ['a', 'b'] },
      'its own and another tag': { machine_ids: [inside], tags: ['b'] },
    };
    for (const [what, limits] of Object.entries(requests)) {
      for (const [limit, { key }] of Object.entries({ byId, byTag })) {
        const body = { name: 'x', scopes: ['admin'], ...limits };
        const answer = await system.call('POST', '/api-keys', { key, body });
        expect([what, limit, ...statusAndCode(answer)]).toEqual([what, limit, 403, 'forbidden']);
      }
    }
    // Neither a limit by id nor a limit by tag includes the other, because the tags of machines may change.
    await expect(
      byId.client.keys.create({ name: 'x', scopes: ['admin'], tags: ['a'] }),
    ).rejects.toMatchObject({
      status: 403,
    });
    await expect(
      byTag.client.keys.create({ name: 'x', scopes: ['admin'], machine_ids: [inside] }),
    ).rejects.toMatchObject({ status: 403 });
    expect((await documents(system)).keys).toHaveLength(before);
  });

  test('a limited key creates only a key with the same limits', async () => {
    const { system, inside, outside, byId, byTag } = await dividedSystem();
    const scopes = ['machines:read' as const];
    for (const { key } of [
      await byId.client.keys.create({ name: 'x', scopes, machine_ids: [inside] }),
      await byTag.client.keys.create({ name: 'x', scopes, tags: ['a'] }),
    ]) {
      expect((await system.call('GET', `/machines/${inside}`, { key })).status).toBe(200);
      expect((await system.call('GET', `/machines/${outside}`, { key })).status).toBe(403);
    }
  });

  test('a limited key neither sees nor removes keys for other machines', async () => {
    const { system, inside, outside, byId, byTag } = await dividedSystem();
    await system.keyed(['machines:read'], { machine_ids: [inside, outside] });
    await system.keyed(['machines:read'], { tags: ['a', 'b'] });
    const idsOf = async ({ client }: Pick<TestSystem, 'client'>): Promise<string[]> =>
      (await client.keys.list()).items.map(({ id }) => id);
    const all = (await system.client.keys.list()).items;
    for (const { client } of [byId, byTag]) {
      const own = await client.keys.me();
      expect(await idsOf({ client })).toEqual([own.id]);
      for (const { id } of all) {
        if (id === own.id) continue;
        await expect(client.keys.remove({ key_id: id })).rejects.toMatchObject({
          status: 403,
          code: 'forbidden',
        });
      }
    }
    expect(await idsOf(system)).toEqual(all.map(({ id }) => id));
  });

  test('a limited key changes no tags, because tags decide which machines keys may use', async () => {
    const { system, inside, byId, byTag } = await dividedSystem();
    for (const { client } of [byId, byTag]) {
      await expect(client.machines.update({ machine_id: inside, tags: ['a', 'b'] })).rejects.toMatchObject({
        status: 403,
      });
    }
    expect((await system.client.machines.get({ machine_id: inside })).tags).toEqual(['a']);
  });

  test('a key that is revoked during its request creates nothing', async () => {
    const { system, byTag } = await dividedSystem();
    const own = await byTag.client.keys.me();
    const half = await heldRequest(system, byTag.key);
    await byTag.client.keys.remove({ key_id: own.id });
    const before = await documents(system);
    const { status } = await half.finish(JSON.stringify({ name: 'x', scopes: ['admin'] }));
    expect([401, 403]).toContain(status);
    expect(await documents(system)).toEqual(before);
  });
});

/** A POST /api-keys that is authorized before its body is sent, as the broker's 100 Continue proves. */
async function heldRequest({ url }: TestSystem, key: string) {
  const held = request(`${url}/api/v1/api-keys`, {
    method: 'POST',
    headers: {
      Authorization: `Bearer ${key}`,
      'Content-Type': 'application/json',
      'Transfer-Encoding': 'chunked',
      Expect: '100-continue',
    },
  });
  held.flushHeaders();
  await once(held, 'continue');
  return {
    async finish(body: string): Promise<{ status: number; body: string }> {
      const answered = once(held, 'response') as Promise<[IncomingMessage]>;
      held.end(body);
      const [response] = await answered;
      return { status: response.statusCode ?? 0, body: await text(response) };
    },
  };
}

// ---- Idempotency-Key

const keyed = (value: string, body: unknown): CallOptions => ({
  headers: { 'Idempotency-Key': value },
  body,
});

describe('a repeat with the same Idempotency-Key', () => {
  test.each([
    ['/api-keys', { name: 'ci', scopes: ['machines:read'] }],
    ['/join-tokens', { name: 'ci' }],
  ])('on POST %s is a conflict that names what was made, also after a restart', async (path, body) => {
    const first = await startFarhand();
    const made = await first.call('POST', path, keyed('one', body));
    expect([made.status, made.headers.get('idempotency-replayed')]).toEqual([201, null]);
    const before = await documents(first);
    const repeat = async (system: TestSystem): Promise<void> => {
      const answer = await system.call('POST', path, { ...keyed('one', body), key: first.key });
      expect([...statusAndCode(answer), answer.body.error.details]).toEqual([
        409,
        'conflict',
        { id: made.body.data.id },
      ]);
    };
    await repeat(first);
    expect(await documents(first)).toEqual(before);
    await first.broker.close();
    const second = await startFarhand({ dataDir: first.dataDir });
    await repeat(second);
    expect((await documents(second)).join_tokens).toEqual(before.join_tokens);
    // Leaves out a key that this system has created for itself.
    expect((await documents(second)).keys.slice(0, -1)).toEqual(before.keys);
  });

  test('is a conflict even if the history could not be written when the object was created', async () => {
    const stores: Parameters<NonNullable<Tuning['onStores']>>[0][] = [];
    const system = await startFarhand({ tuning: { onStores: (opened) => void stores.push(opened) } });
    for (const { history } of stores)
      vi.spyOn(history, 'applyOutbox').mockRejectedValueOnce(new Error('database is locked'));
    const body = { name: 'ci', scopes: ['machines:read'] };
    const made = await system.call('POST', '/api-keys', keyed('one', body));
    const repeat = await system.call('POST', '/api-keys', keyed('one', body));
    expect([made.status, repeat.status, repeat.body.error?.details]).toEqual([
      201,
      409,
      { id: made.body.data.id },
    ]);
  });

  test('with another body or path is idempotency_mismatch and creates nothing', async () => {
    const system = await startFarhand();
    const body = { name: 'ci', scopes: ['machines:read'] };
    expect((await system.call('POST', '/api-keys', keyed('one', body))).status).toBe(201);
    const before = await documents(system);
    for (const [path, other] of [
      ['/api-keys', { ...body, name: 'other' }],
      ['/api-keys', { ...body, scopes: ['admin'] }],
      ['/join-tokens', {}],
    ] as const) {
      const answer = await system.call('POST', path, keyed('one', other));
      expect([path, ...statusAndCode(answer)]).toEqual([path, 422, 'idempotency_mismatch']);
    }
    expect(await documents(system)).toEqual(before);
  });

  test.each([
    ['a space', 'a b'],
    ['a letter outside ASCII', 'ä'],
    ['256 characters', 'x'.repeat(256)],
  ])('is refused when the key has %s', async (_what, value) => {
    const system = await startFarhand();
    const answer = await call(`${system.url}/api/v1/join-tokens`, 'POST', {
      key: system.key,
      headers: { 'Idempotency-Key': value },
      body: {},
    });
    expect(statusAndCode(answer)).toEqual([400, 'invalid_request']);
  });

  test('after a request that created nothing runs as a new request', async () => {
    const { system, agent } = await startWithAgent();
    await agent.close();
    const body = { machine_id: agent.machineId, command: 'true' };
    expect(statusAndCode(await system.call('POST', '/commands', keyed('one', body)))).toEqual([
      503,
      'machine_offline',
    ]);
    const back = await system.agent({ dataDir: agent.dataDir });
    const answer = await system.call('POST', '/commands', keyed('one', body));
    expect([answer.status, answer.body.data.status, back.machineId]).toEqual([
      201,
      'completed',
      agent.machineId,
    ]);
  });

  test('by another API key runs as a new request', async () => {
    const system = await startFarhand();
    const other = await system.keyed(['admin']);
    const body = { name: 'ci' };
    expect((await system.call('POST', '/join-tokens', keyed('one', body))).status).toBe(201);
    const answer = await system.call('POST', '/join-tokens', { ...keyed('one', body), key: other.key });
    expect(answer.status).toBe(201);
  });

  test('after 24 hours runs as a new request, and not before', async () => {
    const system = await startFarhand();
    expect((await system.call('POST', '/join-tokens', keyed('one', {}))).status).toBe(201);
    const clock = leapingClock();
    clock.set(Date.now() + 24 * hour - 60_000);
    expect((await system.call('POST', '/join-tokens', keyed('one', {}))).status).toBe(409);
    clock.set(Date.now() + 24 * hour + 60_000);
    expect((await system.call('POST', '/join-tokens', keyed('one', {}))).status).toBe(201);
  });

  test('on POST /commands runs the command once and returns the same record, also after a restart', async () => {
    const first = await startFarhand();
    const agent = await first.agent();
    const body = { machine_id: agent.machineId, command: 'echo ran >> ran.txt', cwd: agent.dataDir };
    const ran = await first.call('POST', '/commands', keyed('one', body));
    expect([ran.status, ran.body.data.status, ran.headers.get('idempotency-replayed')]).toEqual([
      201,
      'completed',
      null,
    ]);
    const repeat = async (system: TestSystem): Promise<void> => {
      const answer = await system.call('POST', '/commands', { ...keyed('one', body), key: first.key });
      expect([answer.status, answer.headers.get('idempotency-replayed')]).toEqual([201, 'true']);
      expect(answer.body.data).toEqual(ran.body.data);
      expect(answer.body.meta.request_id).not.toBe(ran.body.meta.request_id);
    };
    await Promise.all([repeat(first), repeat(first)]);
    await agent.close();
    await first.broker.close();
    const second = await startFarhand({ dataDir: first.dataDir });
    await repeat(second);
    expect((await second.client.commands.list()).total).toBe(1);
    expect(readFileSync(join(agent.dataDir, 'ran.txt'), 'utf8')).toBe('ran\n');
  });

  test('on POST /commands returns the first answer, not the present state', async () => {
    const { system, machine_id } = await startWithAgent();
    const params = keyed('one', { machine_id, command: 'sleep 300', wait: 0 });
    const first = await system.call('POST', '/commands', params);
    const ended = await system.call('DELETE', `/commands/${first.body.data.id}`);
    expect(ended.body.data.status).toBe('cancelled');
    const answer = await system.call('POST', '/commands', params);
    expect(answer.body.data).toEqual(first.body.data);
    expect(answer.body.data.finished_at).toBe(null);
  });

  test('while the first is still running is a conflict, and the command starts once', async () => {
    const system = await startFarhand();
    const machine = await scriptedMachine(system);
    const { machineId } = machine.identity;
    const body = { machine_id: machineId, command: 'true', wait: 50_000 };
    const first = system.call('POST', '/commands', keyed('one', body));
    await machine.next('call');
    expect(statusAndCode(await system.call('POST', '/commands', keyed('one', body)))).toEqual([
      409,
      'conflict',
    ]);
    expect((await system.client.commands.list()).total).toBe(1);
    await system.client.machines.remove({ machine_id: machineId });
    expect((await first).body.data).toMatchObject({ status: 'lost', reason: 'machine_removed' });
  });
});

// ---- Join tokens

/** Returns the request of an agent that joins, with a new key pair. */
function enrolment(token: string, more: Partial<EnrollRequest> = {}): EnrollRequest {
  return {
    token: parseJoinToken(token).secret,
    public_key: rawPublicKey(generateKeyPairSync('ed25519').publicKey),
    name: 'new',
    tags: [],
    host: { hostname: 'new', os: 'linux', arch: 'x64' },
    agent_version: '0.0.0',
    ...more,
  };
}

/** Returns the certificate of the broker's authority. An agent fetches the same one. */
function authorityOf({ dataDir }: TestSystem): string {
  const file = readFileSync(join(dataDir, 'authority.json'), 'utf8');
  return (JSON.parse(file) as { certificate: string }).certificate;
}

async function enrol(system: TestSystem, params: EnrollRequest): Promise<string> {
  return (await enrollWith(system.grpc, authorityOf(system), params)).machine_id;
}

/** The error of a refused join token. It is the same for every reason. */
const notGood = {
  name: 'StartError',
  exitCode: 78,
  message: expect.stringMatching(/unknown, used up or expired/),
};

describe('a join token is refused', () => {
  test('when it is unknown', async () => {
    const system = await startFarhand();
    const token = (await system.client.joinTokens.create({})).token;
    const guess = enrolment(token, { token: 'a'.repeat(43) });
    await expect(enrol(system, guess)).rejects.toMatchObject(notGood);
    const hash = enrolment(token, { token: (await documents(system)).join_tokens[0]!.hash });
    await expect(enrol(system, hash)).rejects.toMatchObject(notGood);
    expect((await system.client.machines.list()).total).toBe(0);
  });

  test('when it is used up, also by two machines at once', async () => {
    const system = await startFarhand();
    const { token } = await system.client.joinTokens.create({});
    const outcomes = await Promise.allSettled([
      enrol(system, enrolment(token)),
      enrol(system, enrolment(token)),
      enrol(system, enrolment(token)),
    ]);
    expect(outcomes.map(({ status }) => status).sort()).toEqual(['fulfilled', 'rejected', 'rejected']);
    expect(outcomes.filter(({ status }) => status === 'rejected')).toEqual(
      Array(2).fill({ status: 'rejected', reason: expect.objectContaining(notGood) }),
    );
    await expect(system.agent({ joinToken: token })).rejects.toMatchObject(notGood);
    expect((await system.client.machines.list()).total).toBe(1);
  });

  test('when it has expired', async () => {
    const system = await startFarhand();
    const { token, expires_at, created_at } = await system.client.joinTokens.create({ expires_in: 1_000 });
    expect(Date.parse(expires_at) - Date.parse(created_at)).toBeLessThan(1_100);
    const clock = leapingClock();
    clock.set(Date.now() + 2_000);
    await expect(system.agent({ joinToken: token })).rejects.toMatchObject(notGood);
    expect((await system.client.machines.list()).total).toBe(0);
  });

  test('when it was deleted', async () => {
    const system = await startFarhand();
    const { id, token } = await system.client.joinTokens.create({});
    expect((await system.call('DELETE', `/join-tokens/${id}`)).body.data).toEqual({ deleted: true });
    expect(statusAndCode(await system.call('DELETE', `/join-tokens/${id}`))).toEqual([
      404,
      'join_token_not_found',
    ]);
    await expect(system.agent({ joinToken: token })).rejects.toMatchObject(notGood);
    expect((await system.client.machines.list()).total).toBe(0);
  });

  test('for the key pair of a machine that joined with another token', async () => {
    const system = await startFarhand();
    const [first, second] = [await system.joinToken(), await system.joinToken()];
    const params = enrolment(first);
    await enrol(system, params);
    await expect(enrol(system, { ...params, token: parseJoinToken(second).secret })).rejects.toMatchObject(
      notGood,
    );
    expect((await system.client.machines.list()).total).toBe(1);
  });

  test.each<[string, Partial<EnrollRequest>]>([
    ['a name with a control character', { name: 'a\u0007' }],
    ['a tag with a comma', { tags: ['a,b'] }],
    ['a public key of another length', { public_key: Buffer.alloc(31) }],
    ['no host', { host: null }],
  ])('with %s, and is not used up by that', async (_what, bad) => {
    const system = await startFarhand();
    const { token } = await system.client.joinTokens.create({});
    await expect(enrol(system, enrolment(token, bad))).rejects.toMatchObject({ name: 'StartError' });
    expect((await documents(system)).join_tokens[0]!.uses_left).toBe(1);
  });
});

describe('a join token', () => {
  test('is in one answer only, and works for as many machines as it has uses', async () => {
    const system = await startFarhand();
    const { token, install, install_missing, ...made } = await system.client.joinTokens.create({
      ...{ name: 'rack', uses: 2 },
    });
    // A checkout has agent packages only after they were built.
    expect([install, install_missing].filter((text) => text === null)).toHaveLength(1);
    expect(token).toMatch(/^farhand_join_[0-9A-Za-z]{43}\.[0-9a-f]{64}(\.[0-9a-f]{64})?$/);
    expect(made).toMatchObject({ name: 'rack', uses: 2, uses_left: 2, tags: null });
    const agents = [await system.agent({ joinToken: token }), await system.agent({ joinToken: token })];
    expect(new Set(agents.map(({ machineId }) => machineId)).size).toBe(2);
    await expect(system.agent({ joinToken: token })).rejects.toMatchObject(notGood);
    const list = await system.call('GET', '/join-tokens');
    expect(list.body.data).toEqual([{ ...made, uses_left: 0 }]);
    expect(diskOf(system)).not.toContain(parseJoinToken(token).secret);
  });

  test('by default is valid for an hour and for one machine', async () => {
    const system = await startFarhand();
    const made = await system.client.joinTokens.create({});
    expect(made.uses).toBe(1);
    expect(Math.round((Date.parse(made.expires_at) - Date.parse(made.created_at)) / 60_000)).toBe(60);
    const clock = leapingClock();
    clock.set(Date.now() + hour - 60_000);
    await system.agent({ joinToken: made.token });
  });

  test('with tags sets them for every machine; without tags the agent’s own tags are used', async () => {
    const system = await startFarhand();
    const tagsOf = async (tags?: string[]): Promise<string[]> => {
      const { token } = await system.client.joinTokens.create(tags ? { tags } : {});
      const { machineId } = await system.agent({ joinToken: token, tags: 'own' });
      return (await system.client.machines.get({ machine_id: machineId })).tags;
    };
    expect(await tagsOf(['fixed', 'prod'])).toEqual(['fixed', 'prod']);
    expect(await tagsOf([])).toEqual([]);
    expect(await tagsOf()).toEqual(['own']);
  });

  test('used again with the same key pair gives the same machine, registered once', async () => {
    const system = await startFarhand();
    const { token } = await system.client.joinTokens.create({ uses: 2 });
    const params = enrolment(token);
    const id = await enrol(system, params);
    expect(await enrol(system, { ...params, name: 'other', tags: ['other'] })).toBe(id);
    expect(await Promise.all([enrol(system, params), enrol(system, params)])).toEqual([id, id]);
    expect((await system.client.machines.list()).items).toMatchObject([
      { id, name: 'new', hostname: 'new', tags: [] },
    ]);
    expect((await system.client.events.list({ type: 'machine.registered' })).total).toBe(1);
    expect((await documents(system)).join_tokens[0]!.uses_left).toBe(1);
    const clock = leapingClock();
    clock.set(Date.now() + 2 * hour);
    expect(await enrol(system, params)).toBe(id);
    await expect(enrol(system, enrolment(token))).rejects.toMatchObject(notGood);
  });

  test('is not needed again, and the broker decides the machine’s name and tags from then on', async () => {
    const { system, agent } = await startWithAgent({ name: 'old', tags: 'a' });
    await agent.close();
    await system.client.machines.update({ machine_id: agent.machineId, name: 'renamed' });
    const back = await system.agent({ dataDir: agent.dataDir, joinToken: 'gone', name: 'x', tags: 'y' });
    expect(back.machineId).toBe(agent.machineId);
    expect(await system.client.machines.get({ machine_id: back.machineId })).toMatchObject({
      name: 'renamed',
      tags: ['a'],
    });
  });

  test('sets name and tags only once, whatever an agent reports later', async () => {
    const system = await startFarhand();
    const identity = await joinScripted(system, 'first');
    // Current agents do not send these fields, but an older or a hostile one may.
    const params = { name: 'renamed', tags: ['prod'], host: { hostname: 'moved', os: 'linux', arch: 'x64' } };
    await linkScripted(system.grpc, identity, params);
    expect(await system.client.machines.get({ machine_id: identity.machineId })).toMatchObject({
      name: 'first',
      tags: [],
      hostname: 'moved',
      status: 'online',
    });
    const { key } = await system.keyed(['machines:read'], { tags: ['prod'] });
    expect((await system.call('GET', '/machines', { key })).body.data).toEqual([]);
  });
});
