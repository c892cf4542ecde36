// The output log: offsets, the sliding window, restarts and a full disk.
import { randomBytes } from 'node:crypto';
import { mkdtemp, readdir, rm, stat, truncate, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { Backpressure } from '../shared/output-backpressure.ts';
import { OutputLog, type OutputOptions, type OutputReader, openOutput } from '../shared/output-log.ts';
import { Wake } from '../shared/wait-for-change.ts';
import { fakeClock } from './fake-clock.ts';

let home: string;
let directory: string;
let logs: OutputLog[] = [];

beforeEach(async () => {
  home = await mkdtemp(join(tmpdir(), 'farhand-output-'));
  directory = join(home, 'log');
});
afterEach(async () => {
  await Promise.all(logs.map((log) => log.close()));
  logs = [];
  await rm(home, { recursive: true, force: true });
});

function make(options: OutputOptions = {}): OutputLog {
  const log = new OutputLog(directory, options);
  logs.push(log);
  return log;
}

async function reopen(options: OutputOptions = {}): Promise<OutputLog> {
  const log = await openOutput(directory, options);
  logs.push(log);
  return log;
}

/** Reads everything from offset `from` on. Returns the bytes and the ranges of missing bytes. */
async function readAll(log: OutputLog, from = 0): Promise<{ data: Buffer; gaps: [number, number][] }> {
  const pieces: Buffer[] = [];
  const gaps: [number, number][] = [];
  for (let at = from; at < log.end; ) {
    const { offset, data } = await log.read(at, 50_000);
    if (offset > at) gaps.push([at, offset]);
    pieces.push(data);
    at = offset + data.length;
  }
  return { data: Buffer.concat(pieces), gaps };
}

async function bytesOnDisk(): Promise<number> {
  const files = await Promise.all((await readdir(directory)).map((name) => stat(join(directory, name))));
  return files.reduce((sum, { size }) => sum + size, 0);
}

test('a log with many gaps has no more files than one without', async () => {
  const log = make();
  for (let n = 0; n < 300; n += 1) {
    await log.skip(log.end + 1);
    await log.append(Buffer.from('x'));
  }
  expect([log.end, (await readdir(directory)).length]).toEqual([600, 64]);
  expect((await log.read(0, 10)).offset).toBe(log.start);
});

test('bytes that cannot be written are refused, counted and reported as a gap, and the log goes on after them', async () => {
  await writeFile(directory, 'in the way');
  const log = make();
  await expect(log.append(Buffer.from('lost'))).rejects.toMatchObject({ code: 'already_exists' });
  expect(log.end).toBe(4);
  await rm(directory);
  await log.append(Buffer.from('kept'));
  expect(await readAll(log)).toEqual({ data: Buffer.from('kept'), gaps: [[0, 4]] });
});

test('a gap at the very end is reported too', async () => {
  await writeFile(directory, 'in the way');
  const log = make();
  await expect(log.append(Buffer.from('lost'))).rejects.toThrow();
  expect(await log.read(0, 100)).toEqual({ offset: 4, data: Buffer.alloc(0) });
});

test('a file that was shortened or removed becomes a gap, and no reader ends', async () => {
  const log = make({ windowBytes: 160 });
  for (let i = 0; i < 3; i++) await log.append(Buffer.alloc(10, String(i)));
  await log.close();
  const names = (await readdir(directory)).sort();
  await rm(join(directory, names[0]!));
  await truncate(join(directory, names[1]!), 4);
  const data = Buffer.from(`1111${'2'.repeat(10)}`);
  const gaps = [
    [0, 10],
    [14, 20],
  ];
  expect(await readAll(log)).toEqual({ data, gaps });
  expect(await readAll(log)).toEqual({ data, gaps });
});

test('bytes in memory that cannot be written stay readable, and are written with the next bytes', async () => {
  await writeFile(directory, 'in the way');
  const log = make({ memoryBytes: 8 });
  await log.append(Buffer.from('abcdef'));
  await expect(log.append(Buffer.from('lost'))).rejects.toMatchObject({ code: 'already_exists' });
  expect(await readAll(log)).toEqual({ data: Buffer.from('abcdef'), gaps: [[6, 10]] });
  expect([log.end, log.size]).toEqual([10, 0]);
  await rm(directory);
  await log.append(Buffer.from('kept'));
  expect(log.size).toBe(10);
  for (const seen of [log, await reopen()])
    expect(await readAll(seen)).toEqual({ data: Buffer.from('abcdefkept'), gaps: [[6, 10]] });
});

test('a reader that stops reading stalls the writer once, then loses bytes until it reads again', async () => {
  const log = make({ windowBytes: 1600, stallMs: 50 });
  const reader = log.reader(0);
  const begun = performance.now();
  for (let i = 0; i < 40; i++) await log.append(Buffer.alloc(100, i));
  expect(performance.now() - begun).toBeGreaterThanOrEqual(45);
  expect(performance.now() - begun).toBeLessThan(1000);
  expect(await reader.read(100)).toEqual({ offset: log.start, data: Buffer.alloc(100, 24) });
  // The writer does not wait for a reader that has stopped reading. After this read the reader counts as active, so the
  // writer waits for it once more.
  const again = performance.now();
  await log.append(Buffer.alloc(100));
  expect(performance.now() - again).toBeGreaterThanOrEqual(45);
});

test('a slow reader beside a fast one does not delay it, and gets a gap', async () => {
  const log = make({ windowBytes: 1600 });
  const [slow, fast] = [log.reader(0), log.reader(0)];
  for (let i = 0; i < 50; i++) {
    await log.append(Buffer.alloc(100, i));
    expect(await fast.read(1000)).toEqual({ offset: 100 * i, data: Buffer.alloc(100, i) });
  }
  expect((await slow.read(1)).offset).toBe(log.start);
  expect(log.start).toBeGreaterThan(0);
});

test.each<[string, (log: OutputLog, reader: OutputReader) => unknown]>([
  ['the reader leaves', (_, reader) => reader.close()],
  ['the reader comes near enough', (_, reader) => reader.read(100)],
  ['the log is released', (log) => log.release()],
  ['the log is removed', (log) => log.remove()],
])('a writer that waits goes on at once when %s', async (_what, free) => {
  const log = make({ windowBytes: 1600, stallMs: 600_000 });
  const reader = log.reader(0);
  // Fills an eighth of the window. The next append must wait for the reader.
  await log.append(Buffer.alloc(200));
  let waited = false;
  const held = log.append(Buffer.alloc(1)).then(() => {
    waited = true;
  });
  const woken = log.changed.wait(new AbortController().signal);
  await woken;
  // Waits for an append to another log, which has no reader to wait for. If the first append did not have to wait, it
  // would have ended by now too.
  const other = new OutputLog(join(home, 'other'));
  logs.push(other);
  await other.append(Buffer.alloc(1));
  expect(waited).toBe(false);
  await free(log, reader);
  await held;
});

test('when one of two readers leaves, the writer waits only as long as for the other', async () => {
  const clock = fakeClock(0);
  const pressure = new Backpressure(10, 1_000);
  pressure.join(0);
  await clock.advance(900);
  const second = pressure.join(0);
  let waits = true;
  const held = pressure
    .hold(() => 100)
    .then(() => {
      waits = false;
    });
  pressure.leave(second);
  await nextTurn();
  await clock.advance(150);
  expect(waits).toBe(false);
  await held;
});

test('a log without output makes neither file nor directory', async () => {
  const log = make();
  await log.close();
  await log.remove();
  expect(await readdir(home)).toEqual([]);
});

test('reading beyond the end returns nothing', async () => {
  const log = make();
  await log.append(Buffer.from('abc'));
  expect(await log.read(3, 10)).toEqual({ offset: 3, data: Buffer.alloc(0) });
  expect(await log.read(9, 10)).toEqual({ offset: 9, data: Buffer.alloc(0) });
});

test('reads return the appended bytes, from any offset and across segments', async () => {
  const log = make({ windowBytes: 16_000_000 });
  const all = randomBytes(3_000_000);
  for (let at = 0; at < all.length; at += 65_536) await log.append(all.subarray(at, at + 65_536));
  expect((await readdir(directory)).length).toBeGreaterThan(1);
  for (const from of [0, 1, 999_999, 1_048_576, 2_999_999]) {
    const { data, gaps } = await readAll(log, from);
    expect(gaps).toEqual([]);
    expect(data.equals(all.subarray(from))).toBe(true);
  }
});

test('appends that are not awaited keep their order while others read', async () => {
  const log = make({ windowBytes: 16_000_000 });
  const lines = Array.from({ length: 500 }, (_, i) => Buffer.from(`line ${i}\n`));
  const appended = Promise.all(lines.map((line) => log.append(line)));
  const early = readAll(log);
  await appended;
  await early;
  expect((await readAll(log)).data.equals(Buffer.concat(lines))).toBe(true);
});

test('a log has the last bytes, at least as many as its window and not many more, and reports deleted bytes', async () => {
  const windowBytes = 160_000;
  const log = make({ windowBytes });
  const all = randomBytes(1_000_000);
  for (let at = 0; at < all.length; at += 1000) await log.append(all.subarray(at, at + 1000));
  expect(log.end - log.start).toBeGreaterThanOrEqual(windowBytes);
  expect(await bytesOnDisk()).toBeLessThanOrEqual(windowBytes + windowBytes / 16 + 1000);
  const { data, gaps } = await readAll(log);
  expect(gaps).toEqual([[0, log.start]]);
  expect(data.equals(all.subarray(log.start))).toBe(true);
});

test('a reader that the window overtakes gets a gap, never wrong bytes', async () => {
  const log = make({ windowBytes: 16_000 });
  const all = randomBytes(400_000);
  const read: { offset: number; data: Buffer }[] = [];
  for (let at = 0; at < all.length; at += 4000) {
    await Promise.all([
      log.append(all.subarray(at, at + 4000)),
      log.read(Math.max(0, at - 18_000), 4000).then((piece) => read.push(piece)),
    ]);
  }
  for (const { offset, data } of read)
    expect(data.equals(all.subarray(offset, offset + data.length))).toBe(true);
});

test('a log reopened from the disk has the same bytes and continues at its end', async () => {
  const all = randomBytes(100_000);
  const first = make({ windowBytes: 160_000 });
  await first.append(all.subarray(0, 60_000));
  await first.close();
  const second = await reopen({ windowBytes: 160_000 });
  expect([second.start, second.end]).toEqual([0, 60_000]);
  await second.append(all.subarray(60_000));
  expect((await readAll(second)).data.equals(all)).toBe(true);
});

test('a log that was never written opens empty', async () => {
  const log = await reopen();
  expect([log.start, log.end]).toEqual([0, 0]);
});

test('a skip makes a gap that survives a restart', async () => {
  const first = make();
  await first.append(Buffer.from('abc'));
  await first.skip(10);
  await first.append(Buffer.from('def'));
  await first.close();
  for (const log of [first, await reopen()]) {
    expect(log.end).toBe(13);
    expect(await readAll(log)).toEqual({ data: Buffer.from('abcdef'), gaps: [[3, 10]] });
  }
});

test('a removed log leaves no file, and its readers get a gap', async () => {
  const log = make();
  await log.append(Buffer.from('abc'));
  await log.remove();
  expect(await readdir(home)).toEqual([]);
  expect([log.start, log.end]).toEqual([3, 3]);
  expect(await log.read(0, 10)).toEqual({ offset: 3, data: Buffer.alloc(0) });
});

test('a slow reader gets every byte of a fast writer', async () => {
  const log = make({ windowBytes: 160_000 });
  const all = randomBytes(2_000_000);
  const reader = log.reader(0);
  const written = (async () => {
    for (let at = 0; at < all.length; at += 8000) await log.append(all.subarray(at, at + 8000));
  })();
  const pieces: Buffer[] = [];
  while (reader.position < all.length) {
    const { offset, data } = await reader.read(3000);
    expect(offset + data.length).toBe(reader.position);
    pieces.push(data);
    if (data.length === 0) await log.changed.wait(new AbortController().signal);
  }
  await written;
  expect(Buffer.concat(pieces).equals(all)).toBe(true);
});

test('a log that fits in memory makes no file and is read like any other', async () => {
  const log = make({ memoryBytes: 3000 });
  const all = randomBytes(3000);
  for (let at = 0; at < all.length; at += 7) await log.append(all.subarray(at, at + 7));
  expect([log.start, log.end, log.size]).toEqual([0, 3000, 0]);
  await log.close();
  for (const from of [0, 1, 2999]) {
    const { data, gaps } = await readAll(log, from);
    expect(gaps).toEqual([]);
    expect(data.equals(all.subarray(from))).toBe(true);
  }
  await log.remove();
  expect(await log.read(0, 10)).toEqual({ offset: 3000, data: Buffer.alloc(0) });
  expect(await readdir(home)).toEqual([]);
});

test('a log that no longer fits in memory is written to disk completely, and earlier reads stay valid', async () => {
  const options = { memoryBytes: 3000, windowBytes: 16_000 };
  const log = make(options);
  const all = randomBytes(10_000);
  await log.append(all.subarray(0, 100));
  const early = await log.read(0, 100);
  for (let at = 100; at < all.length; at += 700) await log.append(all.subarray(at, at + 700));
  expect(early.data.equals(all.subarray(0, 100))).toBe(true);
  expect(log.size).toBe(await bytesOnDisk());
  await log.close();
  for (const seen of [log, await reopen(options)]) {
    const { data, gaps } = await readAll(seen);
    expect(gaps).toEqual([]);
    expect(data.equals(all)).toBe(true);
  }
});

test('files and directory are for this user only', async () => {
  await make().append(Buffer.from('abc'));
  const [name] = await readdir(directory);
  expect((await stat(directory)).mode & 0o777).toBe(0o700);
  expect((await stat(join(directory, name!))).mode & 0o777).toBe(0o600);
});

test('a waiting reader is woken by an append or by its signal, and leaves nothing behind', async () => {
  const changed = new Wake();
  const log = make({ changed });
  const woken = changed.wait(new AbortController().signal);
  await log.append(Buffer.from('abc'));
  await woken;
  const stop = new AbortController();
  const stopped = changed.wait(stop.signal);
  stop.abort();
  await stopped;
  await changed.wait(stop.signal);
});
