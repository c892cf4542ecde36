// Sessions over REST: refusals, each state with its event, and attached clients.
import { expect, test } from 'vitest';
import type { Caller } from '../shared/api/route-table.ts';
import { soon } from './commands-fixture.ts';
import { scriptedMachine } from './scripted-agent.ts';
import {
  attached,
  begin,
  bench,
  createPort,
  eventsOf,
  join,
  keeper,
  ok,
  refuse,
  ticketIn,
} from './sessions-fixture.ts';
import { startFarhand } from './start-farhand.ts';

/** Resolves with the error code of a refused call. */
async function refusal(promise: Promise<unknown>): Promise<string> {
  const error = await promise.then(
    () => ({ code: 'nothing was refused' }),
    (reason: unknown) => reason as { code: string },
  );
  return error.code;
}

test('a session that cannot be opened is refused before anything is stored', async () => {
  const system = await startFarhand();
  const away = await scriptedMachine(system);
  away.control.cancel();
  const locked = await scriptedMachine(system, { capabilities: ['exec'] });
  const old = await scriptedMachine(system, { methods: ['StartProcess'] });
  await soon(async () => (await system.client.machines.list({ status: 'online' })).total).toBe(2);
  const open = (machine_id: string) => refusal(system.client.sessions.create({ machine_id }));
  expect(await open(away.identity.machineId)).toBe('machine_offline');
  expect(await open(locked.identity.machineId)).toBe('permission_denied');
  expect(await open(old.identity.machineId)).toBe('not_supported');
  expect(await open('mach_none')).toBe('machine_not_found');
  expect((await system.client.sessions.list()).total).toBe(0);
  const { items } = await system.client.audit.list({ action: 'sessions.create' });
  const kept = items.filter(({ result }) => result === 'ok');
  const events = await system.client.events.list({ type: 'session.created' });
  expect([events.total, kept.length]).toEqual([0, 0]);
});

test('a machine has at most 32 open sessions', async () => {
  const one = await bench();
  const made = [];
  for (let n = 0; n < 32; n += 1) made.push(await begin(one));
  const params = { machine_id: one.machine_id };
  expect(await refusal(one.system.client.sessions.create(params))).toBe('unavailable');
  made[0]?.kept.exit();
  await soon(() => refusal(one.system.client.sessions.get({ session_id: 'sess_x' }))).toBe(
    'session_not_found',
  );
  await soon(async () => (await one.system.client.sessions.list({ status: 'DISCONNECTED' })).total).toBe(1);
  await begin(one);
});

test('a terminal is opened with the requested options, and events report its states in order', async () => {
  const one = await bench();
  const params = { shell: '/bin/dash', args: ['-i'], cwd: '/tmp', env: { A: 'b' }, cols: 100, rows: 30 };
  const { session, session_id, call, kept } = await begin(one, { ...params, grace_period: 5_000 });
  expect(call.request).toMatchObject({
    id: session_id,
    spec: { program: '/bin/dash', args: ['-i'], cwd: '/tmp', env: { A: 'b' }, size: { cols: 100, rows: 30 } },
  });
  expect(call.request.spec).toMatchObject({ grace_ms: 5_000 });
  expect(session).toMatchObject({ status: 'CONNECTED', machine_hostname: 'scripted', attached_count: 0 });
  expect(session).toMatchObject({ id: session_id, cols: 100, rows: 30, shell: '/bin/dash', ended_at: null });
  kept.exit({ exit_code: 143, signal: 'SIGTERM' });
  const get = () => one.system.client.sessions.get({ session_id });
  await soon(async () => (await get()).status).toBe('DISCONNECTED');
  expect(await get()).toMatchObject({ exit_code: 143, signal: 'SIGTERM', reason: null });
  expect(await eventsOf(one.system, session_id)).toEqual([
    'created PENDING',
    'connected CONNECTED',
    'disconnected DISCONNECTED',
  ]);
  const { items } = await one.system.client.events.list({ type: 'session.connected' });
  expect(items[0]?.data).toEqual({
    machine_id: one.machine_id,
    machine_name: 'scripted',
    session_id,
    status: 'CONNECTED',
  });
  // The output is on the broker's disk, so the agent may now delete it.
  expect((await one.machine.next('ForgetProcesses')).request).toEqual({ ids: [session_id] });
});

test.each([
  ['refuses', 'permission_denied', 'permission_denied: no'],
  ['is full', 'unavailable', 'unavailable: no'],
])('a session that its agent %s answers as DISCONNECTED with the reason', async (_, code, reason) => {
  const { system, machine, machine_id } = await bench();
  const made = system.client.sessions.create({ machine_id });
  refuse(machine, await machine.next('OpenTerminal'), code);
  const session = await made;
  expect(session).toMatchObject({ status: 'DISCONNECTED', reason, exit_code: null, connected_at: null });
  expect(await eventsOf(system, session.id)).toEqual(['created PENDING', 'disconnected DISCONNECTED']);
});

test('a session whose shell could not start is DISCONNECTED with the reason', async () => {
  const { system, machine, machine_id } = await bench();
  const made = system.client.sessions.create({ machine_id, shell: '/nowhere' });
  const call = await machine.next('OpenTerminal');
  keeper(machine, call).exit({ outcome: 'PROCESS_OUTCOME_NOT_STARTED', reason: 'no such program' });
  expect(await made).toMatchObject({ status: 'DISCONNECTED', reason: 'no such program', exit_code: null });
});

test('a repeat with the same Idempotency-Key opens no second terminal', async () => {
  const { system, machine, machine_id } = await bench();
  const params = { body: { machine_id }, headers: { 'Idempotency-Key': 'one' } };
  const made = system.call('POST', '/sessions', params);
  keeper(machine, await machine.next('OpenTerminal')).started();
  const first = await made;
  const again = await system.call('POST', '/sessions', params);
  expect([first.status, again.status, again.body.data]).toEqual([201, 201, first.body.data]);
  expect(again.headers.get('idempotency-replayed')).toBe('true');
  expect([machine.waiting('OpenTerminal'), (await system.client.sessions.list()).total]).toEqual([0, 1]);
});

test('ending a session hangs up its terminal, and answers when the session has ended', async () => {
  const one = await bench();
  const { session_id, kept } = await begin(one);
  const ended = one.system.client.sessions.end({ session_id });
  const kill = await one.machine.next('KillProcess');
  expect(kill.request).toEqual({ id: session_id, grace_ms: 2_000 });
  ok(one.machine, kill);
  kept.exit({ outcome: 'PROCESS_OUTCOME_CANCELLED', exit_code: 129, signal: 'SIGHUP' });
  const end = { status: 'DISCONNECTED', reason: 'ended', exit_code: 129, signal: 'SIGHUP' };
  expect(await ended).toMatchObject(end);
  expect(await one.system.client.sessions.end({ session_id })).toMatchObject(end);
});

test('sessions are filtered by status, machine and host name, and a key sees only those of its machines', async () => {
  const system = await startFarhand();
  const [here, there] = [await bench({ system }), await bench({ system })];
  const first = await begin(here);
  const second = await begin(there);
  first.kept.exit();
  const ids = async (query: Parameters<typeof system.client.sessions.list>[0], { client } = system) =>
    (await client.sessions.list({ sort: 'created_at', ...query })).items.map(({ id }) => id);
  await soon(() => ids({ status: 'DISCONNECTED' })).toEqual([first.session_id]);
  expect(await ids({})).toEqual([first.session_id, second.session_id]);
  expect(await ids({ machine_id: there.machine_id })).toEqual([second.session_id]);
  expect(await ids({ machine_hostname: 'scripted', limit: 1, offset: 1 })).toEqual([second.session_id]);
  expect(await ids({ machine_hostname: 'other' })).toEqual([]);
  const limited = await system.keyed(['sessions:read'], { machine_ids: [here.machine_id] });
  expect(await ids({}, { ...system, client: limited.client })).toEqual([first.session_id]);
  expect(await refusal(limited.client.sessions.get({ session_id: second.session_id }))).toBe('forbidden');
});

test('attaching to an ended session is a conflict, to an unknown one 404', async () => {
  const one = await bench();
  const { session_id, kept } = await begin(one);
  kept.exit();
  const attach = (id: string) => refusal(one.system.client.sessions.attach({ session_id: id }));
  await soon(() => attach(session_id)).toBe('conflict');
  expect(await attach('sess_none')).toBe('session_not_found');
});

test('a ticket is valid once, and only for its session', async () => {
  const one = await bench();
  const { session_id } = await begin(one);
  const made = await one.system.client.sessions.attach({ session_id, mode: 'observer' });
  expect(made.stream_url).toMatch(
    new RegExp(`^ws://127.0.0.1:\\d+/api/v1/sessions/${session_id}/stream\\?ticket=[0-9A-Za-z]{43}$`),
  );
  const { sessions } = one.system.broker;
  const ticket = ticketIn(made.stream_url);
  expect(sessions.redeem(`${ticket}x`)).toBeUndefined();
  expect(sessions.redeem('')).toBeUndefined();
  const first = sessions.redeem(ticket);
  expect(first).toMatchObject({ attached: { session_id, client_id: made.client_id, mode: 'observer' } });
  expect(sessions.redeem(ticket)).toBeUndefined();
});

test('the stream_url with a ticket has the public address of the broker', async () => {
  const system = await startFarhand({ flags: ['--public-url', 'https://far.example/hand/'] });
  const one = await bench({ system });
  const { session_id } = await begin(one);
  const { stream_url } = await system.client.sessions.attach({ session_id });
  expect(stream_url).toMatch(`wss://far.example/hand/api/v1/sessions/${session_id}/stream?ticket=`);
});

test('attached clients are listed in the session and in events, and detaching never ends it', async () => {
  const one = await bench();
  const { session_id } = await begin(one);
  const { client } = one.system;
  const first = await join(one, session_id);
  const second = await join(one, session_id, { mode: 'observer' });
  expect(await client.sessions.get({ session_id })).toMatchObject({
    attached_count: 2,
    attached_clients: [
      { client_id: first.client_id, key_name: 'test', mode: 'operator' },
      { client_id: second.client_id, key_name: 'test', mode: 'observer' },
    ],
  });
  // With two clients, a request without a client id does not say which one is meant.
  expect(await refusal(client.sessions.detach({ session_id }))).toBe('invalid_request');
  expect(await refusal(client.sessions.detach({ session_id, client_id: 'cli_none' }))).toBe(
    'client_not_found',
  );
  const other = await one.system.keyed(['sessions:attach']);
  expect(await refusal(other.client.sessions.detach({ session_id }))).toBe('invalid_request');
  expect(await other.client.sessions.detach({ session_id, client_id: first.client_id })).toEqual({
    detached: true,
  });
  expect(await first.parted()).toEqual({ why: 'detached' });
  expect(await client.sessions.detach({ session_id })).toEqual({ detached: true });
  expect(await second.parted()).toEqual({ why: 'detached' });
  expect(await client.sessions.get({ session_id })).toMatchObject({ status: 'CONNECTED', attached_count: 0 });
  expect((await eventsOf(one.system, session_id)).slice(2)).toEqual([
    'client_attached CONNECTED operator',
    'client_attached CONNECTED observer',
    'client_detached CONNECTED operator',
    'client_detached CONNECTED observer',
  ]);
});

test('a client that disconnects is detached', async () => {
  const one = await bench();
  const { session_id } = await begin(one);
  const port = await join(one, session_id);
  port.leave();
  await port.served;
  expect((await eventsOf(one.system, session_id)).at(-1)).toBe('client_detached CONNECTED operator');
});

test('a machine has at most 128 clients', async () => {
  const one = await bench();
  const { session_id } = await begin(one);
  const attach = () => one.system.client.sessions.attach({ session_id });
  for (let n = 0; n < 128; n += 32) await Promise.all(Array.from({ length: 32 }, attach));
  expect(await refusal(attach())).toBe('unavailable');
});

test('the audit log records opening, attaching, typing and ending, but no input', async () => {
  const one = await bench();
  const { session_id, kept } = await begin(one);
  const port = await join(one, session_id);
  const observer = await join(one, session_id, { mode: 'observer' });
  port.line.head();
  for (const text of ['secret', 'words']) port.type(text);
  expect(await port.line.input(11)).toBe('secretwords');
  observer.type('me too');
  await observer.note('refused');
  const end = one.system.client.sessions.end({ session_id });
  ok(one.machine, await one.machine.next('KillProcess'));
  kept.exit();
  await end;
  // Leaves out the records about keys and tokens, which were created before the session.
  const list = (query: object = {}) =>
    one.system.client.audit.list({ sort: 'created_at', machine_id: one.machine_id, ...query });
  await soon(async () => (await list()).items.map(({ action, result }) => `${action} ${result}`)).toEqual([
    'sessions.create ok',
    'sessions.attach ok',
    'sessions.attach ok',
    'sessions.input ok',
    'sessions.input forbidden',
    'sessions.end ok',
  ]);
  const { items } = await list({ action: 'sessions.input' });
  expect(items.slice(0, 1)).toEqual([
    {
      id: expect.stringMatching(/^aud_/),
      at: expect.any(String),
      key_id: expect.stringMatching(/^key_/),
      key_name: 'test',
      login_id: null,
      action: 'sessions.input',
      machine_id: one.machine_id,
      what: { session_id, client_id: port.client_id, mode: 'operator' },
      request_id: expect.stringMatching(/^req_/),
      address: '127.0.0.1',
      result: 'ok',
    },
  ]);
  expect((await list({ key: items[0]?.key_id })).total).toBe(6);
  expect((await list({ key: 'key_none' })).total).toBe(0);
});

test('gRPC clients attach without a ticket, if their key may use the machine', async () => {
  const one = await bench();
  const { session_id } = await begin(one);
  const caller: Caller = {
    key_id: 'key_local' as never,
    key_name: 'somebody',
    request_id: 'req_1',
    address: '',
    signal: new AbortController().signal,
    headers: new Headers(),
    may: () => true,
    reaches: () => true,
    reachable: () => undefined,
    commit: () => undefined,
    during: () => caller,
  };
  const { sessions } = one.system.broker;
  const params = { session_id, mode: 'operator' } as const;
  expect(await refusal(sessions.join({ ...params, session_id: 'sess_x' }, caller))).toBe('session_not_found');
  expect(await refusal(sessions.join(params, { ...caller, reaches: () => false }))).toBe('forbidden');
  const attachment = await sessions.join({ ...params, offset: 7 }, caller);
  const port = createPort();
  void attachment.serve(port.port);
  const line = attached(one.machine, await one.machine.next('AttachTerminal'));
  expect(await line.open()).toMatchObject({
    id: session_id,
    client_id: attachment.attached.client_id,
    offset: 7,
  });
  attachment.leave();
  expect(await port.parted()).toEqual({ why: 'detached' });
});
