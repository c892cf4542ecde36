// Terminals over WebSocket: tickets, and messages between a WebSocket and its session.
import { once } from 'node:events';
import { type IncomingMessage, request } from 'node:http';
import { connect } from 'node:net';
import { text } from 'node:stream/consumers';
import { pino } from 'pino';
import { expect, onTestFinished, test } from 'vitest';
import { type RawData, WebSocket } from 'ws';
import type { ClientPort, CloseReason } from '../broker/sessions/terminal-client.ts';
import { brokerSettings } from '../broker/settings-schema.ts';
import { startBroker } from '../broker/start/index.ts';
import { readSettings } from '../shared/read-settings.ts';
import { fakeClock } from './fake-clock.ts';
import { call, startFarhand, type TestSystem, temporaryFolder } from './start-farhand.ts';
import { takeFirst } from './take-first.ts';
import { handshake, path, startTerminalServer } from './terminal-socket-server.ts';
import { waitFor } from './wait-for.ts';

/** The library `ws` gives each message as a Buffer by default. */
const jsonOf = (data: RawData): unknown => JSON.parse((data as Buffer).toString());

async function leftBy({ gone }: ClientPort): Promise<void> {
  if (!gone.aborted) await once(gone, 'abort');
}

// ---- Checks of requests

test('a ticket that is wrong, used, missing or for another session is 401, and leaves no open socket', async () => {
  const door = await startTerminalServer();
  for (const query of ['', '?ticket=', '?ticket=wrong', '?ticket=one%00']) {
    expect([query, await door.status({ path: path + query })]).toEqual([query, 401]);
  }
  expect(await door.status({})).toBe(101);
  expect(await door.status({})).toBe(401);
  expect(door.left).toEqual([]);
  expect(await door.status({ path: '/api/v1/sessions/sess_two/stream?ticket=two' })).toBe(401);
  // Checking a ticket uses it up, even if it is for another session. So the broker must also release the attachment of
  // this ticket.
  expect([door.left, door.tickets.size, door.ports.length]).toEqual([['left'], 0, 1]);
});

test('an invalid handshake is 400 and leaves the ticket valid', async () => {
  const door = await startTerminalServer();
  const wrong = [
    { Upgrade: undefined, Connection: undefined },
    { Upgrade: 'h2c' },
    { Connection: 'keep-alive' },
    { 'Sec-WebSocket-Key': undefined },
    { 'Sec-WebSocket-Key': 'short' },
    { 'Sec-WebSocket-Version': '8' },
    { 'Content-Length': '5' },
    { 'Transfer-Encoding': 'chunked' },
  ];
  for (const headers of wrong) {
    expect([headers, await door.status({ headers })]).toEqual([headers, 400]);
  }
  expect(await door.status({ method: 'POST' })).toBe(400);
  for (const query of ['?other=one', '?ticket=one&other=x']) {
    expect([query, await door.status({ path: path + query })]).toEqual([query, 400]);
  }
  expect([await door.status({}), door.ports.length]).toEqual([101, 1]);
});

test('a handshake that only the library refuses releases its attachment', async () => {
  const door = await startTerminalServer();
  expect(await door.status({ headers: { 'Sec-WebSocket-Protocol': 'a,,b' } })).toBe(400);
  expect([door.left, door.ports]).toEqual([['left'], []]);
});

test('pages of another origin get 403, and those of the broker’s own host or public address are accepted', async () => {
  const door = await startTerminalServer('https://farhand.example.org');
  const host = `127.0.0.1:${door.port}`;
  const foreign = [
    'null',
    'http://evil.example',
    'http://farhand.example.org',
    'https://farhand.example.org:8443',
    'https://farhand.example.org.evil.example',
    'http://127.0.0.1',
    'nonsense',
  ];
  for (const Origin of foreign) {
    expect([Origin, await door.status({ headers: { Origin } })]).toEqual([Origin, 403]);
  }
  expect(await door.status({ headers: { Origin: `http://${host}` } })).toBe(101);
  expect(
    await door.status({ path: `${path}?ticket=two`, headers: { Origin: 'https://farhand.example.org' } }),
  ).toBe(101);
});

// ---- Messages of a client

test.each([
  ['no JSON', 'ls'],
  ['an unknown type', '{"type":"kill"}'],
  ['a size of zero columns', '{"type":"resize","cols":0,"rows":24}'],
  ['a size that is no number', '{"type":"resize","cols":"80","rows":24}'],
  ['an unknown signal', '{"type":"signal","signal":"SIGSEGV"}'],
  ['an unknown field', '{"type":"input","data":"x","more":1}'],
  ['80,000 unknown fields', `{"type":"input","data":"x"${',"a":1'.repeat(80_000)}}`],
  ['nothing', 'null'],
])('%s closes with 1008 and a reason, and nothing after it is done', async (_what, message) => {
  const door = await startTerminalServer();
  const { client, port, closed } = await door.enter();
  client.send(message);
  client.send('{"type":"input","data":"late"}');
  expect(await takeFirst(1, port.actions)).toEqual([]);
  expect(await closed).toEqual([1008, expect.stringMatching(/^message: .{5,}/)]);
  await leftBy(port);
});

test('a message over 1 MiB closes with 1009', async () => {
  const { client, closed } = await (await startTerminalServer()).enter();
  client.send(Buffer.alloc(1024 * 1024 + 1));
  expect((await closed)[0]).toBe(1009);
});

test('actions of a client arrive in order, both text and bytes, even if the client leaves at once', async () => {
  const { client, port } = await (await startTerminalServer()).enter();
  client.send('{"type":"input","data":"größe 漢\\n"}');
  client.send(Buffer.from([0, 255, 3]));
  client.send('{"type":"resize","cols":132,"rows":43}');
  client.send('{"type":"signal","signal":"SIGINT"}');
  client.close();
  expect(await takeFirst(9, port.actions)).toEqual([
    { input: Buffer.from('größe 漢\n') },
    { input: Buffer.from([0, 255, 3]) },
    { size: { cols: 132, rows: 43 } },
    { signal: 'SIGINT' },
  ]);
});

test('a session that reads slowly slows its client down, and unread input stays in the network', async () => {
  const { client, port } = await (await startTerminalServer()).enter();
  const piece = Buffer.alloc(256 * 1024, 'x');
  const pieces = 128;
  const sent = Promise.all(
    Array.from({ length: pieces }, () => new Promise((resolve) => client.send(piece, resolve))),
  );
  // Without backpressure, all input would be read in a fraction of this time.
  const soon = new Promise((resolve) => setTimeout(resolve, 500, 'held'));
  expect(await Promise.race([sent, soon])).toBe('held');
  const taken = await takeFirst(pieces, port.actions);
  expect(taken.length).toBe(pieces);
});

// ---- Messages to a client

test('output and notices arrive unchanged, and output resolves once the socket has sent it', async () => {
  const { client, port } = await (await startTerminalServer()).enter();
  const got: unknown[] = [];
  client.on('message', (data, binary) => got.push(binary ? data : jsonOf(data)));
  await port.notify({ type: 'ready', client_id: 'cli_one', offset: 7, cols: 80, rows: 24 });
  await port.output(Buffer.from([0xe6, 0xbc]));
  await port.output(Buffer.from([0xa2]));
  port.close({ why: 'detached' });
  await once(client, 'close');
  expect(got).toEqual([
    { type: 'ready', client_id: 'cli_one', offset: 7, cols: 80, rows: 24 },
    Buffer.from([0xe6, 0xbc]),
    Buffer.from([0xa2]),
  ]);
});

test('a client that does not read delays only its own output, and gets all of it later', async () => {
  const { client, port } = await (await startTerminalServer()).enter();
  client.pause();
  const piece = Buffer.alloc(64 * 1024, 'y');
  let given = 0;
  const giving = (async () => {
    for (; given < 400; given += 1) await port.output(piece);
  })();
  let before = -1;
  while (given !== before) {
    before = given;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  expect(given).toBeLessThan(400);
  let received = 0;
  client.on('message', (data) => {
    received += (data as Buffer).length;
  });
  client.resume();
  await giving;
  port.close({ why: 'detached' });
  await once(client, 'close');
  expect(received).toBe(400 * piece.length);
});

/**
 * A client that reports how much output it has processed. The output starts at offset 100. passed() resolves when
 * everything that the client has sent has arrived at the server.
 */
async function reportingClient() {
  const { client, port } = await (await startTerminalServer()).enter();
  const report = (offset: number): void => client.send(JSON.stringify({ type: 'received', offset }));
  const actions = port.actions[Symbol.asyncIterator]();
  const passed = async (): Promise<void> => {
    client.send(Buffer.from('x'));
    await actions.next();
  };
  await port.notify({ type: 'ready', client_id: 'cli_one', offset: 100, cols: 80, rows: 24, window: 9 });
  report(100);
  await passed();
  const resolved: string[] = [];
  const output = (text: string): Promise<unknown> =>
    port.output(Buffer.from(text)).then(() => resolved.push(text));
  return { client, port, report, passed, resolved, output };
}

test('output to a client that reports what it has processed resolves only by these reports', async () => {
  const { port, report, passed, resolved, output } = await reportingClient();
  const [first, second, third] = [output('abc'), output('de'), output('f')];
  await passed();
  expect(resolved).toEqual([]);
  report(104);
  await first;
  await passed();
  expect(resolved).toEqual(['abc']);
  report(105);
  await second;
  port.close({ why: 'detached' });
  await third;
});

test('reports overtake waiting input; once reports wait as well, output to the client no longer waits for them', async () => {
  const { client, report, resolved, output } = await reportingClient();
  client.send(Buffer.alloc(32 * 1024));
  const [first, second] = [output('abc'), output('de')];
  report(103);
  await first;
  expect(resolved).toEqual(['abc']);
  client.send(Buffer.alloc(32 * 1024));
  await second;
});

test('output and notices to a disconnected client resolve', async () => {
  const { client, port } = await (await startTerminalServer()).enter();
  client.terminate();
  await leftBy(port);
  await port.output(Buffer.from('late'));
  await port.notify({ type: 'size', cols: 1, rows: 1 });
  port.close({ why: 'detached' });
});

test('notices resolve once the socket has sent them, like output', async () => {
  const { client, port } = await (await startTerminalServer()).enter();
  client.pause();
  const note = { type: 'refused', message: 'x'.repeat(64 * 1024) } as const;
  let given = 0;
  const giving = (async () => {
    for (; given < 400; given += 1) await port.notify(note);
  })();
  let before = -1;
  while (given !== before) {
    before = given;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  expect(given).toBeLessThan(400);
  client.resume();
  await giving;
});

test('a client that sends pings without reading gets an answer only as often as it reads', async () => {
  const { client, port } = await (await startTerminalServer()).enter();
  client.pause();
  const pings = 100_000;
  let pongs = 0;
  client.on('pong', () => {
    pongs += 1;
  });
  for (let count = 0; count < pings; count += 1) client.ping(Buffer.alloc(125));
  client.send(Buffer.from('after them'));
  await takeFirst(1, port.actions);
  // The server sends this output after all pongs.
  void port.output(Buffer.from('.'));
  const answered = once(client, 'message');
  client.resume();
  await answered;
  expect(pongs).toBeGreaterThan(0);
  expect(pongs).toBeLessThan(pings / 2);
});

test.each<[CloseReason, number]>([
  [{ why: 'ended', exit_code: 3, signal: null, reason: null }, 1000],
  [{ why: 'detached' }, 4001],
  [{ why: 'forbidden' }, 4003],
  [{ why: 'fell_behind' }, 4008],
  [{ why: 'stopping' }, 1001],
])('a client that is closed gets the reason: %o closes with %i', async (closeReason, code) => {
  const door = await startTerminalServer();
  const { client, port, closed } = await door.enter();
  const got: unknown[] = [];
  client.on('message', (data) => got.push(jsonOf(data)));
  port.close(closeReason);
  port.close({ why: 'forbidden' });
  expect((await closed)[0]).toBe(code);
  const { why: _, ...ending } = closeReason;
  expect(got).toEqual(code === 1000 ? [{ type: 'end', ...ending }] : []);
  // The connection is closed on the broker's side as well.
  await door.empty();
  expect(port.gone.aborted).toBe(false);
  expect(await takeFirst(1, port.actions)).toEqual([]);
});

// ---- Clients that do not answer

test('a client that answers no ping is disconnected within 45 s, and one that answers is not', async () => {
  const clock = fakeClock(0);
  const quick = await (await startTerminalServer()).enter();
  const dead = await (await startTerminalServer()).enter({ autoPong: false });
  for (let at = 0; at < 90; at += 15) {
    const pong = at < 30 && once(dead.client, 'ping');
    const answered = once(quick.client, 'ping');
    await clock.advance(15_000);
    await Promise.all([pong, answered]);
    // The client sends this message after its pong. So when the message has arrived at the server, the pong has arrived
    // too.
    quick.client.send(Buffer.from('x'));
    await takeFirst(1, quick.port.actions);
  }
  await leftBy(dead.port);
  expect(quick.port.gone.aborted).toBe(false);
});

test('a client whose input is not read is closed within 45 s, because it may be dead', async () => {
  const clock = fakeClock(0);
  const { client, closed, port } = await (await startTerminalServer()).enter();
  client.send(Buffer.alloc(100 * 1024));
  let over = false;
  void closed.then(() => {
    over = true;
  });
  for (let at = 0; at < 45 && !over; at += 15) {
    const ping = once(client, 'ping');
    await clock.advance(15_000);
    await Promise.race([ping, closed]);
  }
  expect(await closed).toEqual([4008, 'the machine has accepted no input for too long; attach again']);
  await leftBy(port);
});

// ---- With a real broker

/** Opens a session that runs cat, and attaches a client. */
async function openSession(system: TestSystem) {
  const { machineId: machine_id } = await system.agent();
  const { session_id } = await system.client.sessions.create({ machine_id, shell: '/bin/cat' });
  const { stream_url } = await system.client.sessions.attach({ session_id });
  return { session_id, stream_url };
}

/** Requests a WebSocket. Resolves with the HTTP answer. */
async function upgrade(
  url: string,
  headers: Record<string, string> = {},
): Promise<{ status: number; body: string }> {
  const asked = request(url, { headers: { ...handshake, ...headers } });
  asked.end();
  const answer = new Promise<[IncomingMessage]>((resolve, reject) => {
    asked.once('response', (response) => resolve([response])).once('error', reject);
    asked.once('upgrade', (response, socket) => {
      socket.destroy();
      resolve([response]);
    });
  });
  const [response] = await answer;
  const { statusCode: status = 0 } = response;
  return { status, body: status === 101 ? '' : await text(response) };
}

test('a refusal is in the envelope with a request id, and a path without a terminal answers as without an upgrade', async () => {
  const system = await startFarhand();
  const { stream_url } = await openSession(system);
  const url = stream_url.replace(/^ws/, 'http');
  const plain = await call(url, 'GET');
  expect([plain.status, plain.body.error.code]).toEqual([400, 'invalid_request']);
  expect(plain.headers.get('x-request-id')).toMatch(/^req_/);
  const refused = await upgrade(url.replace(/ticket=.*/, 'ticket=wrong'));
  expect([refused.status, JSON.parse(refused.body).error.code]).toEqual([401, 'unauthorized']);
  const foreign = await upgrade(url, { Origin: 'https://evil.example' });
  expect([foreign.status, JSON.parse(foreign.body).error.code]).toEqual([403, 'forbidden']);
  const Authorization = `Bearer ${system.key}`;
  for (const path of [
    '/healthz',
    '/nowhere',
    '/api/v1/machines',
    '/api/v1/sessions/x/stream/',
    '/api/v1/sessions/x/Stream',
  ]) {
    for (const headers of [{}, { Authorization }]) {
      const [without, asked] = [
        await fetch(system.url + path, { headers }),
        await upgrade(system.url + path, headers),
      ];
      expect([path, asked.status]).toEqual([path, without.status]);
    }
  }
  expect((await upgrade(url)).status).toBe(101);
});

test('tickets are in no log line, valid or not', async () => {
  const lines: string[] = [];
  const dataDir = temporaryFolder('broker');
  const log = pino({ level: 'trace' }, { write: (line: string) => void lines.push(line) });
  const argv = ['--data-dir', dataDir, '--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0'];
  const broker = await startBroker(readSettings(brokerSettings, { argv, env: {} }), log);
  onTestFinished(() => broker.close());
  const asked = await upgrade(`${broker.url}/api/v1/sessions/sess_x/stream?ticket=verysecret`);
  expect(asked.status).toBe(401);
  await waitFor(() => expect(lines.join('')).toContain('/api/v1/sessions/sess_x/stream'));
  expect(lines.join('')).not.toContain('verysecret');
});

test('a quiet terminal is not cut after the time limit of silent requests', async () => {
  const door = await startTerminalServer();
  door.cutSilent(100);
  const { client } = await door.enter();
  // Two silent connections, opened after the terminal, are cut. The terminal must still be open then.
  for (const _ of [1, 2]) await once(connect(door.port, '127.0.0.1'), 'close');
  expect(client.readyState).toBe(WebSocket.OPEN);
});

test('a stopping broker closes its terminals with 1001, and does not wait for one that does not answer', async () => {
  const system = await startFarhand();
  const { session_id, stream_url } = await openSession(system);
  const good = new WebSocket(stream_url);
  const closed = once(good, 'close');
  await once(good, 'message');
  const deaf = new WebSocket((await system.client.sessions.attach({ session_id })).stream_url);
  onTestFinished(() => deaf.terminate());
  await once(deaf, 'message');
  deaf.pause();
  const started = performance.now();
  await system.broker.close();
  expect(performance.now() - started).toBeLessThan(8_000);
  expect((await closed)[0]).toBe(1001);
});
