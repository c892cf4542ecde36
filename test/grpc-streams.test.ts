// The gRPC streams of clients: the same refusals as over REST, commands with input and output, files, and how calls
// end.
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { connect as connectHttp2, constants } from 'node:http2';
import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';
import type { ExecRequest } from '../proto/types/farhand/client/v1/ExecRequest.ts';
import type { WriteFileRequest } from '../proto/types/farhand/client/v1/WriteFileRequest.ts';
import { streamsService } from '../shared/agent-rpcs.ts';
import type { Scope } from '../shared/api/route.ts';
import { type Code, codes } from '../shared/errors.ts';
import { connect, type Streams } from '../shared/grpc-api-client.ts';
import { shared } from './close-after-tests.ts';
import { gate, soon } from './commands-fixture.ts';
import { caOf, hearing, line, refusalOf, streamsOf } from './grpc-fixture.ts';
import {
  type CallOptions,
  startFarhand,
  startWithAgent,
  type TestSystem,
  temporaryFolder,
} from './start-farhand.ts';

const sharedScene = shared(startWithAgent);

/** A system with one machine, and a client with every right. */
async function scene(opened = sharedScene()) {
  const { system, machine_id } = await opened;
  return { system, machine_id, client: await streamsOf(system) };
}

/** Returns a function that returns the client of a key. The first call for a key creates the client. */
async function clientsOf(system: TestSystem): Promise<(apiKey: string) => Streams> {
  const ca = await caOf(system);
  const made = new Map<string, Streams>();
  return (apiKey) => {
    const client = made.get(apiKey) ?? connect({ address: system.grpc, ca, apiKey });
    if (!made.has(apiKey)) onTestFinished(() => client.close());
    made.set(apiKey, client);
    return client;
  };
}

// ---- Refusals

/** An rpc and the route that does the same. Both must refuse requests in the same way. */
interface Twin {
  rpc: keyof Streams;
  scope: Scope;
  /** Which kind of id the rpc takes. */
  noun: 'machine' | 'command';
  stream(client: Streams, id: string, wrong: boolean): Promise<unknown> | AsyncIterable<unknown>;
  rest(id: string, wrong: boolean): { method: string; path: string } & CallOptions;
}

const twins: Twin[] = [
  {
    rpc: 'exec',
    scope: 'commands:execute',
    noun: 'machine',
    stream: (client, machine_id, wrong) =>
      client.exec([{ start: { machine_id, command: wrong ? '' : 'true' } }]),
    rest: (machine_id, wrong) => ({
      method: 'POST',
      path: '/commands',
      body: { machine_id, command: wrong ? '' : 'true' },
    }),
  },
  {
    rpc: 'followCommand',
    scope: 'commands:read',
    noun: 'command',
    stream: (client, command_id, wrong) =>
      client.followCommand({ command_id, stdout_offset: wrong ? 2 ** 63 : 0 }),
    rest: (command_id, wrong) => ({
      method: 'GET',
      path: `/commands/${command_id}/stream`,
      headers: { 'Last-Event-ID': wrong ? `${2 ** 63}.0` : '0.0' },
    }),
  },
  {
    rpc: 'readFile',
    scope: 'files:read',
    noun: 'machine',
    stream: (client, machine_id, wrong) => client.readFile({ machine_id, path: wrong ? '' : '/x' }),
    rest: (machine_id, wrong) => ({
      method: 'GET',
      path: `/machines/${machine_id}/files/download?path=${wrong ? '' : '/x'}`,
    }),
  },
  {
    rpc: 'writeFile',
    scope: 'files:write',
    noun: 'machine',
    stream: (client, machine_id, wrong) =>
      client.writeFile([{ open: { machine_id, path: wrong ? '' : '/x/y/z' } }, { commit: {} }]),
    rest: (machine_id, wrong) => ({
      method: 'PUT',
      path: `/machines/${machine_id}/files/raw?path=${wrong ? '' : '/x/y/z'}`,
    }),
  },
  {
    rpc: 'watchFiles',
    scope: 'files:read',
    noun: 'machine',
    stream: (client, machine_id, wrong) =>
      client.watchFiles({ machine_id, path: '/x', path_encoding: wrong ? 'rot13' : '' }),
    rest: (machine_id, wrong) => ({
      method: 'GET',
      path: `/machines/${machine_id}/files/watch?path=/x&recursive=false${wrong ? '&path_encoding=rot13' : ''}`,
    }),
  },
  {
    rpc: 'events',
    scope: 'machines:read',
    noun: 'machine',
    stream: (client, machine_id, wrong) => client.events({ machine_id, types: wrong ? ['x'] : [] }),
    rest: (machine_id, wrong) => ({
      method: 'GET',
      path: `/events/stream?machine_id=${machine_id}${wrong ? '&types=x' : ''}`,
    }),
  },
];

test('every rpc makes its checks in the same order as REST, and refuses with the same codes and details', async () => {
  const system = await startFarhand();
  const machines = await Promise.all([system.agent(), system.agent()]);
  const [mine = '', foreign = ''] = machines.map(({ machineId }) => machineId);
  const commands = await Promise.all(
    [mine, foreign].map((machine_id) => system.client.commands.create({ machine_id, command: 'true' })),
  );
  const ids = { machine: [mine, foreign], command: commands.map(({ id }) => id) };
  const scopeless = (await system.keyed(['webhooks:read'])).key;
  const clientOf = await clientsOf(system);
  for (const { rpc, scope, noun, stream, rest } of twins) {
    const limited = (await system.keyed([scope], { machine_ids: [mine] })).key;
    const [own = '', other = ''] = ids[noun];
    const cases: [key: string, id: string, code: string | undefined][] = [
      ['service_apikey_none', 'nowhere', 'unauthorized'],
      [scopeless, 'nowhere', 'forbidden'],
      [limited, other, 'forbidden'],
      [limited, 'nowhere', noun === 'machine' ? 'forbidden' : 'command_not_found'],
      [system.key, 'nowhere', `${noun}_not_found`],
      [limited, own, undefined],
    ];
    for (const [key, id, code] of cases) {
      const { method, path, ...params } = rest(id, true);
      const { status, body } = await system.call(method, path, { key, ...params });
      const refused = await refusalOf(stream(clientOf(key), id, true));
      const { code: received, details, message, requestId } = refused;
      expect([rpc, { code: received, details, message }]).toEqual([rpc, body.error]);
      expect([rpc, codes[received as Code]]).toEqual([rpc, status]);
      if (code) expect([rpc, received]).toEqual([rpc, code]);
      expect(requestId).toMatch(/^req_/);
    }
  }
});

test('a call that does not begin with its start message, or has a second one, is refused and runs nothing more', async () => {
  const { client, machine_id, system } = await scene();
  const start = { machine_id, command: 'true' };
  expect(await refusalOf(client.exec([{ stdin: Buffer.from('x') }]))).toMatchObject({
    code: 'invalid_request',
  });
  expect(await refusalOf(client.exec([]))).toMatchObject({ code: 'invalid_request' });
  expect(await refusalOf(client.writeFile([{ chunk: Buffer.from('x') }]))).toMatchObject({
    code: 'invalid_request',
  });
  expect(await refusalOf(client.attachSession([{ input: Buffer.from('x') }]))).toMatchObject({
    code: 'invalid_request',
  });
  expect((await system.client.commands.list()).total).toBe(0);
  const held = gate();
  const twice = client.exec([{ start: { ...start, command: held.wait } }, { start }]);
  expect(await refusalOf(twice)).toMatchObject({ code: 'invalid_request' });
  expect((await system.client.commands.list()).total).toBe(1);
  held.open();
});

test('an offline machine is reported before a command is accepted', async () => {
  const { system, machine_id, client } = await scene(startWithAgent());
  const agent = await system.agent();
  await agent.close();
  await soon(async () => (await system.client.machines.get({ machine_id: agent.machineId })).status).toBe(
    'offline',
  );
  const refused = await refusalOf(client.exec([{ start: { machine_id: agent.machineId, command: 'true' } }]));
  expect(refused).toMatchObject({ code: 'machine_offline', status: 503 });
  expect((await system.client.commands.list({ machine_id })).total).toBe(0);
});

test('a forbidden signal, and a message that is too large, end the call and not the command', async () => {
  const { system, machine_id, client } = await scene();
  const held = gate();
  const start = { machine_id, command: held.wait };
  expect(await refusalOf(client.exec([{ start }, { signal: 'SIGSEGV' }]))).toMatchObject({
    code: 'validation_failed',
  });
  const large = client.exec([{ start }, { stdin: Buffer.alloc(2 * 1024 * 1024) }]);
  await refusalOf(large);
  const { items } = await system.client.commands.list();
  expect(items.map(({ status }) => status).sort()).not.toContain('cancelled');
  for (const _ of items) held.open();
});

// ---- Commands

test('a command is accepted and gets its input; its call sends every byte of stdout and stderr, and the end last', async () => {
  const { client, machine_id } = await scene();
  const input = randomBytes(3_000_000);
  const { heard, take } = hearing();
  const kinds: string[] = [];
  const requests = [
    { start: { machine_id, command: 'cat; echo done >&2; exit 3' } },
    ...[0, 1, 2].map((part) => ({ stdin: input.subarray(part * 1_000_000, (part + 1) * 1_000_000) })),
  ];
  let end: object | null | undefined;
  for await (const message of client.exec(requests)) {
    if (kinds.at(-1) !== message.message) kinds.push(message.message ?? '');
    take(message.output);
    end = message.end ?? end;
  }
  expect(kinds).toEqual(['accepted', 'output', 'end']);
  expect(heard.stdout.equals(input)).toBe(true);
  expect(heard.stderr.toString()).toBe('done\n');
  expect(end).toMatchObject({ status: 'failed', exit_code: 3 });
});

test('an incomplete UTF-8 character is sent at once, because output is bytes', async () => {
  const { client, machine_id } = await scene();
  const asked = line<ExecRequest>({
    start: { machine_id, command: "printf '\\303'; head -c 1 >/dev/null" },
  });
  for await (const { output, end } of client.exec(asked.requests)) {
    if (output) {
      expect([...output.data]).toEqual([0o303]);
      asked.send({ stdin: Buffer.from('x') });
    }
    if (end) expect(end.status).toBe('completed');
  }
});

test('with arguments the command is a program, with its directory and variables', async () => {
  const { client, machine_id } = await scene();
  const folder = temporaryFolder('cwd');
  const { heard, take } = hearing();
  const start = {
    machine_id,
    command: '/bin/sh',
    direct: true,
    args: ['-c', 'pwd; echo "$ONE $0"', 'zero'],
    cwd: folder,
    env: { ONE: '1' },
  };
  for await (const { output } of client.exec([{ start }])) take(output);
  expect(heard.stdout.toString()).toBe(`${folder}\n1 zero\n`);
});

test('while a program does not read its input, the broker stops reading the call, and no input is lost', async () => {
  const { client, machine_id } = await scene();
  const held = gate();
  let asked = 0;
  const piece = Buffer.alloc(512 * 1024, 'x');
  const pieces = 48;
  async function* requests() {
    yield { start: { machine_id, command: `${held.wait}; wc -c` } };
    for (; asked < pieces; asked += 1) yield { stdin: piece };
  }
  let before = -1;
  const standsStill = (): boolean => {
    const still = asked === before;
    before = asked;
    return still;
  };
  const { heard, take } = hearing();
  for await (const { accepted, output } of client.exec(requests())) {
    if (accepted) {
      // The call takes no more input once the pipe, the agent, the broker and all flow-control windows are full.
      await soon(standsStill, 400).toBe(true);
      expect(asked).toBeLessThan(pieces);
      held.open();
    }
    take(output);
  }
  expect(Number(heard.stdout.toString())).toBe(pieces * piece.length);
});

test('a signal is sent to a command, and is ignored if the command has ended', async () => {
  const { client, machine_id } = await scene();
  const asked = line<ExecRequest>({
    start: {
      machine_id,
      command: "trap 'echo caught; exit 0' INT; echo ready; while :; do sleep 0.05; done",
    },
  });
  let end: unknown;
  const { heard, take } = hearing();
  for await (const message of client.exec(asked.requests)) {
    take(message.output);
    if (heard.stdout.toString() === 'ready\n') asked.send({ signal: 'SIGINT' });
    end = message.end;
  }
  expect(heard.stdout.toString()).toBe('ready\ncaught\n');
  expect(end).toMatchObject({ status: 'completed' });
});

test('when a client disconnects, its command goes on with open input, unless the client set cancel_on_disconnect', async () => {
  const { client, system, machine_id } = await scene();
  const leave = async (more: object): Promise<string> => {
    const asked = line({ start: { machine_id, command: 'cat', ...more } });
    for await (const { accepted } of client.exec(asked.requests)) if (accepted) return accepted.command_id;
    throw new Error('it was not accepted');
  };
  const [stays, goes] = [await leave({}), await leave({ cancel_on_disconnect: true })];
  const statusOf = async (command_id: string) => (await system.client.commands.get({ command_id })).status;
  await soon(() => statusOf(goes)).toBe('cancelled');
  await soon(() => statusOf(stays)).toBe('running');
  await system.client.commands.input({ command_id: stays, data: 'late', end: true });
  await soon(async () => (await system.client.commands.get({ command_id: stays })).stdout).toBe('late');
});

test('a cancellation that arrives in two parts does not end the input', async () => {
  const { system, machine_id } = await scene();
  const ca = await caOf(system);
  const session = connectHttp2(`https://${system.grpc}`, { ca, checkServerIdentity: () => undefined });
  onTestFinished(() => session.destroy());
  const call = session.request({
    ':method': 'POST',
    ':path': streamsService.Exec.path,
    'content-type': 'application/grpc',
    te: 'trailers',
    authorization: `Bearer ${system.key}`,
  });
  const start = streamsService.Exec.requestSerialize({ start: { machine_id, command: 'cat' } });
  const head = Buffer.alloc(5);
  head.writeUInt32BE(start.length, 1);
  call.write(Buffer.concat([head, start]));
  await once(call, 'data');
  call.end();
  await once(call, 'finish');
  // The broker runs in this process. These turns of the event loop let it handle the first part.
  for (let turns = 0; turns < 8; turns += 1) await new Promise((resolve) => setImmediate(resolve));
  call.close(constants.NGHTTP2_CANCEL);
  await once(call, 'close');
  const { items } = await system.client.commands.list({ machine_id });
  const { id: command_id = '' } = items[0] ?? {};
  const got = () => system.client.commands.get({ command_id });
  await system.client.commands.input({ command_id, data: 'late', end: true });
  await soon(async () => (await got()).status).toBe('completed');
  expect((await got()).stdout).toBe('late');
});

test('a repeat with the same idempotency key finds the same command, and its input counts once', async () => {
  const { client, system, machine_id } = await scene(startWithAgent());
  const start = { machine_id, command: 'cat' };
  const asked = line<ExecRequest>({ start }, { stdin: Buffer.from('ab') });
  const options = { idempotencyKey: 'once' };
  let first = '';
  for await (const { accepted, output } of client.exec(asked.requests, options)) {
    first = accepted?.command_id ?? first;
    if (output) break;
  }
  const { heard, take } = hearing();
  const repeat = [{ start }, { stdin: Buffer.from('a') }, { stdin: Buffer.from('bc') }];
  for await (const { accepted, output } of client.exec(repeat, options)) {
    if (accepted) expect(accepted.command_id).toBe(first);
    take(output);
  }
  expect(heard.stdout.toString()).toBe('abc');
  const other = client.exec([{ start: { machine_id, command: 'true' } }], options);
  expect(await refusalOf(other)).toMatchObject({ code: 'idempotency_mismatch' });
  expect((await system.client.commands.list()).total).toBe(1);
});

test('a command is followed from any offset, while it runs and later', async () => {
  const { client, system, machine_id } = await scene();
  const { id: command_id } = await system.client.commands.create({
    machine_id,
    command: 'printf 0123456789; echo x >&2',
  });
  const received = await Array.fromAsync(
    client.followCommand({ command_id, stdout_offset: 4, stderr_offset: 2 }),
  );
  expect(
    received.map(({ output, end }) => (output ? [output.offset, output.data.toString()] : end?.status)),
  ).toEqual([[4, '456789'], 'completed']);
  expect(await refusalOf(client.followCommand({ command_id, stdout_offset: 11 }))).toMatchObject({
    code: 'range_not_satisfiable',
    details: { start: 0, end: 10 },
  });
});

// ---- Files

test('a file is read whole and in part, also from its end, after a head with its properties', async () => {
  const { client, machine_id } = await scene();
  const path = join(temporaryFolder('read'), 'file');
  const content = randomBytes(1_500_000);
  writeFileSync(path, content);
  const read = async (more: object): Promise<[length: number | undefined, bytes: Buffer]> => {
    const [first, ...rest] = await Array.fromAsync(client.readFile({ machine_id, path, ...more }));
    expect(first?.head?.etag).toMatch(/^"/);
    return [first?.head?.length, Buffer.concat(rest.map(({ chunk }) => chunk ?? Buffer.alloc(0)))];
  };
  for (const [more, part] of [
    [{}, content],
    [{ offset: 1_000_000 }, content.subarray(1_000_000)],
    [{ offset: 10, length: 20 }, content.subarray(10, 30)],
    [{ offset: -7 }, content.subarray(-7)],
    [{ offset: -7, length: 3 }, content.subarray(-7, -4)],
    [{ length: 0 }, Buffer.alloc(0)],
  ] as const) {
    const [length, bytes] = await read(more);
    expect([more, length, bytes.equals(part)]).toEqual([more, part.length, true]);
  }
  expect(await refusalOf(client.readFile({ machine_id, path: `${path}.not`, offset: 1 }))).toMatchObject({
    code: 'file_not_found',
    details: { path: `${path}.not` },
  });
});

test('a refusal has the exact name of a file, and leaves out details that are too long for metadata', async () => {
  const { client, machine_id } = await scene();
  const path = '/nowhere/ä€😀';
  expect((await refusalOf(client.readFile({ machine_id, path }))).details).toMatchObject({ path });
  const long = `/nowhere/${'x'.repeat(9_000)}`;
  const { code, details } = await refusalOf(client.readFile({ machine_id, path: long }));
  expect([code, details]).toEqual(['file_not_found', {}]);
});

test('a file is written when its commit arrives, and not without a commit or with a wrong checksum', async () => {
  const { client, machine_id } = await scene();
  const folder = temporaryFolder('write');
  const path = join(folder, 'file');
  const open = { open: { machine_id, path, mode: '600' } };
  const chunk = { chunk: Buffer.from('content') };
  expect(await refusalOf(client.writeFile([open, chunk]))).toMatchObject({ code: 'invalid_request' });
  const wrong = [open, chunk, { commit: { sha256: '0'.repeat(64) } }];
  expect(await refusalOf(client.writeFile(wrong))).toMatchObject({ code: 'validation_failed' });
  expect(await refusalOf(client.writeFile([open, chunk, open]))).toMatchObject({ code: 'invalid_request' });
  await soon(() => readdirSync(folder)).toEqual([]);
  const sha256 = 'ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73';
  const written = await client.writeFile([open, chunk, { commit: { sha256 } }]);
  expect(written).toMatchObject({ path, size: 7, created: true, sha256 });
  expect(readFileSync(path, 'utf8')).toBe('content');
  const again = [{ open: { machine_id, path, overwrite: false } }, chunk, { commit: {} }];
  expect(await refusalOf(client.writeFile(again))).toMatchObject({ code: 'already_exists' });
});

test('a write that is cancelled in the middle leaves nothing', async () => {
  const { client, machine_id } = await scene();
  const folder = temporaryFolder('cut');
  const open = { open: { machine_id, path: join(folder, 'file') } };
  const stop = new AbortController();
  const asked = line<WriteFileRequest>(open, { chunk: Buffer.alloc(100_000) });
  const writing = refusalOf(client.writeFile(asked.requests, { signal: stop.signal }));
  await soon(() => readdirSync(folder).length).toBe(1);
  stop.abort();
  await writing;
  await soon(() => readdirSync(folder)).toEqual([]);
});

test('changes are sent as they happen, after a first message which says that the watch has begun', async () => {
  const { client, machine_id } = await scene();
  const folder = temporaryFolder('watch');
  for await (const { change, path, type } of client.watchFiles({ machine_id, path: folder })) {
    if (change === '') writeFileSync(join(folder, 'new'), '');
    else {
      expect([change, path, type]).toEqual(['added', join(folder, 'new'), 'file']);
      break;
    }
  }
});

// ---- The end of a call

test('a key that is revoked ends its open calls at once', async () => {
  const { system, machine_id } = await scene(startWithAgent());
  const { key } = await system.keyed(['commands:execute', 'machines:read', 'files:read']);
  const client = await streamsOf(system, key);
  const asked = line({ start: { machine_id, command: 'cat' } });
  const open = [
    client.exec(asked.requests),
    client.events({}),
    client.watchFiles({ machine_id, path: temporaryFolder('watched') }),
  ].map((messages) => refusalOf(messages));
  await soon(async () => (await system.client.commands.list({ status: 'running' })).total).toBe(1);
  const { items } = await system.client.keys.list();
  const { id: key_id = '' } = items.find(({ scopes }) => scopes.length === 3) ?? {};
  await system.client.keys.remove({ key_id });
  for (const refused of await Promise.all(open)) expect(refused).toMatchObject({ code: 'unauthorized' });
});

test('a broker that stops asks its callers to reconnect', async () => {
  const { system, client } = await scene(startWithAgent());
  const events = client.events({});
  const ended = refusalOf(events);
  const held = client.watchFiles({
    machine_id: (await system.client.machines.list()).items[0]!.id,
    path: '/tmp',
  });
  expect((await held.next()).done).toBe(false);
  await system.broker.close();
  expect(await ended).toMatchObject({ code: 'unavailable' });
});

test('a client refuses a broker whose certificate authority it does not have', async () => {
  const { system } = await scene();
  const other = await startFarhand();
  const stranger = await streamsOf(other, other.key, system.grpc);
  expect(await refusalOf(stranger.events({}))).toMatchObject({
    code: 'unavailable',
    details: { grpc_status: 'UNAVAILABLE' },
  });
});
