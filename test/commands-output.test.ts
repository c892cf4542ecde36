// GET /commands/{id}/output: the bytes that a command wrote, while it runs and later, and how long they are stored.
import { execFileSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { existsSync, mkdirSync, readdirSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { DatabaseSync } from 'node:sqlite';
import { expect, onTestFinished, test } from 'vitest';
import { OutputDirectory } from '../broker/commands/stored-output.ts';
import {
  answerOf,
  bench,
  bodyBytes,
  commandsOn,
  gate,
  leapingClock,
  listen,
  nextCall,
  output,
  reporting,
  soon,
} from './commands-fixture.ts';
import { mayMount } from './file-operations-fixture.ts';
import { diskFolder } from './find-file-systems.ts';
import { scriptedMachine } from './scripted-agent.ts';
import { quiet, startFarhand, startWithAgent, temporaryFolder } from './start-farhand.ts';

const mib = 1024 * 1024;
const windowBytes = 64 * mib;

/** Returns the SHA-256 of what a shell command writes. */
function digestOf(command: string): string {
  return execFileSync('sh', ['-c', `(${command}) | sha256sum`], { encoding: 'utf8' }).slice(0, 64);
}

async function digestOfBody(response: Response): Promise<string> {
  const hash = createHash('sha256');
  for await (const piece of response.body ?? []) hash.update(piece);
  return hash.digest('hex');
}

/** Reads a body until it contains a text. */
async function until(body: ReadableStreamDefaultReader<Uint8Array>, text: string): Promise<string> {
  let all = '';
  while (!all.includes(text)) {
    const { value, done } = await body.read();
    if (done) throw new Error(`the answer ended after ${JSON.stringify(all)}`);
    all += Buffer.from(value).toString();
  }
  return all;
}

test.each([
  ['an id that names nothing', 'cmd_none', '', 404, 'command_not_found'],
  ['a stream of another name', undefined, 'stream=stdin', 400, 'invalid_request'],
  ['a negative offset', undefined, 'offset=-1', 400, 'invalid_request'],
  ['an offset that is no number', undefined, 'offset=1e1x', 400, 'invalid_request'],
  ['an offset beyond every number', undefined, 'offset=9007199254740993', 400, 'invalid_request'],
  ['a follow that is no boolean', undefined, 'follow=yes', 400, 'invalid_request'],
])('%s is refused', async (_what, id, query, status, code) => {
  const { system, run } = await bench();
  const response = await output(system, id ?? (await run('true')).id, query);
  expect(await answerOf(response)).toMatchObject([status, code, {}]);
});

test('an offset beyond the end is 416 and reports the length, also with follow once the command has ended', async () => {
  const { system, run } = await bench();
  const { id } = await run('printf abc; printf e >&2');
  for (const query of ['offset=4', 'offset=4&follow=true', 'offset=4&follow=false']) {
    const expected = [416, 'range_not_satisfiable', { start: 0, end: 3 }];
    expect(await answerOf(await output(system, id, query))).toEqual(expected);
  }
  expect(await answerOf(await output(system, id, 'stream=stderr&offset=2'))).toMatchObject([
    416,
    'range_not_satisfiable',
    {},
  ]);
  expect(await answerOf(await output(system, id, 'offset=3'))).toEqual([200, '3', '']);
});

test('a key without commands:read, or that may not use the machine, learns nothing', async () => {
  const { system, run } = await bench();
  const { id } = await run('echo secret');
  const blind = await system.keyed(['commands:execute']);
  const elsewhere = await system.keyed(['commands:read'], { tags: ['none'] });
  for (const { key } of [blind, elsewhere]) {
    for (const path of ['output', 'output?follow=true', 'stream']) {
      const { status, body } = await system.call('GET', `/commands/${id}/${path}`, { key });
      expect([path, status, body.error.code]).toEqual([path, 403, 'forbidden']);
    }
  }
});

test('a part of the output, of either stream, has its length and its start offset', async () => {
  const { system, run } = await bench();
  const { id } = await run('printf 0123456789; printf errors >&2');
  for (const [query, offset, text] of [
    ['', '0', '0123456789'],
    ['stream=stdout&offset=0', '0', '0123456789'],
    ['offset=7', '7', '789'],
    ['offset=10', '10', ''],
    ['stream=stderr', '0', 'errors'],
    ['stream=stderr&offset=2', '2', 'rors'],
  ] as const) {
    const response = await output(system, id, query);
    expect(response.headers.get('content-length')).toBe(String(text.length));
    expect(response.headers.get('x-content-type-options')).toBe('nosniff');
    expect(await answerOf(response)).toEqual([200, offset, text]);
    const head = await output(system, id, query, { method: 'HEAD' });
    expect(head.headers.get('content-length')).toBe(String(text.length));
    expect([head.status, head.headers.get('x-output-offset')]).toEqual([200, offset]);
  }
  expect(existsSync(join(system.dataDir, 'output', id))).toBe(false);
});

test('bytes of every value arrive unchanged, with follow and later', async () => {
  const { system, run } = await bench();
  const all = Buffer.from(Array.from({ length: 256 * 256 }, (_, n) => (n % 257) & 255));
  const stdin = all.toString('base64');
  const { id } = await run('base64 -d | tee /dev/stderr', { stdin });
  for (const query of ['', 'stream=stderr', 'follow=true', 'stream=stderr&follow=true']) {
    expect((await bodyBytes(await output(system, id, query))).equals(all)).toBe(true);
  }
  expect((await bodyBytes(await output(system, id, 'offset=40000'))).equals(all.subarray(40_000))).toBe(true);
});

test('a line of 10 MB arrives unchanged, with follow and later by offset, and the record has its last MiB', async () => {
  const { system, begin, ended } = await bench();
  const { wait, open } = gate();
  const line = `head -c 7500000 /dev/zero | tr '\\0' x; seq 1 300000 | tr -d '\\n'`;
  const id = await begin(`${wait}; ${line}`);
  const following = output(system, id, 'follow=true');
  open();
  expect(await digestOfBody(await following)).toBe(digestOf(line));
  const { stdout, stdout_bytes, stdout_start, stdout_truncated } = await ended(id);
  expect([stdout.length, stdout_start, stdout_truncated]).toEqual([mib, 0, true]);
  expect(stdout_bytes).toBeGreaterThan(9_000_000);
  expect(await digestOfBody(await output(system, id))).toBe(digestOf(line));
  const tail = await output(system, id, `offset=${stdout_bytes - mib}`);
  expect([tail.headers.get('content-length'), await tail.text()]).toEqual([String(mib), stdout]);
});

test('a follower gets the head at once, then each byte as it is written, and the end with the command', async () => {
  const { system, begin } = await bench();
  const first = gate();
  const second = gate();
  const id = await begin(`${first.wait}; printf one; ${second.wait}; printf two; exit 3`);
  // The answer begins before the command has written anything.
  const response = await output(system, id, 'follow=true');
  expect([response.status, response.headers.get('x-output-offset')]).toEqual([200, '0']);
  expect(response.headers.get('content-length')).toBeNull();
  const reader = response.body!.getReader();
  first.open();
  expect(await until(reader, 'one')).toBe('one');
  // A follower may start at a byte that is not written yet.
  const later = await output(system, id, 'follow=true&offset=5');
  const inside = await output(system, id, 'follow=true&offset=1');
  expect(later.headers.get('x-output-offset')).toBe('5');
  // Without `follow`, the answer ends with the last byte written so far.
  expect(await answerOf(await output(system, id))).toEqual([200, '0', 'one']);
  expect(await answerOf(await output(system, id, 'offset=4'))).toMatchObject([
    416,
    'range_not_satisfiable',
    {},
  ]);
  second.open();
  expect(await until(reader, 'two')).toBe('two');
  expect(await reader.read()).toEqual({ done: true, value: undefined });
  expect([await later.text(), await inside.text()]).toEqual(['o', 'netwo']);
  expect(await answerOf(await output(system, id, 'follow=true&offset=2'))).toEqual([200, '2', 'etwo']);
});

test('HEAD with follow is answered at once, although the command goes on', async () => {
  const { system, begin } = await bench();
  const { wait, open } = gate();
  const id = await begin(wait);
  const head = await output(system, id, 'follow=true', { method: 'HEAD' });
  expect([head.status, head.headers.get('content-length')]).toEqual([200, null]);
  open();
});

test('a command that has not started yet can be followed, from its first byte to its last', async () => {
  const { system, agent } = await startWithAgent();
  await agent.close();
  const { begin } = commandsOn(system, agent.machineId);
  const id = await begin('printf first; printf last', { queue_for: 600_000 });
  const bytes = await output(system, id, 'follow=true');
  expect(bytes.status).toBe(200);
  const received = listen(system, id);
  await system.agent({ dataDir: agent.dataDir });
  expect(await bytes.text()).toBe('firstlast');
  expect((await received).stdout.toString()).toBe('firstlast');
});

test('the output of a command that never runs ends for its followers', async () => {
  const { system, agent } = await startWithAgent();
  await agent.close();
  const { begin } = commandsOn(system, agent.machineId);
  const id = await begin('true', { queue_for: 600_000 });
  const bytes = await output(system, id, 'follow=true');
  const received = listen(system, id);
  await system.client.commands.cancel({ command_id: id });
  expect(await bytes.text()).toBe('');
  expect((await received).events).toMatchObject([
    { event: 'exit', data: { status: 'cancelled' }, id: '0.0' },
  ]);
});

test('clients that disconnect in the middle harm neither the command nor each other', async () => {
  const { system, begin, ended } = await bench();
  const { wait, open } = gate();
  const id = await begin(`seq 1 100000; ${wait}; seq 100001 200000`);
  const leaving = Array.from({ length: 10 }, async (_, n) => {
    const stop = new AbortController();
    const response = await output(system, id, `follow=true&offset=${n}`, { signal: stop.signal });
    await response.body!.getReader().read();
    stop.abort();
  });
  const staying = output(system, id, 'follow=true');
  await Promise.all(leaving);
  open();
  expect(await digestOfBody(await staying)).toBe(digestOf('seq 1 200000'));
  expect(await ended(id)).toMatchObject({ status: 'completed', stdout_bytes: 1_288_895 });
});

test('the last 64 MiB of a larger output are stored, the record has their start offset, and earlier bytes are refused with 416', async () => {
  const { system, run } = await bench();
  const numbers = 'seq 1 11000000';
  const { id, stdout_bytes, stdout_start, stdout } = await run(`${numbers}; echo end >&2`);
  expect(stdout_start).toBeGreaterThan(0);
  expect(stdout_bytes - stdout_start).toBeGreaterThanOrEqual(windowBytes);
  expect(stdout_bytes - stdout_start).toBeLessThanOrEqual(windowBytes + windowBytes / 16 + mib);
  expect(stdout.endsWith('\n10999999\n11000000\n')).toBe(true);
  const gone = [416, 'range_not_satisfiable', { start: stdout_start, end: stdout_bytes }];
  for (const query of ['offset=0', `offset=${stdout_start - 1}`, 'offset=0&follow=true']) {
    expect(await answerOf(await output(system, id, query))).toEqual(gone);
  }
  const kept = await output(system, id);
  expect(kept.headers.get('x-output-offset')).toBe(String(stdout_start));
  expect(await digestOfBody(kept)).toBe(digestOf(`${numbers} | tail -c +${stdout_start + 1}`));
  // A stream of events reports the deleted bytes as a gap.
  const stop = new AbortController();
  const events = await system.client.commands.stream({ command_id: id }, { signal: stop.signal });
  for await (const { event, data } of events) {
    expect([event, data]).toEqual(['gap', { stream: 'stdout', from: 0, to: stdout_start }]);
    break;
  }
  stop.abort();
});

test('output of ended commands is limited: the oldest files are deleted, but not their records and last MiB', async () => {
  const { system, run, get } = await bench({ brokerFlags: ['--keep-output', '5MiB'] });
  const [first, second] = [await run('seq 1 500000'), await run('seq 2 500000')];
  expect(first.stdout_start).toBe(0);
  const folder = join(system.dataDir, 'output');
  await soon(() => readdirSync(folder)).toEqual([second.id]);
  const start = first.stdout_bytes - mib;
  expect(await get(first.id)).toEqual({ ...first, stdout_start: start });
  expect(await answerOf(await output(system, first.id, 'offset=0'))).toEqual([
    416,
    'range_not_satisfiable',
    { start, end: first.stdout_bytes },
  ]);
  expect(await answerOf(await output(system, first.id))).toEqual([200, String(start), first.stdout]);
  expect(await digestOfBody(await output(system, second.id, 'offset=0'))).toBe(digestOf('seq 2 500000'));
});

test('old commands are deleted with their files, whose space can be used again', async () => {
  const clock = leapingClock();
  const { system, agent, run } = await bench({
    brokerFlags: ['--keep-output', '5MiB', '--keep-history', '2d'],
  });
  const folder = join(system.dataDir, 'output');
  const old = await run('seq 1 500000');
  expect(readdirSync(folder)).toEqual([old.id]);
  await agent.close();
  clock.leap(49 * 3_600_000);
  await soon(() => readdirSync(folder)).toEqual([]);
  expect(await answerOf(await output(system, old.id))).toMatchObject([404, 'command_not_found', {}]);
  const again = await system.agent({ dataDir: agent.dataDir });
  const { run: later } = commandsOn(system, again.machineId);
  const young = await later('seq 2 500000');
  // If the deleted files still counted toward --keep-output, the end of this command would delete the files of `young`.
  await later('true');
  expect(await digestOfBody(await output(system, young.id, 'offset=0'))).toBe(digestOf('seq 2 500000'));
});

test('at its start the broker deletes files of unknown commands, keeps those of known ones, and ignores other files', async () => {
  const { system, agent, run } = await bench();
  const kept = await run('seq 1 50000');
  const small = await run('echo small');
  await agent.close();
  await system.broker.close();
  const folder = join(system.dataDir, 'output');
  mkdirSync(join(folder, 'cmd_unknown0000000000000', 'stdout'), { recursive: true });
  writeFileSync(join(folder, 'cmd_unknown0000000000000', 'stdout', '0000000000000000'), 'stray');
  mkdirSync(join(folder, small.id));
  writeFileSync(join(folder, 'stray'), 'stray');
  const again = await startFarhand({ dataDir: system.dataDir });
  expect(readdirSync(folder)).toEqual([kept.id]);
  expect(await digestOfBody(await output(again, kept.id))).toBe(digestOf('seq 1 50000'));
  expect(await answerOf(await output(again, small.id))).toEqual([200, '0', 'small\n']);
});

test('removed or shortened output files cut the answer, and the events report a gap', async () => {
  const { system, run } = await bench();
  const { id, stdout_bytes } = await run('seq 1 200000');
  const [name = ''] = readdirSync(join(system.dataDir, 'output', id, 'stdout'));
  writeFileSync(join(system.dataDir, 'output', id, 'stdout', name), 'short');
  // The request fails, either before or after the head of the answer. So a client never takes the incomplete output for
  // the whole.
  await expect(output(system, id).then((cut) => cut.text())).rejects.toThrow();
  expect((await listen(system, id)).gaps).toEqual([[5, stdout_bytes]]);
});

test('the database stores only the last MiB of an output', async () => {
  const { system, agent, run } = await bench();
  const { id } = await run('head -c 5000000 /dev/zero');
  await agent.close();
  await system.broker.close();
  const database = new DatabaseSync(join(system.dataDir, 'history.db'));
  const length = (table: string) =>
    database.prepare(`SELECT length(stdout) AS n FROM ${table} WHERE id = ?`).get(id);
  // Lists read the last 4 KiB of the output from `commands`. A request for one command reads the last MiB from
  // `command_tails`. Deleting a row of `commands` also deletes the row in `command_tails`.
  expect([length('commands'), length('command_tails')]).toEqual([{ n: 4096 }, { n: mib }]);
  database.exec('DELETE FROM commands');
  expect(length('command_tails')).toBeUndefined();
  database.close();
});

test('a command whose output cannot be synced to disk has only the output in its record', async () => {
  const system = await startFarhand();
  const agent = await scriptedMachine(system);
  const { begin, ended } = commandsOn(system, agent.identity.machineId);
  const id = await begin('some output');
  const report = reporting(agent, (await nextCall(agent, 'StartProcess')).call_id);
  const bytes = Buffer.alloc(3 * mib, 'x');
  report.started();
  for (let at = 0; at < bytes.length; at += 32_768) report.stdout(at, bytes.subarray(at, at + 32_768));
  const folder = join(system.dataDir, 'output', id, 'stdout');
  await soon(() => (existsSync(folder) ? statSync(join(folder, '0'.repeat(16))).size : 0)).toBe(3 * mib);
  rmSync(folder, { recursive: true });
  report.exited(bytes.length);
  expect(await ended(id)).toMatchObject({ stdout_bytes: 3 * mib, stdout_start: 2 * mib });
  expect(await answerOf(await output(system, id, 'offset=0'))).toMatchObject([
    416,
    'range_not_satisfiable',
    {},
  ]);
  expect((await bodyBytes(await output(system, id))).length).toBe(mib);
});

/** Returns how many bytes of a file a power cut would lose; undefined without cachestat(2), which needs Linux 6.5. */
function unsyncedBytes(file: string): number | undefined {
  const script = `open(my $file, '<', $ARGV[0]) or exit 1;
    my ($range, $counts) = (pack('Q2', 0, 0), "\\0" x 40);
    syscall(451, fileno($file), $range, $counts, 0) == 0 or exit 1;
    my (undef, $dirty, $writeback) = unpack('Q5', $counts);
    print $dirty + $writeback;`;
  try {
    return 4096 * Number(execFileSync('perl', ['-e', script, file], { encoding: 'utf8', stdio: 'pipe' }));
  } catch {
    return undefined;
  }
}

test('output is on disk before the record reports the end and before the machine deletes its copy', async (context) => {
  const dataDir = temporaryFolder('broker', diskFolder);
  const probe = join(dataDir, 'probe');
  writeFileSync(probe, 'x'.repeat(mib));
  if (!unsyncedBytes(probe)) context.skip('needs Linux 6.5 and a file system that delays writing');
  const system = await startFarhand({ dataDir });
  const agent = await scriptedMachine(system);
  const { begin, ended } = commandsOn(system, agent.identity.machineId);
  const id = await begin('much output');
  const report = reporting(agent, (await nextCall(agent, 'StartProcess')).call_id);
  const bytes = Buffer.alloc(5 * mib, 'x');
  report.started();
  for (let at = 0; at < bytes.length; at += 32_768) report.stdout(at, bytes.subarray(at, at + 32_768));
  report.exited(bytes.length);
  expect((await ended(id)).stdout_bytes).toBe(bytes.length);
  const folder = join(system.dataDir, 'output', id, 'stdout');
  const names = readdirSync(folder);
  expect(names).toHaveLength(2);
  expect(names.map((name) => unsyncedBytes(join(folder, name)))).toEqual([0, 0]);
  const forget = await agent.next('call');
  expect([forget.method, agent.decode(forget)]).toEqual(['ForgetProcesses', { ids: [id] }]);
});

test('the output of a command whose machine moves away and comes back at once is read from the machine again', async () => {
  const directory = new OutputDirectory(join(temporaryFolder('output'), 'output'), quiet);
  const output = directory.fresh('cmd_moved');
  await output.append('stdout', 0, Buffer.alloc(mib));
  void directory.drop('cmd_moved', output);
  const again = await directory.reopen('cmd_moved');
  expect([again.stdout.end, await directory.ids()]).toEqual([0, []]);
});

test.runIf(mayMount)('output is stored as soon as a nearly full disk has space again', async () => {
  const folder = temporaryFolder('full');
  execFileSync('mount', ['-t', 'tmpfs', '-o', 'size=4m', 'tmpfs', folder]);
  onTestFinished(() => void execFileSync('umount', [folder]));
  const filler = join(folder, 'filler');
  writeFileSync(filler, Buffer.alloc(3.8 * mib));
  const disk = new OutputDirectory(join(folder, 'output'), quiet);
  const piece = Buffer.alloc(100 * 1024);
  const refused = disk.fresh('cmd_refused');
  await refused.append('stdout', 0, piece);
  expect(refused.extent()).toMatchObject({ stdout_bytes: piece.length, kept_bytes: 0 });
  rmSync(filler);
  const kept = disk.fresh('cmd_kept');
  await kept.append('stdout', 0, piece);
  expect(kept.extent()).toMatchObject({ stdout_bytes: piece.length, kept_bytes: piece.length });
  await kept.close();
});
