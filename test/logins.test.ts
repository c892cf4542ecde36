// Logins of browsers: the cookie that replaces a key, the requests for which it counts, and the end of a login. The
// cookie's secret is never stored.
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, test } from 'vitest';
import { withSocket } from '../broker/cli/call-or-start-local-broker.ts';
import type { Scope } from '../shared/api/route.ts';
import { iso } from '../shared/clock.ts';
import { leapingClock } from './commands-fixture.ts';
import { fakeClock } from './fake-clock.ts';
import { type Answer, startFarhand, startWithAgent, type TestSystem } from './start-farhand.ts';

const hour = 3_600_000;
const own = { 'Sec-Fetch-Site': 'same-origin', 'X-Farhand-Console': '1' };

interface Browser {
  id: string;
  cookie: string;
  /** Sends a request with the headers of the console. */
  ask(
    method: string,
    path: string,
    options?: { body?: unknown; headers?: Record<string, string> },
  ): Promise<Answer>;
  /** Sends a request like `ask`. Returns its status and code. */
  outcome(
    method: string,
    path: string,
    options?: { headers?: Record<string, string>; body?: unknown },
  ): Promise<string>;
}

const said = ({ status, body }: Answer): string => [status, body?.error?.code].join(' ').trim();

/** Returns the headers that are not empty. */
const present = (headers: Record<string, string>): Record<string, string> =>
  Object.fromEntries(Object.entries(headers).filter(([, value]) => value !== ''));

/** Logs in with a key or a ticket, as the console does. */
async function logIn(
  system: TestSystem,
  key = system.key,
  headers = {},
): Promise<Browser & { answer: Answer }> {
  const answer = await system.call('POST', '/logins', {
    key,
    body: { name: 'Firefox' },
    headers: { ...own, ...headers },
  });
  const [cookie = ''] = (answer.headers.get('set-cookie') ?? '').split(';');
  const ask: Browser['ask'] = (method, path, options = {}) =>
    system.call(method, path, {
      key: null,
      ...options,
      headers: present({ ...own, Cookie: cookie, ...options.headers }),
    });
  const outcome: Browser['outcome'] = async (...request) => said(await ask(...request));
  return { answer, id: answer.body?.data?.id, cookie, ask, outcome };
}

/**
 * Makes a login ticket for the key with this name, over the socket file of the broker. A login with the ticket has the
 * rights of this key.
 */
async function ticketFor(system: TestSystem, name = 'test'): Promise<string> {
  const { items } = await system.client.keys.list({ limit: 100 });
  const { id = '' } = items.find((key) => key.name === name) ?? {};
  return withSocket(system.dataDir, async (_client, post) => {
    const { ticket } = await post<{ ticket: string }>(`/local/login-tickets/${id}`);
    return ticket;
  });
}

test('a browser resumes a download by itself, with the cookie', async () => {
  const system = await startFarhand();
  const { outcome } = await logIn(system);
  const resumed = { 'Sec-Fetch-Site': 'none', 'Sec-Fetch-Dest': 'empty' };
  const rest = { ...resumed, Range: 'bytes=5-' };
  const refused: [method: string, headers: Record<string, string>][] = [
    ['GET', resumed],
    ['GET', { ...rest, 'Sec-Fetch-Site': 'cross-site' }],
    ['GET', { ...rest, 'Sec-Fetch-Dest': 'document' }],
    ['DELETE', rest],
  ];
  for (const [method, headers] of refused)
    expect([method, headers, await outcome(method, '/machines', { headers })]).toEqual([
      method,
      headers,
      '403 forbidden',
    ]);
  expect(await outcome('GET', '/machines', { headers: rest })).toBe('200');
});

describe('a cookie does not count', () => {
  test('for pages of another site or origin, whatever the method', async () => {
    const system = await startFarhand();
    const { outcome } = await logIn(system);
    const foreign = [
      { 'Sec-Fetch-Site': 'cross-site' },
      { 'Sec-Fetch-Site': 'same-site' },
      { 'Sec-Fetch-Site': 'none' },
      { 'Sec-Fetch-Site': 'cross-site', Origin: system.url },
      { 'Sec-Fetch-Site': '', Origin: 'https://evil.example' },
      { 'Sec-Fetch-Site': '', Origin: 'null' },
      { 'Sec-Fetch-Site': '' },
    ];
    for (const headers of foreign) {
      for (const method of ['GET', 'POST', 'DELETE']) {
        const path = method === 'POST' ? '/join-tokens' : '/machines';
        expect([headers, method, await outcome(method, path, { headers })]).toEqual([
          headers,
          method,
          '403 forbidden',
        ]);
      }
    }
    expect(await outcome('GET', '/machines', { headers: { 'Sec-Fetch-Site': '', Origin: system.url } })).toBe(
      '200',
    );
  });

  test('for a change without the header of the console, which no other page can add', async () => {
    const system = await startFarhand();
    const { outcome } = await logIn(system);
    const headers = { 'X-Farhand-Console': '' };
    expect(await outcome('POST', '/join-tokens', { headers, body: {} })).toBe('403 forbidden');
    expect(await outcome('GET', '/machines', { headers })).toBe('200');
    expect((await system.client.joinTokens.list()).total).toBe(0);
  });

  test('for a WebSocket: without a ticket it opens no terminal, from any page', async () => {
    const { system, machine_id } = await startWithAgent();
    const session = await system.client.sessions.create({ machine_id });
    const { cookie } = await logIn(system);
    const handshake = {
      Connection: 'Upgrade',
      Upgrade: 'websocket',
      'Sec-WebSocket-Key': 'dGhlIHNhbXBsZSBub25jZQ==',
      'Sec-WebSocket-Version': '13',
    };
    const open = (headers: Record<string, string>) =>
      rawStatus(`${system.url}/api/v1/sessions/${session.id}/stream?ticket=x`, {
        ...handshake,
        Cookie: cookie,
        ...headers,
      });
    expect(await open({ Origin: 'https://evil.example', 'Sec-Fetch-Site': 'cross-site' })).toBe(403);
    expect(await open({ Origin: system.url, 'Sec-Fetch-Site': 'same-origin' })).toBe(401);
  });

  test('with a key in the request, which then has the rights of the key', async () => {
    const system = await startFarhand();
    const { cookie } = await logIn(system);
    const { key } = await system.keyed(['files:read']);
    const both = { headers: { ...own, Cookie: cookie } };
    expect(said(await system.call('GET', '/machines', { key, ...both }))).toBe('403 forbidden');
    expect(said(await system.call('GET', '/machines', { key: 'service_apikey_wrong', ...both }))).toBe(
      '401 unauthorized',
    );
    const scripted = { headers: { Cookie: cookie, 'Sec-Fetch-Site': 'cross-site' } };
    expect(said(await system.call('GET', '/machines', scripted))).toBe('200');
  });

  test('if it is unknown, damaged or was removed', async () => {
    const system = await startFarhand();
    const { cookie, id, ask, outcome } = await logIn(system);
    for (const Cookie of [
      '__Host-farhand=',
      '__Host-farhand=x',
      `${cookie}x`,
      cookie.toLowerCase(),
      cookie.replace('__Host-', ''),
    ])
      expect([Cookie, await outcome('GET', '/machines', { headers: { Cookie } })]).toEqual([
        Cookie,
        '401 unauthorized',
      ]);
    expect(await outcome('GET', '/machines', { headers: { Cookie: `a=b; ${cookie}; c=d` } })).toBe('200');
    const gone = await ask('DELETE', `/logins/${id}`);
    expect([said(gone), gone.headers.get('set-cookie')]).toEqual([
      '200',
      expect.stringMatching(/^__Host-farhand=; Max-Age=0;/),
    ]);
    // A console in many tabs sends many requests after the login has ended. No rate limit may refuse them: each tab
    // must get 401, which means that the login has ended.
    for (let asked = 0; asked < 50; asked += 1)
      expect(await outcome('GET', '/machines')).toBe('401 unauthorized');
  });
});

describe('logging in', () => {
  test('is refused without a good key, with a cookie, and over plain HTTP from another machine', async () => {
    const system = await startFarhand({ flags: ['--trusted-proxy', '127.0.0.1'] });
    expect(said((await logIn(system, 'service_apikey_wrong')).answer)).toBe('401 unauthorized');
    const { outcome } = await logIn(system);
    expect(await outcome('POST', '/logins', { body: {} })).toBe('403 forbidden');
    const { answer } = await logIn(system, system.key, {
      'X-Forwarded-Proto': 'http',
      'X-Forwarded-For': '192.0.2.7',
    });
    expect([said(answer), answer.headers.get('set-cookie')]).toEqual(['403 forbidden', null]);
    expect(answer.body.error.message).toContain('needs an encrypted connection');
    const encrypted = await logIn(system, system.key, {
      'X-Forwarded-Proto': 'https',
      'X-Forwarded-For': '192.0.2.7',
    });
    expect([said(encrypted.answer), encrypted.answer.body.data.address]).toEqual(['201', '192.0.2.7']);
    const overSocket = withSocket(system.dataDir, (client) => client.logins.create({}));
    await expect(overSocket).rejects.toThrow('cannot log in, because it uses no API key');
  });

  test('is refused over a proxy on the broker’s machine that is not trusted, or reports no scheme', async () => {
    const system = await startFarhand();
    const ticket = await ticketFor(system);
    for (const headers of [
      { 'X-Forwarded-For': '192.0.2.7' },
      { 'X-Forwarded-For': '127.0.0.1', 'X-Forwarded-Proto': 'https' },
      { Forwarded: 'for=192.0.2.7;proto=https' },
    ]) {
      const refused = await logIn(system, system.key, headers);
      expect([headers, said(refused.answer)]).toEqual([headers, '403 forbidden']);
      expect(refused.answer.body.error.message).toContain('--trusted-proxy');
      expect([headers, said((await logIn(system, ticket, headers)).answer)]).toEqual([
        headers,
        '403 forbidden',
      ]);
    }
    expect(said((await logIn(system, ticket)).answer)).toBe('201');
    const trusting = await startFarhand({ flags: ['--trusted-proxy', '127.0.0.1'] });
    const silent = { 'X-Forwarded-For': '192.0.2.7' };
    expect(said((await logIn(trusting, trusting.key, silent)).answer)).toBe('403 forbidden');
  });

  test('sets a cookie that is sent only to this host, and that no script can read', async () => {
    const system = await startFarhand();
    const { answer, id, ask } = await logIn(system);
    expect(answer.headers.get('set-cookie')).toMatch(
      /^__Host-farhand=[0-9A-Za-z]{43}; Max-Age=604800; Path=\/; HttpOnly; Secure; SameSite=Strict$/,
    );
    const { data: me } = (await ask('GET', '/auth/me')).body;
    expect(me).toMatchObject({
      name: 'test',
      login: { id, name: 'Firefox', key_name: 'test', address: '127.0.0.1' },
    });
    expect(Object.keys(answer.body.data).sort()).toEqual([
      'address',
      'confirmed_at',
      'created_at',
      'expires_at',
      'id',
      'key_id',
      'key_name',
      'last_used_at',
      'name',
    ]);
    expect((await system.client.keys.me()).login).toBeUndefined();
  });

  test('works with a ticket once, for 5 minutes and on the broker’s machine, but not with a similar ticket', async () => {
    const clock = fakeClock(Date.parse('2026-11-23T10:00:00Z'));
    const system = await startFarhand({ flags: ['--trusted-proxy', '127.0.0.1'] });
    const ticket = await ticketFor(system);
    expect(said(await system.call('GET', '/machines', { key: ticket }))).toBe('401 unauthorized');
    const elsewhere = { 'X-Forwarded-Proto': 'https', 'X-Forwarded-For': '192.0.2.7' };
    expect(said((await logIn(system, ticket, elsewhere)).answer)).toBe('401 unauthorized');
    const { outcome, answer } = await logIn(system, ticket);
    expect([said(answer), await outcome('GET', '/machines')]).toEqual(['201', '200']);
    expect(said((await logIn(system, ticket)).answer)).toBe('401 unauthorized');
    const late = await ticketFor(system);
    await clock.advance(5 * 60_000);
    expect(said((await logIn(system, late)).answer)).toBe('401 unauthorized');
  });
});

describe('the rights of a login', () => {
  test('are always those of its key: if these are limited, requests and streams end within 2 s', async () => {
    const system = await startFarhand();
    const { key } = await system.keyed(['machines:read', 'commands:read']);
    const { outcome, cookie } = await logIn(system, key);
    const { data } = (await system.call('GET', '/auth/me', { key })).body;
    expect(await outcome('GET', '/commands')).toBe('200');
    const events = await streamOf(system, '/events/stream', cookie);
    await system.client.keys.update({ key_id: data.id, scopes: ['commands:read'] satisfies Scope[] });
    await events.ended;
    expect([await outcome('GET', '/machines'), await outcome('GET', '/commands')]).toEqual([
      '403 forbidden',
      '200',
    ]);
    const live = await streamOf(system, '/live?topics=events', (await logIn(system)).cookie);
    live.close();
    await system.client.keys.remove({ key_id: data.id });
    expect(await outcome('GET', '/commands')).toBe('401 unauthorized');
  });

  test('end with its key and with the login itself, which closes its streams and its terminals', async () => {
    const { system, machine_id } = await startWithAgent();
    const session = await system.client.sessions.create({ machine_id, shell: 'cat' });
    const { id, ask, cookie } = await logIn(system);
    const other = await logIn(system);
    const events = await streamOf(system, '/live?topics=machines,events', cookie);
    const kept = await streamOf(system, '/live?topics=machines', other.cookie);
    const attached = (await ask('POST', `/sessions/${session.id}/attach`, { body: {} })).body.data;
    const terminal = new WebSocket(attached.stream_url);
    const closed = new Promise<number>((resolve) =>
      terminal.addEventListener('close', ({ code }) => resolve(code)),
    );
    await new Promise((resolve) => terminal.addEventListener('message', resolve, { once: true }));
    expect(said(await other.ask('DELETE', `/logins/${id}`))).toBe('200');
    await events.ended;
    expect(await closed).toBe(4003);
    expect(kept.open()).toBe(true);
    expect(await other.outcome('GET', '/machines')).toBe('200');
    kept.close();
  });

  test('need the key again after 15 minutes for new keys and join tokens and for removing machines', async () => {
    const clock = fakeClock(Date.parse('2026-11-23T10:00:00Z'));
    const system = await startFarhand();
    const { id, ask, outcome } = await logIn(system);
    const body = { name: 'new', scopes: ['files:read'] };
    expect(await outcome('POST', '/api-keys', { body })).toBe('201');
    await clock.advance(15 * 60_000);
    const refused = await ask('POST', '/api-keys', { body });
    expect([said(refused), refused.body.error.details.login_id]).toEqual(['403 confirmation_required', id]);
    expect(await outcome('POST', '/join-tokens', { body: {} })).toBe('403 confirmation_required');
    expect(await outcome('DELETE', '/machines/mach_x')).toBe('403 confirmation_required');
    expect(await outcome('POST', `/api-keys/key_x/rotate`, { body: {} })).toBe('403 confirmation_required');
    expect(await outcome('GET', '/api-keys')).toBe('200');
    expect(await outcome('POST', `/logins/${id}/confirm`)).toBe('403 forbidden');
    const { key } = await system.keyed(['admin']);
    expect(said(await system.call('POST', `/logins/${id}/confirm`, { key }))).toBe('403 forbidden');
    expect(said(await system.call('POST', `/logins/${id}/confirm`))).toBe('200');
    expect(await outcome('POST', '/api-keys', { body })).toBe('201');
    expect(said(await system.call('POST', '/api-keys', { body }))).toBe('201');
  });

  test('list and end the logins of the same key, and as admin those of weaker keys', async () => {
    const system = await startFarhand();
    const admin = await logIn(system);
    const { key } = await system.keyed(['files:read']);
    const weak = await logIn(system, key);
    const ids = async ({ ask }: Browser) =>
      (await ask('GET', '/logins?sort=created_at')).body.data.map((one: { id: string }) => one.id);
    expect([await ids(admin), await ids(weak)]).toEqual([[admin.id, weak.id], [weak.id]]);
    expect(await weak.outcome('DELETE', `/logins/${admin.id}`)).toBe('403 forbidden');
    expect(await weak.outcome('DELETE', '/logins/login_x')).toBe('404 login_not_found');
    const { key: limited } = await system.keyed(['admin'], { tags: ['web'] });
    expect(await (await logIn(system, limited)).outcome('DELETE', `/logins/${weak.id}`)).toBe(
      '403 forbidden',
    );
    expect([
      await admin.outcome('DELETE', `/logins/${weak.id}`),
      await weak.outcome('GET', '/auth/me'),
    ]).toEqual(['200', '401 unauthorized']);
  });
});

describe('a login ends', () => {
  test('when the secret of its key is replaced, unless the login itself requests that', async () => {
    const system = await startFarhand();
    const { id, key } = await system.client.keys.create({ name: 'ci', scopes: ['admin'] });
    const [asking, other] = [await logIn(system, key), await logIn(system, key)];
    const unrelated = await logIn(system);
    const events = await streamOf(system, '/live?topics=events', other.cookie);
    const { data } = (await asking.ask('POST', `/api-keys/${id}/rotate`, { body: {} })).body;
    await events.ended;
    expect(await other.outcome('GET', '/machines')).toBe('401 unauthorized');
    expect(await asking.outcome('GET', '/machines')).toBe('200');
    expect(await unrelated.outcome('GET', '/machines')).toBe('200');
    await system.client.keys.rotate({ key_id: id });
    expect(await asking.outcome('GET', '/machines')).toBe('401 unauthorized');
    expect(said((await logIn(system, data.key)).answer)).toBe('401 unauthorized');
  });

  test('with the grace period of the secret with which it was made, before or after the rotation', async () => {
    const clock = fakeClock(Date.parse('2026-11-23T10:00:00Z'));
    const system = await startFarhand();
    const { id, key } = await system.client.keys.create({ name: 'ci', scopes: ['admin'] });
    const before = await logIn(system, key);
    const { key: next } = await system.client.keys.rotate({ key_id: id, grace: hour });
    const [after, renewed] = [await logIn(system, key), await logIn(system, next)];
    expect([before, after].map(({ answer }) => said(answer))).toEqual(['201', '201']);
    const end = (await before.ask('GET', '/auth/me')).body.data.login.expires_at;
    expect([end, after.answer.body.data.expires_at]).toEqual([iso(clock.now() + hour), end]);
    await clock.advance(hour);
    expect(await before.outcome('GET', '/machines')).toBe('401 unauthorized');
    expect(await after.outcome('GET', '/machines')).toBe('401 unauthorized');
    expect(await renewed.outcome('GET', '/machines')).toBe('200');
  });

  test('at once when a second rotation ends the grace period of its secret', async () => {
    const system = await startFarhand();
    const { id, key } = await system.client.keys.create({ name: 'ci', scopes: ['admin'] });
    const first = await logIn(system, key);
    const { key: next } = await system.client.keys.rotate({ key_id: id, grace: hour });
    const second = await logIn(system, next);
    await system.client.keys.rotate({ key_id: id, grace: hour });
    expect(await first.outcome('GET', '/machines')).toBe('401 unauthorized');
    expect(await second.outcome('GET', '/machines')).toBe('200');
  });

  test('after 12 hours without a request, and each request counts', async () => {
    const clock = leapingClock();
    const system = await startFarhand();
    const { outcome, cookie } = await logIn(system);
    clock.leap(11.9 * hour);
    expect(await outcome('GET', '/machines')).toBe('200');
    const events = await streamOf(system, '/live?topics=events', cookie);
    clock.leap(11.9 * hour);
    expect([await outcome('GET', '/machines'), events.open()]).toEqual(['200', true]);
    clock.leap(12 * hour + 60_000);
    await events.ended;
    expect(await outcome('GET', '/machines')).toBe('401 unauthorized');
    expect((await system.client.logins.list()).total).toBe(0);
  });

  test('after 7 days in any case', async () => {
    const clock = leapingClock();
    const system = await startFarhand();
    const begun = Date.now();
    const { outcome, answer } = await logIn(system);
    for (let hours = 0; hours < 168; hours += 8) {
      expect([hours, await outcome('GET', '/auth/me')]).toEqual([hours, '200']);
      clock.leap(8 * hour);
    }
    expect(await outcome('GET', '/auth/me')).toBe('401 unauthorized');
    expect(Math.round((Date.parse(answer.body.data.expires_at) - begun) / 60_000)).toBe(12 * 60);
  });
});

test('a login survives a restart of the broker', async () => {
  const system = await startFarhand();
  const { cookie } = await logIn(system);
  await system.broker.close();
  const again = await startFarhand({ dataDir: system.dataDir });
  expect(said(await again.call('GET', '/auth/me', { key: null, headers: { ...own, Cookie: cookie } }))).toBe(
    '200',
  );
});

test('neither cookie nor ticket is in any file or log, and audit rows have the id of the login', async () => {
  const system = await startFarhand();
  const ticket = await ticketFor(system);
  const { id, cookie, ask } = await logIn(system, ticket);
  await ask('POST', '/join-tokens', { body: { name: 'audited' } });
  const { items } = await system.client.audit.list({ limit: 100 });
  const rows = items.map(({ action, key_name, login_id, what }) => [
    action,
    key_name,
    login_id,
    what.login_id,
  ]);
  expect(rows).toContainEqual(['logins.create', 'test', null, id]);
  expect(rows).toContainEqual(['joinTokens.create', 'test', id, undefined]);
  const { items: found } = await system.client.audit.list({ login_id: id });
  expect(found.map(({ action }) => action)).toEqual(['joinTokens.create']);
  await system.broker.close();
  const stored = readdirSync(system.dataDir, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => readFileSync(join(entry.parentPath, entry.name), 'latin1'));
  const secrets = [cookie.split('=')[1] ?? '', ticket.replace('login_ticket_', '')];
  expect(secrets.map((secret) => secret.length)).toEqual([43, 43]);
  for (const text of [...stored, ...system.log])
    for (const secret of secrets) expect(text.includes(secret)).toBe(false);
});

/** Opens a stream of server-sent events, as a page of the console does. */
async function streamOf(system: TestSystem, path: string, cookie: string) {
  const ending = new AbortController();
  const response = await fetch(`${system.url}/api/v1${path}`, {
    headers: { 'Sec-Fetch-Site': 'same-origin', Cookie: cookie },
    signal: ending.signal,
  });
  expect(response.status).toBe(200);
  let open = true;
  const read = async (): Promise<void> => {
    for await (const _ of response.body ?? []);
  };
  const ended = read()
    .catch(() => {})
    .finally(() => {
      open = false;
    });
  return { ended, open: () => open, close: () => ending.abort() };
}

/** Sends a request with headers that fetch does not allow. Returns the status. */
async function rawStatus(url: string, headers: Record<string, string>): Promise<number | undefined> {
  const { get } = await import('node:http');
  return new Promise((resolve, reject) => {
    get(url, { headers }, (response) => {
      response.resume();
      resolve(response.statusCode);
    }).on('error', reject);
  });
}
