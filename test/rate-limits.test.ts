// Rate limits: trusted proxies and client addresses, limits of keys, and limits of wrong keys.
import { randomBytes } from 'node:crypto';
import {
  credentials,
  status as grpcStatus,
  Metadata,
  makeClientConstructor,
  type ServiceError,
} from '@grpc/grpc-js';
import { expect, onTestFinished, test } from 'vitest';
import { withBroker } from '../broker/cli/connect-to-broker.ts';
import { createTrustedProxies, networkOf } from '../broker/client-address.ts';
import { createRateLimits } from '../broker/request-checks/rate-limits.ts';
import { brokerSettings } from '../broker/settings-schema.ts';
import { linkServerName, linkService, streamsService } from '../shared/agent-rpcs.ts';
import { AppError } from '../shared/errors.ts';
import { parseJoinToken } from '../shared/join-token.ts';
import { readSettings } from '../shared/read-settings.ts';
import { caOf, line, refusalOf, streamsOf } from './grpc-fixture.ts';
import { type Answer, call, startFarhand, type TestSystem } from './start-farhand.ts';

const settingsOf = (...argv: string[]) => readSettings(brokerSettings, { argv, env: {} });

const trusting = (...texts: string[]) => createTrustedProxies(texts.flatMap((text) => networkOf(text) ?? []));

/** Makes a call as a proxy on this machine would, for a client with this address. */
function through(
  system: TestSystem,
  address: string,
  key: string | null,
  path = '/machines',
): Promise<Answer> {
  return system.call('GET', path, { key, headers: { 'X-Forwarded-For': address } });
}

/**
 * Returns a function that makes a gRPC call as a proxy on this machine would, for a client with the given address. The
 * call resolves with its gRPC status.
 */
async function grpcCaller(system: TestSystem, service: typeof linkService | typeof streamsService) {
  const Client = makeClientConstructor(service, 'called');
  const ca = credentials.createSsl(Buffer.from(await caOf(system)));
  const client = new Client(system.grpc, ca, { 'grpc.ssl_target_name_override': linkServerName });
  onTestFinished(() => client.close());
  return (method: string, request: object, address: string, key = ''): Promise<number> => {
    const metadata = new Metadata();
    metadata.set('x-forwarded-for', address);
    if (key) metadata.set('authorization', `Bearer ${key}`);
    return new Promise((resolve) => {
      // The cast is safe: the client has a method for each rpc of its service.
      const call = client[method]?.bind(client) as (...args: unknown[]) => {
        on(...args: unknown[]): unknown;
      };
      const done = (error: ServiceError | null): void => resolve(error?.code ?? grpcStatus.OK);
      if (method === 'Enroll') call(request, metadata, done);
      else call(request, metadata).on('error', done);
    });
  };
}

const received = ({ status, headers, body }: Answer) => [
  status,
  body.error?.code,
  Number(headers.get('retry-after') ?? 0) > 0,
];

// ---- Proxies

test('an invalid network or rate stops the start with an error that names it', () => {
  for (const text of ['10.0.0.0/33', '10/8', 'nginx', '::1/129', '10.0.0.1,proxy']) {
    expect(() => settingsOf('--trusted-proxy', text), text).toThrow(/trusted-proxy.*neither an IP address/);
  }
  for (const text of ['0', 'gold', '1e3', '1.5', '__proto__', '']) {
    expect(() => settingsOf('--rate-limit', text), text).toThrow(/must be free, pro, enterprise/);
  }
  expect(settingsOf('--rate-limit', 'pro').rate_limit).toBe(1_000);
  expect(settingsOf('--rate-limit', '7').rate_limit).toBe(7);
  expect(settingsOf().rate_limit).toBe(undefined);
  expect(settingsOf('--trusted-proxy', '10.0.0.0/8, ::1').trusted_proxy).toHaveLength(2);
});

test.each([
  ['no proxy is trusted', [], '10.0.0.1', '1.2.3.4', '10.0.0.1'],
  ['the peer is not trusted', ['10.0.0.0/8'], '11.0.0.1', '1.2.3.4', '11.0.0.1'],
  ['the peer is trusted', ['10.0.0.0/8'], '10.0.0.1', '1.2.3.4', '1.2.3.4'],
  ['a client claims another before', ['10.0.0.0/8'], '10.0.0.1', '9.9.9.9, 1.2.3.4', '1.2.3.4'],
  ['two proxies of ours in a row', ['10.0.0.0/8'], '10.0.0.1', '9.9.9.9,1.2.3.4,10.9.9.9', '1.2.3.4'],
  ['only proxies of ours', ['10.0.0.0/8'], '10.0.0.1', '10.0.0.3, 10.0.0.2', '10.0.0.3'],
  ['no header', ['10.0.0.0/8'], '10.0.0.1', '', '10.0.0.1'],
  ['nonsense', ['10.0.0.0/8'], '10.0.0.1', 'unknown', '10.0.0.1'],
  ['nonsense before a proxy of ours', ['10.0.0.0/8'], '10.0.0.1', '1.2.3.4, <x>, 10.0.0.2', '10.0.0.2'],
  ['an empty word', ['10.0.0.0/8'], '10.0.0.1', '1.2.3.4, ,', '10.0.0.1'],
  ['ports', ['10.0.0.0/8'], '10.0.0.1', '1.2.3.4:5678', '1.2.3.4'],
  ['IPv6 with a port', ['::1'], '::1', '[2001:db8::1]:443', '2001:db8::1'],
  ['a mapped address', ['127.0.0.1'], '127.0.0.1', '::ffff:1.2.3.4', '1.2.3.4'],
  ['IPv6 networks', ['2001:db8::/32'], '2001:db8:1::1', '1.2.3.4', '1.2.3.4'],
  ['a peer with a zone', ['fe80::/10'], 'fe80::1%eth0', '1.2.3.4', '1.2.3.4'],
])('the client address is found behind its proxy: %s', (_what, networks, peer, header, expected) => {
  expect(trusting(...networks).clientOf(peer, header)).toBe(expected);
});

test('X-Forwarded-Proto counts only from a trusted peer, and only if it is a valid scheme', () => {
  const proxies = trusting('10.0.0.0/8');
  expect(proxies.schemeOf('10.0.0.1', 'https')).toBe('https:');
  expect(proxies.schemeOf('10.0.0.1', 'https, http')).toBe('http:');
  for (const wrong of ['', 'javascript', 'https:'])
    expect(proxies.schemeOf('10.0.0.1', wrong)).toBe(undefined);
  expect(proxies.schemeOf('11.0.0.1', 'https')).toBe(undefined);
});

test('wrong keys count for the address that a trusted proxy reports; other peers’ headers are ignored', async () => {
  for (const [flags, expected] of [
    [['--trusted-proxy', '127.0.0.1'], 429],
    [[], 401],
  ] as const) {
    const system = await startFarhand({ flags: [...flags] });
    let last: Answer | undefined;
    for (let n = 0; n <= 30; n += 1) last = await through(system, '203.0.113.9', 'service_apikey_wrong');
    expect([flags, last?.status]).toEqual([flags, expected]);
  }
});

// ---- Wrong keys

test('after 30 wrong keys a source is rate limited, but its valid keys work, and so do other sources', async () => {
  const system = await startFarhand({ flags: ['--trusted-proxy', '127.0.0.1'] });
  for (let n = 0; n < 30; n += 1) {
    expect(received(await through(system, '203.0.113.9', `service_apikey_${n}`))).toEqual([
      401,
      'unauthorized',
      false,
    ]);
  }
  const over = await through(system, '203.0.113.9', 'service_apikey_wrong');
  expect(received(over)).toEqual([429, 'rate_limited', true]);
  expect(over.body.error.details.retry_after).toBe(Number(over.headers.get('retry-after')));
  expect(over.body.error.details.retry_after).toBeLessThanOrEqual(60);
  // A header that is no key counts as a wrong key, even on an unknown path.
  expect((await through(system, '203.0.113.9', 'x', '/nothing')).status).toBe(429);
  expect((await through(system, '203.0.113.9', system.key)).status).toBe(200);
  expect((await through(system, '203.0.113.10', 'service_apikey_wrong')).status).toBe(401);
  // A request without a key does not count as a wrong key. Routes that need no key are not limited.
  expect((await through(system, '203.0.113.9', null)).status).toBe(401);
  const health = await call(`${system.url}/healthz`, 'GET', {
    key: 'service_apikey_wrong',
    headers: { 'X-Forwarded-For': '203.0.113.9' },
  });
  expect(health.status).toBe(200);
});

test('addresses of one IPv6 /64 network are one source, and addresses of another network are another source', async () => {
  const rates = createRateLimits({});
  for (let n = 0; n < 30; n += 1) await rates.countWrongKey(`2001:db8::${n}:1`);
  await expect(rates.countWrongKey('2001:0db8:0:0:ffff::1')).rejects.toMatchObject({ code: 'rate_limited' });
  await rates.countWrongKey('2001:db8:0:1::1');
});

test('a shared address has a higher limit', async () => {
  const rates = createRateLimits({ isShared: (address) => address === '10.0.0.1' });
  for (const address of ['127.0.0.1', '10.0.0.1']) {
    for (let n = 0; n < 1_000; n += 1) await rates.countWrongKey(address);
    await expect(rates.countWrongKey(address)).rejects.toBeInstanceOf(AppError);
  }
});

test('any number of sources is counted in a fixed number of buckets', async () => {
  const rates = createRateLimits({ buckets: 4 });
  // Wrong keys arrive from 121 addresses, one from each. Four buckets allow 30 wrong keys each, 120 in total, so at
  // least one key is refused.
  const strikes = Array.from({ length: 121 }, (_, n) => rates.countWrongKey(`10.0.0.${n}`));
  await expect(Promise.all(strikes)).rejects.toMatchObject({ code: 'rate_limited' });
});

test('wrong join tokens are counted too, and a good one still works', async () => {
  const system = await startFarhand({ flags: ['--trusted-proxy', '127.0.0.1'] });
  const call = await grpcCaller(system, linkService);
  const enrol = (token: string, address: string) =>
    call(
      'Enroll',
      {
        token,
        public_key: randomBytes(32),
        name: 'x',
        host: { hostname: 'x', os: 'x', arch: 'x' },
        agent_version: 'x',
      },
      address,
    );
  const from = '203.0.113.9';
  for (let n = 0; n < 30; n += 1)
    expect(await enrol('farhand_join_wrong', from)).toBe(grpcStatus.UNAUTHENTICATED);
  expect(await enrol('farhand_join_wrong', from)).toBe(grpcStatus.RESOURCE_EXHAUSTED);
  expect(await enrol(parseJoinToken(await system.joinToken()).secret, from)).toBe(grpcStatus.OK);
  expect(await enrol('farhand_join_wrong', '203.0.113.10')).toBe(grpcStatus.UNAUTHENTICATED);
  expect((await system.client.machines.list()).items[0]?.id).toBeTruthy();
});

// ---- Limits of keys

test('answers have no rate limit headers unless a limit is set', async () => {
  const system = await startFarhand();
  const { headers } = await system.call('GET', '/machines');
  expect([...headers.keys()].filter((name) => name.startsWith('x-ratelimit'))).toEqual([]);
});

test('a key over its limit gets 429 with the time to wait; another key and the socket file do not', async () => {
  const system = await startFarhand({ flags: ['--rate-limit', '5'] });
  const { key } = await withBroker({ dataDir: system.dataDir, url: undefined, apiKey: undefined }, (local) =>
    local.keys.create({ name: 'reader', scopes: ['machines:read'] }),
  );
  const before = Math.floor(Date.now() / 1_000);
  // Refused requests with a valid key count as well.
  const paths = ['/machines', '/nothing', '/audit', '/machines/mach_x', '/auth/me'];
  const statuses = [200, 404, 403, 404, 200];
  for (const [n, path] of paths.entries()) {
    const { status, headers } = await system.call('GET', path, { key });
    const [limit, remaining, reset] = ['limit', 'remaining', 'reset'].map((name) =>
      Number(headers.get(`x-ratelimit-${name}`)),
    );
    expect([path, status, limit, remaining]).toEqual([path, statuses[n], 5, 4 - n]);
    expect(reset).toBeGreaterThanOrEqual(before);
    expect(reset).toBeLessThanOrEqual(before + 65);
  }
  const over = await system.call('GET', '/machines', { key });
  expect(received(over)).toEqual([429, 'rate_limited', true]);
  expect(over.headers.get('x-ratelimit-remaining')).toBe('0');
  expect(over.body.error.details).toEqual({ retry_after: Number(over.headers.get('retry-after')) });
  expect((await system.call('GET', '/machines')).status).toBe(200);
  expect((await call(`${system.url}/healthz`, 'GET', { key })).status).toBe(200);
  const wrong = await system.call('GET', '/machines', { key: 'service_apikey_wrong' });
  expect([wrong.status, wrong.headers.get('x-ratelimit-limit')]).toEqual([401, null]);
  await withBroker({ dataDir: system.dataDir, url: undefined, apiKey: undefined }, async (local) => {
    for (let n = 0; n < 10; n += 1) await local.machines.list();
  });
});

test('calls over gRPC are counted with those over REST', async () => {
  const system = await startFarhand({ flags: ['--rate-limit', '3'] });
  const client = await streamsOf(system);
  // Fetching the certificate authority was one request.
  await system.call('GET', '/machines');
  await system.call('GET', '/machines');
  const refusal = await refusalOf(client.events({}));
  expect([refusal.code, refusal.details.retry_after]).toEqual(['rate_limited', expect.any(Number)]);
});

test('refused calls of a key over its limit are recorded if they would change something', async () => {
  const system = await startFarhand({ flags: ['--rate-limit', '2'] });
  const client = await streamsOf(system);
  await system.call('GET', '/machines');
  expect((await system.call('GET', '/machines')).status).toBe(429);
  expect((await system.call('POST', '/join-tokens', { body: {} })).status).toBe(429);
  await refusalOf(client.exec([{ start: { machine_id: 'mach_none', command: 'true' } }]));
  const { items } = await withBroker(
    { dataDir: system.dataDir, url: undefined, apiKey: undefined },
    (local) => local.audit.list({ sort: 'created_at' }),
  );
  expect(items.slice(1).map(({ action, result }) => [action, result])).toEqual([
    ['joinTokens.create', 'rate_limited'],
    ['commands.create', 'rate_limited'],
  ]);
});

test('each signal of a call over gRPC is counted as a request', async () => {
  const system = await startFarhand({ flags: ['--rate-limit', '6'] });
  const local = { dataDir: system.dataDir, url: undefined, apiKey: undefined };
  const joinToken = (await withBroker(local, (client) => client.joinTokens.create({}))).token;
  const { machineId: machine_id } = await system.agent({ joinToken });
  const client = await streamsOf(system);
  // The fetch of the certificate authority, the call itself and these signals together reach the limit.
  const signals = Array.from({ length: 5 }, () => ({ signal: 'SIGCONT' }));
  const asked = line<object>({ start: { machine_id, command: 'cat' } }, ...signals);
  const refusal = await refusalOf(client.exec(asked.requests));
  expect([refusal.code, refusal.details.retry_after]).toEqual(['rate_limited', expect.any(Number)]);
});

test('wrong keys over gRPC are counted with those over REST', async () => {
  const system = await startFarhand({ flags: ['--trusted-proxy', '127.0.0.1'] });
  for (let n = 0; n < 30; n += 1) await through(system, '203.0.113.9', 'service_apikey_wrong');
  const call = await grpcCaller(system, streamsService);
  const events = (address: string) => call('Events', {}, address, 'service_apikey_wrong');
  expect(await events('203.0.113.9')).toBe(grpcStatus.RESOURCE_EXHAUSTED);
  expect(await events('203.0.113.10')).toBe(grpcStatus.UNAUTHENTICATED);
});
