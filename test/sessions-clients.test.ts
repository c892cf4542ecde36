// Clients of a terminal: their output, their rights, and when they are detached.
import { expect, test } from 'vitest';
import { leapingClock, soon } from './commands-fixture.ts';
import { joinScripted } from './scripted-agent.ts';
import { attached, begin, bench, eventsOf, join, keeper, linkMachine, ticketIn } from './sessions-fixture.ts';
import { startFarhand } from './start-farhand.ts';
import { startProxy } from './tcp-proxy.ts';

const kib = 1024;

test('a client gets the offset of the output, then all output, and only then how the session ended', async () => {
  const clock = leapingClock();
  const one = await bench();
  const { session_id, kept } = await begin(one);
  const { line, open, ...port } = await join(one, session_id);
  expect(open).toEqual({ id: session_id, client_id: port.client_id });
  line.head(1_000, { cols: 99, rows: 33 });
  line.output(1_000, 'before ');
  kept.exit({ exit_code: 3 });
  await soon(async () => (await one.system.client.sessions.get({ session_id })).status).toBe('DISCONNECTED');
  // The agent still has output that the broker has not read. A ForgetProcesses would delete this output, so the broker
  // must not send it yet. It would have arrived by now.
  clock.leap(100);
  await begin(one);
  expect(one.machine.waiting('ForgetProcesses')).toBe(0);
  line.output(1_007, 'and after');
  line.end();
  expect(await port.parted()).toEqual({ why: 'ended', exit_code: 3, signal: null, reason: null });
  expect(port.text()).toBe('before and after');
  expect(port.notes).toEqual([
    {
      ...{ type: 'ready', client_id: port.client_id, offset: 1_000, cols: 99, rows: 33 },
      ...{ window: 256 * kib, answered: 0 },
    },
  ]);
  expect((await one.machine.next('ForgetProcesses')).request).toEqual({ ids: [session_id] });
});

test('the input of two operators arrives completely, each in order', async () => {
  const one = await bench();
  const { session_id } = await begin(one);
  const [first, second] = [await join(one, session_id), await join(one, session_id)];
  for (const { line } of [first, second]) line.head();
  for (let n = 0; n < 100; n += 1) {
    first.type(`a${n} `);
    second.type(`b${n} `);
  }
  const typed = (letter: string) => Array.from({ length: 100 }, (_, n) => `${letter}${n} `).join('');
  expect(await first.line.input(typed('a').length)).toBe(typed('a'));
  expect(await second.line.input(typed('b').length)).toBe(typed('b'));
});

test('an observer sees everything and changes nothing', async () => {
  const one = await bench();
  const { session_id } = await begin(one);
  const observer = await join(one, session_id, { mode: 'observer' });
  observer.line.head();
  observer.do({ input: Buffer.from('x') }, { size: { cols: 1, rows: 1 } }, { signal: 'SIGINT' });
  await soon(() => observer.notes.filter(({ type }) => type === 'refused').length).toBe(3);
  observer.line.output(0, 'seen');
  await observer.gets(4);
  expect(['input', 'size', 'signal'].filter((kind) => observer.line.has(kind))).toEqual([]);
  expect(await one.system.client.sessions.get({ session_id })).toMatchObject({ cols: 80, rows: 24 });
});

test('sizes and signals are sent to the terminal; the last size of a second is stored, and other clients are notified', async () => {
  const one = await bench();
  const { session_id } = await begin(one);
  const operator = await join(one, session_id);
  const observer = await join(one, session_id, { mode: 'observer' });
  for (const { line } of [operator, observer]) line.head();
  operator.do({ size: { cols: 120, rows: 40 } }, { signal: 'SIGINT' }, { size: { cols: 121, rows: 41 } });
  expect([await operator.line.size(), await operator.line.signal(), await operator.line.size()]).toEqual([
    { cols: 120, rows: 40 },
    'SIGINT',
    { cols: 121, rows: 41 },
  ]);
  observer.line.resized(121, 41);
  expect(await observer.note('size')).toEqual({ type: 'size', cols: 121, rows: 41 });
  const listed = async () => (await one.system.client.sessions.list()).items[0];
  await soon(listed).toMatchObject({ cols: 121, rows: 41 });
  await one.system.broker.close();
  const again = await startFarhand({ dataDir: one.system.dataDir });
  expect(await again.client.sessions.get({ session_id })).toMatchObject({ cols: 121, rows: 41 });
});

test('a client that reads nothing is sent half a MiB, and its agent gets no acknowledgement', async () => {
  const one = await bench();
  const { session_id } = await begin(one);
  const { line, ...port } = await join(one, session_id);
  line.head();
  await port.note('ready');
  port.hold();
  const piece = Buffer.alloc(32 * kib, 'x');
  for (let n = 0; n < 32; n += 1) line.output(n * piece.length, piece);
  await port.gets(512 * kib);
  // The stalled client does not delay another client of the same machine.
  const other = await join(one, session_id);
  other.line.head();
  other.line.output(0, 'y');
  await other.gets(1);
  expect([port.given(), line.has('taken')]).toEqual([512 * kib + piece.length, false]);
  port.release();
  expect(await line.taken(1024 * kib)).toBe(1024 * kib);
  expect(port.given()).toBe(1024 * kib);
});

test('a client that reads nothing gets a notice that it fell behind', async () => {
  const one = await bench();
  const { session_id } = await begin(one);
  const { line, ...port } = await join(one, session_id);
  line.head();
  port.hold();
  line.output(0, Buffer.alloc(256 * kib));
  line.refuse('range_not_satisfiable');
  expect(await port.parted()).toEqual({ why: 'fell_behind' });
  await port.served;
});

test('a client that reads no notices is sent only a limited number of notices, whichever client causes them', async () => {
  const one = await bench();
  const { session_id } = await begin(one);
  const { line, ...port } = await join(one, session_id, { mode: 'observer' });
  line.head();
  await port.note('ready');
  port.hold();
  const typing = { input: Buffer.from('x') };
  port.do(...Array.from({ length: 2500 }, () => typing));
  for (let n = 0; n < 2500; n += 1) line.resized(1 + (n % 1000), 1);
  // Each waiting notice counts as 256 bytes, so 2,048 notices fill the limit of half a MiB. The first notice, `ready`,
  // was received before.
  await soon(() => port.notes.length).toBeGreaterThan(2048);
  // This client attaches over the same link, so the broker has handled all earlier notices.
  const other = await join(one, session_id);
  other.line.head();
  await other.note('ready');
  expect(port.notes.length).toBeLessThan(2056);
  expect(port.read()).toBeLessThan(2500);
  port.release();
  await soon(() => port.notes.length).toBe(5001);
});

test('output is acknowledged to the agent every 32 KiB, not for each piece', async () => {
  const one = await bench();
  const { session_id } = await begin(one);
  const { line } = await join(one, session_id);
  line.head();
  let received = 0;
  for (let at = 0; at < 64 * kib; at += kib) line.output(at, Buffer.alloc(kib));
  for (let at = 0; at < 64 * kib; received += 1) at = await line.taken(at + 1);
  expect(received).toBeLessThanOrEqual(4);
});

test('a client whose offset is no longer stored gets a notice that it fell behind', async () => {
  const one = await bench();
  const { session_id } = await begin(one);
  const port = await join(one, session_id, { offset: 5 });
  expect(port.open.offset).toBe(5);
  port.line.refuse('range_not_satisfiable');
  expect(await port.parted()).toEqual({ why: 'fell_behind' });
  await port.served;
  expect((await eventsOf(one.system, session_id)).at(-1)).toBe('client_detached CONNECTED operator');
});

test.each(['revoked', 'retagged', 'expired'])('a client whose key is %s is detached at once', async (how) => {
  const system = await startFarhand();
  const one = await bench({ system });
  const { machine_id } = one;
  await system.client.machines.update({ machine_id, tags: ['ours'] });
  const { session_id } = await begin(one);
  const limits = how === 'retagged' ? { tags: ['ours'] } : {};
  const clock = leapingClock();
  const expires = how === 'expired' ? { expires_at: new Date(Date.now() + 3_600_000).toISOString() } : {};
  const key = await system.keyed(['sessions:attach'], { ...limits, ...expires });
  const port = await join(one, session_id, {}, key.client);
  const stays = await join(one, session_id);
  const { id } = (await system.client.keys.list({ sort: '-created_at' })).items[0] ?? {};
  if (how === 'revoked') await system.client.keys.remove({ key_id: id ?? '' });
  if (how === 'retagged') await system.client.machines.update({ machine_id, tags: [] });
  // The leap also ends the link, because no message is sent on it in this hour. So the second client is checked only in
  // the cases without a leap.
  if (how === 'expired') clock.leap(3_600_000);
  expect(await port.parted()).toEqual({ why: 'forbidden' });
  const { attached_clients } = await system.client.sessions.get({ session_id });
  if (how !== 'expired')
    expect(attached_clients.map(({ client_id }) => client_id)).toEqual([stays.client_id]);
});

test('a ticket that is not used within 30 s expires, and its client is detached', async () => {
  const clock = leapingClock();
  const one = await bench();
  const { session_id } = await begin(one);
  const { stream_url } = await one.system.client.sessions.attach({ session_id });
  clock.leap(29_000);
  expect((await one.system.client.sessions.get({ session_id })).attached_count).toBe(1);
  clock.leap(1_000);
  expect(one.system.broker.sessions.redeem(ticketIn(stream_url))).toBeUndefined();
  await soon(async () => (await eventsOf(one.system, session_id)).at(-1)).toBe(
    'client_detached CONNECTED operator',
  );
});

test('a stopping broker notifies its clients, and their sessions go on', async () => {
  const one = await bench();
  const { session_id } = await begin(one);
  const port = await join(one, session_id);
  const waiting = await one.system.client.sessions.attach({ session_id });
  port.line.head();
  await port.note('ready');
  port.hold();
  port.line.output(0, 'never taken');
  await port.gets(1);
  const begun = performance.now();
  await one.system.broker.close();
  expect(performance.now() - begun).toBeLessThan(4_000);
  expect(await port.parted()).toEqual({ why: 'stopping' });
  const again = await startFarhand({ dataDir: one.system.dataDir });
  const events = await eventsOf(again, session_id);
  expect(events.filter((event) => event.startsWith('client_detached'))).toHaveLength(2);
  expect(waiting.client_id).not.toBe(port.client_id);
});

test('over a lost link a client gets all output once, and its input waits meanwhile', async () => {
  const system = await startFarhand();
  const proxy = await startProxy(system.grpc);
  const identity = await joinScripted(system);
  const machine = await linkMachine(proxy.address, identity);
  const { session_id } = await begin({ system, machine });
  const { line, ...port } = await join({ system, machine }, session_id);
  line.head();
  line.output(0, 'one ');
  line.output(4, 'two ');
  await port.gets(8);
  proxy.cut();
  await port.status('GRACE_PERIOD');
  const typed = port.read();
  for (const text of ['a', 'b', 'c']) port.type(text);
  const back = await linkMachine(proxy.address, identity);
  const keep = await back.next('KeepTerminal');
  // Of the three inputs, the session has read only the first, which waits for the terminal.
  expect(port.read() - typed).toBe(1);
  keeper(back, keep).started();
  await port.status('CONNECTED');
  const again = attached(back, await back.next('AttachTerminal'));
  expect(await again.open()).toMatchObject({ id: session_id, client_id: port.client_id, offset: 8 });
  again.head(8);
  again.output(8, 'three');
  expect(await again.input(3)).toBe('abc');
  await port.gets(13);
  expect(port.text()).toBe('one two three');
  expect(port.notes.filter(({ type }) => type === 'ready')).toHaveLength(1);
});

test('output from the wrong offset is refused', async () => {
  const one = await bench();
  const { session_id } = await begin(one);
  const { line, ...port } = await join(one, session_id);
  line.head();
  line.output(0, 'one');
  line.output(4, 'later');
  const again = attached(one.machine, await one.machine.next('AttachTerminal'));
  expect(await again.open()).toMatchObject({ offset: 3 });
  again.head(3);
  again.output(3, ' two');
  await port.gets(7);
  expect(port.text()).toBe('one two');
});
