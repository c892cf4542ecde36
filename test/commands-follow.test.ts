// The output of a running command over GET output and GET stream: events, gaps, and streams that are cut and resumed.
import { expect, test } from 'vitest';
import {
  answerOf,
  bench,
  bodyBytes,
  commandsOn,
  gate,
  listen,
  nextCall,
  nothingReceived,
  output,
  reporting,
  soon,
} from './commands-fixture.ts';
import { scriptedMachine } from './scripted-agent.ts';
import { startFarhand } from './start-farhand.ts';

async function scripted() {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const commands = commandsOn(system, agent.identity.machineId);
  return { system, agent, ...commands };
}

test.each(['1', '1.2.3', 'a.b', '-1.0', '1.', '1e3.0', '1000000000000000000.0'])(
  'a Last-Event-ID of %s is refused',
  async (last) => {
    const { system, run } = await bench();
    const { id } = await run('true');
    const headers = { 'Last-Event-ID': last };
    const { status, body } = await system.call('GET', `/commands/${id}/stream`, { headers });
    expect([status, body.error.code]).toEqual([400, 'invalid_request']);
  },
);

test('events have both streams with offsets and ids, text split between characters, other bytes in base64, and the exit last', async () => {
  const { system, agent, begin } = await scripted();
  const id = await begin('true');
  const call = await nextCall(agent, 'StartProcess');
  const report = reporting(agent, call.call_id);
  const euro = Buffer.from('€');
  report.started();
  report.stdout(0, Buffer.concat([Buffer.from('a'), euro.subarray(0, 2)]));
  const received = await listen(system, id, nothingReceived(), ({ events }) => events.length === 1);
  // The two bytes of the incomplete `€` are held back until the character is complete. So the id counts only the byte
  // of `a`.
  expect(received.events).toEqual([
    { event: 'output', id: '1.0', data: { stream: 'stdout', offset: 0, data: 'a', encoding: 'utf-8' } },
  ]);
  const rest = listen(system, id, received);
  report.stdout(3, Buffer.concat([euro.subarray(2), Buffer.from('\0b')]));
  await soon(() => received.events.length).toBe(2);
  report.stdout(6, Buffer.from([0xff]));
  await soon(() => received.events.length).toBe(3);
  // The rest of this character never comes, so its first byte is sent as base64.
  report.stdout(7, euro.subarray(0, 1));
  report.exited(8);
  report.end();
  await rest;
  expect(received.events.slice(1).map(({ event, id: at, data }) => [event, at, data])).toEqual([
    ['output', '6.0', { stream: 'stdout', offset: 1, data: '€\0b', encoding: 'utf-8' }],
    ['output', '7.0', { stream: 'stdout', offset: 6, data: '/w==', encoding: 'base64' }],
    ['output', '8.0', { stream: 'stdout', offset: 7, data: '4g==', encoding: 'base64' }],
    ['exit', '8.0', expect.objectContaining({ status: 'completed', exit_code: 0, stdout_bytes: 8 })],
  ]);
  // After its end, a command's output can still be requested from any offset.
  const again = await listen(system, id, { ...nothingReceived(), at: '8.0' });
  expect(again.events).toEqual(received.events.slice(-1));
  const cutBefore = await listen(system, id, {
    ...nothingReceived(),
    at: '7.0',
    stdout: received.stdout.subarray(0, 7),
  });
  expect(cutBefore.events).toEqual(received.events.slice(-2));
  expect((await listen(system, id)).stdout).toEqual(received.stdout);
});

test('the head of a stream of events arrives at once, even if the command is silent', async () => {
  const { system, begin } = await bench();
  const { wait, open } = gate();
  const id = await begin(wait);
  const stop = new AbortController();
  // stream() resolves when the head of the answer has arrived.
  await system.client.commands.stream({ command_id: id }, { signal: stop.signal });
  stop.abort();
  open();
});

test('a stream that is cut many times at random resumes without missing or repeated bytes', async () => {
  const { system, begin, ended } = await bench();
  const { wait, open } = gate();
  const shell = `seq 1 30000; seq 1 5000 >&2; printf '\\303'; ${wait}; printf '\\251\\377'; seq 1 30000; head -c 300000 /dev/urandom | tee /dev/stderr | wc -c`;
  const id = await begin(shell);
  const received = nothingReceived();
  let cuts = 0;
  while (!received.exit) {
    const so = received.events.length;
    const most = Math.floor(Math.random() * 2);
    await listen(system, id, received, ({ events }) => events.length > so + most);
    cuts += 1;
    if (received.stdout.length > 100_000 && cuts > 0) {
      open();
      cuts += 1_000;
    }
  }
  expect(cuts % 1_000).toBeGreaterThan(2);
  const { stdout_bytes, stderr_bytes } = await ended(id);
  expect([received.stdout.length, received.stderr.length]).toEqual([stdout_bytes, stderr_bytes]);
  for (const stream of ['stdout', 'stderr'] as const) {
    const whole = await bodyBytes(await output(system, id, `stream=${stream}`));
    expect(received[stream].equals(whole)).toBe(true);
  }
});

test('the id of a gap is the end of the gap, so a client that is cut off there misses nothing', async () => {
  const { system, agent, begin } = await scripted();
  const id = await begin('true');
  const report = reporting(agent, (await nextCall(agent, 'StartProcess')).call_id);
  report.started();
  report.stdout(0, 'abc');
  report.gap(3, 10);
  report.stdout(10, 'def');
  report.exited(13);
  report.end();
  await listen(system, id);
  const received = await listen(system, id, nothingReceived(), ({ gaps }) => gaps.length > 0);
  expect([received.gaps, received.at]).toEqual([[[3, 10]], '10.0']);
  await listen(system, id, received);
  expect(received.stdout.toString()).toBe('abcdef');
});

test('a client whose key is revoked is cut off, from bytes and from events', async () => {
  const { system, begin } = await bench();
  const { wait, open } = gate();
  const id = await begin(`echo begun; ${wait}`);
  const { key, client } = await system.keyed(['commands:read']);
  const reading = [
    await output({ url: system.url, key }, id, 'follow=true'),
    await output({ url: system.url, key }, id, '', {}, 'stream'),
  ];
  await system.client.keys.remove({ key_id: (await client.keys.me()).id });
  for (const response of reading) await expect(response.text()).rejects.toThrow();
  open();
});

test('overlapping output of an agent counts once, and repeated or earlier output changes nothing', async () => {
  const { system, agent, begin, ended } = await scripted();
  const id = await begin('true');
  const report = reporting(agent, (await nextCall(agent, 'StartProcess')).call_id);
  report.started();
  for (const [offset, data] of [
    [0, 'abcdef'],
    [3, 'XYZghi'],
    [0, 'AAAAAA'],
    [8, 'Z'],
    [9, 'jkl'],
  ] as const) {
    report.stdout(offset, data);
  }
  // The exit claims fewer bytes than the agent has sent. The broker still stores all of them.
  report.exited(4);
  report.end();
  expect(await ended(id)).toMatchObject({ stdout: 'abcdefghijkl', stdout_bytes: 12, stdout_start: 0 });
  expect(await (await output(system, id)).text()).toBe('abcdefghijkl');
});

test('gaps in the middle and at the end are counted and reported, and the output is marked as incomplete', async () => {
  const { system, agent, begin, ended, get } = await scripted();
  const id = await begin('true');
  const report = reporting(agent, (await nextCall(agent, 'StartProcess')).call_id);
  report.started();
  report.stdout(0, 'abc');
  report.stdout(10, 'def');
  report.exited(20);
  report.end();
  const record = await ended(id);
  expect(record).toMatchObject({ stdout_bytes: 20, stdout_truncated: true, status: 'completed' });
  const received = await listen(system, id);
  expect([received.stdout.toString(), received.gaps]).toEqual([
    'abcdef',
    [
      [3, 10],
      [13, 20],
    ],
  ]);
  await expect(output(system, id).then((response) => response.text())).rejects.toThrow();
  expect(await get(id)).toEqual(record);
});

test('a small output that lacks its end reports where its available bytes start', async () => {
  const { system, agent, begin, ended } = await scripted();
  const id = await begin('true');
  const report = reporting(agent, (await nextCall(agent, 'StartProcess')).call_id);
  report.started();
  report.stdout(0, 'abc');
  report.exited(20);
  report.end();
  const { stdout_start, stdout_bytes } = await ended(id);
  const response = await output(system, id);
  expect(response.headers.get('x-output-offset')).toBe(String(stdout_start));
  expect(stdout_bytes).toBe(20);
});

test('an agent that sends impossible offsets, or output after the end, harms only its own command', async () => {
  const { system, agent, begin, ended, get } = await scripted();
  const good = await begin('true');
  const goodReport = reporting(agent, (await nextCall(agent, 'StartProcess')).call_id);
  goodReport.started();
  goodReport.stdout(0, 'before ');

  const far = await begin('true');
  const farReport = reporting(agent, (await nextCall(agent, 'StartProcess')).call_id);
  farReport.started();
  farReport.stdout(Number.MAX_SAFE_INTEGER - 3, 'abc');
  farReport.exited(Number.MAX_SAFE_INTEGER);
  expect(await ended(far)).toMatchObject({ stdout_bytes: Number.MAX_SAFE_INTEGER, stdout_truncated: true });
  expect((await listen(system, far)).exit).toBe(true);
  expect(await answerOf(await output(system, far, 'offset=0'))).toMatchObject([
    416,
    'range_not_satisfiable',
    {},
  ]);

  const beyond = await begin('true');
  const beyondReport = reporting(agent, (await nextCall(agent, 'StartProcess')).call_id);
  beyondReport.started();
  beyondReport.stdout(Number.MAX_SAFE_INTEGER, 'abc');
  expect(await ended(beyond)).toMatchObject({ status: 'lost', reason: 'bad_report', stdout_bytes: 0 });

  goodReport.stdout(7, 'after');
  goodReport.exited(12);
  goodReport.stdout(12, ' too late');
  goodReport.exited(99);
  const record = await ended(good);
  expect(record).toMatchObject({ status: 'completed', stdout: 'before after', stdout_bytes: 12 });
  farReport.stdout(0, 'again');
  goodReport.end();
  expect(await (await output(system, good)).text()).toBe('before after');
  expect(await get(good)).toEqual(record);
});
