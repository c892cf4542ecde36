// Terminals over gRPC: attaching, input, sizes, observers and detaching.
import { expect, test } from 'vitest';
import type { AttachSessionRequest } from '../proto/types/farhand/client/v1/AttachSessionRequest.ts';
import type { AttachSessionResponse__Output } from '../proto/types/farhand/client/v1/AttachSessionResponse.ts';
import type { Streams } from '../shared/grpc-api-client.ts';
import { soon } from './commands-fixture.ts';
import { line, refusalOf, streamsOf } from './grpc-fixture.ts';
import { startWithAgent } from './start-farhand.ts';

/** A system with one machine, and a session whose shell prints nothing by itself. */
async function scene() {
  const { system, machine_id } = await startWithAgent();
  const { session_id } = await system.client.sessions.create({
    machine_id,
    shell: '/bin/sh',
    env: { PS1: '' },
    cols: 90,
    rows: 20,
  });
  return { system, machine_id, session_id, client: await streamsOf(system) };
}

/** Attaches a client and collects its messages. */
function attach(client: Streams, session_id: string, more: object = {}) {
  const asked = line<AttachSessionRequest>({ open: { session_id, ...more } });
  const heard: AttachSessionResponse__Output[] = [];
  const text = (): string => heard.map(({ output }) => output?.toString() ?? '').join('');
  const kind = (name: AttachSessionResponse__Output['message']) =>
    heard.filter(({ message }) => message === name);
  const ended = (async () => {
    for await (const message of client.attachSession(asked.requests)) heard.push(message);
  })();
  ended.catch(() => undefined);
  return {
    heard,
    text,
    kind,
    ended,
    type: (input: string) => asked.send({ input: Buffer.from(input) }),
    send: asked.send,
    leave: asked.end,
  };
}

test('an attach is refused as over REST: by scope, machine, unknown session, and ended session', async () => {
  const { system, session_id, client } = await scene();
  const { machineId: elsewhere } = await system.agent();
  const reader = await streamsOf(system, (await system.keyed(['sessions:read'])).key);
  const foreign = await streamsOf(
    system,
    (await system.keyed(['sessions:attach'], { machine_ids: [elsewhere] })).key,
  );
  expect(await refusalOf(attach(reader, session_id).ended)).toMatchObject({
    code: 'forbidden',
    details: { required_scope: 'sessions:attach' },
  });
  expect(await refusalOf(attach(foreign, session_id).ended)).toMatchObject({ code: 'forbidden' });
  expect(await refusalOf(attach(client, 'sess_none').ended)).toMatchObject({
    code: 'session_not_found',
    details: { session_id: 'sess_none' },
  });
  await system.client.sessions.end({ session_id });
  expect(await refusalOf(attach(client, session_id).ended)).toMatchObject({ code: 'conflict' });
});

test('an invalid action ends the call, and the session goes on', async () => {
  const { system, session_id, client } = await scene();
  for (const bad of [{ size: { cols: 0, rows: 5 } }, { signal: 'SIGSEGV' }, { open: { session_id } }]) {
    const attached = attach(client, session_id);
    await soon(() => attached.kind('attached').length).toBe(1);
    attached.send(bad);
    expect((await refusalOf(attached.ended)).code).toMatch(/^(validation_failed|invalid_request)$/);
  }
  expect((await system.client.sessions.get({ session_id })).status).toBe('CONNECTED');
});

test('an operator sends input and gets output, the input of an observer is refused, and the last message for both is the end', async () => {
  const { system, session_id, client } = await scene();
  const operator = attach(client, session_id);
  await soon(() => operator.kind('attached')[0]?.attached).toMatchObject({ size: { cols: 90, rows: 20 } });
  operator.type('echo one$((1+1))three\n');
  await soon(operator.text).toContain('one2three');
  const observer = attach(client, session_id, { mode: 'ATTACH_MODE_OBSERVER' });
  await soon(observer.text).toContain('one2three');
  observer.type('echo not\n');
  await soon(() => observer.kind('refused').length).toBe(1);
  operator.send({ size: { cols: 111, rows: 33 } });
  operator.type('stty size\n');
  await soon(observer.text).toContain('33 111');
  await soon(() => observer.kind('size').at(-1)?.size).toEqual({ cols: 111, rows: 33 });
  operator.type('exit 7\n');
  await Promise.all([operator.ended, observer.ended]);
  for (const { heard } of [operator, observer]) expect(heard.at(-1)?.end).toMatchObject({ exit_code: 7 });
  expect(observer.text()).not.toContain('not');
  expect((await system.client.sessions.get({ session_id })).attached_count).toBe(0);
});

test('a client that half-closes its call gets all output to the end', async () => {
  const { session_id, client } = await scene();
  const [typing, watching] = [attach(client, session_id), attach(client, session_id)];
  watching.type('echo $((1+1))watched\n');
  watching.leave();
  await soon(typing.text).toContain('2watched');
  typing.type('exit 3\n');
  await watching.ended;
  expect(watching.text()).toContain('2watched');
  expect(watching.heard.at(-1)?.end).toMatchObject({ exit_code: 3 });
});

test('a client that is detached, or whose key is revoked, gets the reason, and the session goes on', async () => {
  const { system, session_id, client } = await scene();
  const { key, client: own } = await system.keyed(['sessions:attach', 'sessions:read']);
  const theirs = attach(await streamsOf(system, key), session_id);
  const ours = attach(client, session_id);
  await soon(() => theirs.kind('attached').length + ours.kind('attached').length).toBe(2);
  const client_id = ours.kind('attached')[0]?.attached?.client_id ?? '';
  await system.client.sessions.detach({ session_id, client_id });
  expect(await refusalOf(ours.ended)).toMatchObject({ code: 'conflict' });
  const { id: key_id } = await own.keys.me();
  await system.client.keys.remove({ key_id });
  expect(await refusalOf(theirs.ended)).toMatchObject({ code: 'unauthorized' });
  await soon(async () => (await system.client.sessions.get({ session_id })).attached_count).toBe(0);
  expect((await system.client.sessions.get({ session_id })).status).toBe('CONNECTED');
});
