// Processes on one machine, without a link: each starts at most once, every byte of output arrives, and its whole
// process tree ends.
import { type ChildProcess, spawn } from 'node:child_process';
import { createHash, randomBytes } from 'node:crypto';
import { once } from 'node:events';
import {
  access,
  appendFile,
  chmod,
  copyFile,
  mkdir,
  mkdtemp,
  open as openFile,
  readdir,
  readFile,
  readlink,
  rm,
  rmdir,
  stat,
  writeFile,
} from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { gunzipSync } from 'node:zlib';
import { afterEach, beforeEach, expect, onTestFinished, test, vi } from 'vitest';
import { unseen } from '../../agent/processes/crash-recovery.ts';
import { type Processes, type ProcessesOptions, startProcesses } from '../../agent/processes/index.ts';
import { Journal, readJournal } from '../../agent/processes/process-journal.ts';
import type { ProcessEvent } from '../../proto/types/farhand/agent/v1/ProcessEvent.ts';
import type { ProcessExit } from '../../proto/types/farhand/agent/v1/ProcessExit.ts';
import type { ProcessSpec__Output } from '../../proto/types/farhand/agent/v1/ProcessSpec.ts';
import type { AgentCall } from '../../shared/agent-rpcs.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import { createLogger } from '../../shared/logger.ts';
import { waitFor } from '../wait-for.ts';
import { alive, specOf, writeAgentProgram } from './process-calls.ts';

const asRoot = process.getuid?.() === 0;
const root = join(import.meta.dirname, '../..');

let home: string;
let processes: Processes;
let started: Processes[];

beforeEach(async () => {
  home = await mkdtemp(join(tmpdir(), 'farhand-processes-'));
  started = [];
});
afterEach(async () => {
  await Promise.all(started.map((one) => one.stop()));
  await rm(home, { recursive: true, force: true });
});

type Limits = NonNullable<ProcessesOptions['limits']>;

async function open(limits: Limits = {}, mayRunAs = true): Promise<Processes> {
  const log = createLogger('test', 'silent');
  processes = await startProcesses({ directory: join(home, 'agent'), log, mayRunAs, limits });
  started.push(processes);
  return processes;
}

function call(signal: AbortSignal = new AbortController().signal): AgentCall {
  return { signal };
}

/** A shell command, or fields of a process spec. */
type Wanted = string | Partial<ProcessSpec__Output>;

function start(wanted: Wanted, id = newId('command'), signal?: AbortSignal): AsyncIterator<Answer> {
  const asked = typeof wanted === 'string' ? { command: wanted } : wanted;
  const spec = specOf({ cwd: home, ...asked });
  return processes.startProcess({ id, spec }, call(signal))[Symbol.asyncIterator]();
}

function follow(id: string, stdout_offset = 0, stderr_offset = 0): AsyncIterator<Answer> {
  return processes.followProcess({ id, stdout_offset, stderr_offset }, call())[Symbol.asyncIterator]();
}

function give(
  id: string,
  data: string | Buffer,
  more: { offset?: number; end?: boolean } = {},
): Promise<{ taken?: unknown }> {
  return processes.writeInput({ id, data: Buffer.from(data), end: false, ...more }, call());
}

function send(id: string, signal: string): Promise<object> {
  return processes.signalProcess({ id, signal }, call());
}

interface Answer {
  event?: ProcessEvent | null;
}

interface Received {
  pid: number | undefined;
  stdout: Buffer;
  stderr: string;
  gaps: { from: number; to: number }[];
  exits: ProcessExit[];
}

/** Reads events to their end, or until `enough` returns true. Checks that each output begins at the expected offset. */
async function hear(
  events: AsyncIterator<Answer>,
  enough: (received: Received) => boolean = () => false,
  [stdoutFrom, stderrFrom]: [number, number] = [0, 0],
): Promise<Received> {
  const received: Received = { pid: undefined, stdout: Buffer.alloc(0), stderr: '', gaps: [], exits: [] };
  const at = { OUTPUT_STREAM_STDOUT: stdoutFrom, OUTPUT_STREAM_STDERR: stderrFrom };
  const pieces: Buffer[] = [];
  while (!enough(received)) {
    const next = await events.next();
    if (next.done) break;
    const { started, output, gap, exit } = next.value.event ?? {};
    if (started) received.pid = started.pid;
    if (exit) received.exits.push(exit);
    const stream =
      (output ?? gap)?.stream === 'OUTPUT_STREAM_STDERR' ? 'OUTPUT_STREAM_STDERR' : 'OUTPUT_STREAM_STDOUT';
    if (gap) {
      received.gaps.push({ from: Number(gap.from), to: Number(gap.to) });
      expect(gap.from).toBe(at[stream]);
      at[stream] = Number(gap.to);
    }
    if (output) {
      const data = Buffer.from(output.data ?? '');
      expect(output.offset).toBe(at[stream]);
      expect(data.length).toBeLessThanOrEqual(256 * 1024);
      at[stream] += data.length;
      if (stream === 'OUTPUT_STREAM_STDERR') received.stderr += data.toString();
      else pieces.push(data);
    }
    if (output) received.stdout = pieces.length < 50 ? Buffer.concat(pieces) : received.stdout;
  }
  received.stdout = Buffer.concat(pieces);
  return received;
}

/** Runs a command to its end. Returns its exit. Fails unless there is exactly one exit. */
async function run(wanted: Wanted, id?: string): Promise<Received & { exit: ProcessExit }> {
  const received = await hear(start(wanted, id));
  const [exit] = received.exits;
  expect(received.exits).toHaveLength(1);
  return { ...received, exit: exit ?? {} };
}

function sees(text: string): (received: Received) => boolean {
  return ({ stdout }) => stdout.includes(text);
}

async function pidIn(name: string): Promise<number> {
  return Number(await readFile(join(home, name), 'utf8'));
}

function exists(path: string): Promise<boolean> {
  return access(path).then(
    () => true,
    () => false,
  );
}

async function outputs(): Promise<string[]> {
  return readdir(join(home, 'agent/output'));
}

test.each<[string, Wanted, RegExp]>([
  [
    'a missing directory',
    { command: 'true', cwd: '/nonexistent' },
    /^working directory \/nonexistent does not/,
  ],
  [
    'a directory that is a file',
    { command: 'true', cwd: '/etc/passwd' },
    /^working directory .* is not a directory/,
  ],
  ['a missing program', { command: 'nonexistent', direct: true }, /^program nonexistent was not found/],
  ['a missing interpreter', { command: './script', direct: true }, /interpreter .* was not found/],
  ['a path below a file', { command: '/etc/passwd/x', direct: true }, /was not found|ENOTDIR/],
  ['a NUL in the directory', { command: 'true', cwd: '/tmp\0/x' }, /NUL/],
  ['a file that is no program', { command: '/etc/passwd', direct: true }, /permission denied/],
  ['no program at all', { command: '', direct: true }, /no program/],
  ['an unknown user', { command: 'true', user: 'nonexistent' }, /nonexistent/],
  ['a command too long for the kernel', 'x'.repeat(3_000_000), /too long.*E2BIG/],
  ['a NUL in the command', 'true\0', /NUL/],
  ['an impossible variable name', { command: 'true', env: { 'A=B': 'c' } }, /environment variable/],
])('%s means not started, and the reason says so', async (_what, wanted, reason) => {
  await open();
  await writeFile(join(home, 'script'), '#!/nonexistent\n', { mode: 0o755 });
  const { exit, pid } = await run(wanted);
  expect(pid).toBeUndefined();
  expect(exit).toMatchObject({ outcome: 'PROCESS_OUTCOME_NOT_STARTED', started_at_ms: 0 });
  expect(exit.reason).toMatch(reason);
});

test('another user is refused where the owner of the machine did not allow it', async () => {
  await open({}, false);
  const { exit } = await run({ command: 'true', user: 'nobody' });
  expect(exit).toMatchObject({ outcome: 'PROCESS_OUTCOME_NOT_STARTED' });
  expect(exit.reason).toMatch(/not allow/);
});

test.runIf(asRoot)('a missing program is detected for another user too', async () => {
  await open();
  const { exit } = await run({ command: 'nonexistent', direct: true, user: 'nobody', cwd: '/' });
  expect(exit).toMatchObject({
    outcome: 'PROCESS_OUTCOME_NOT_STARTED',
    reason: expect.stringMatching(/not found/),
  });
});

test('a start expires if its link is lost before the journal has the start; another request runs it', async () => {
  await open();
  const id = newId('command');
  const received = await hear(start('touch ran', id, AbortSignal.abort()));
  expect(received.exits).toEqual([]);
  const after = await hear(follow(id));
  expect(after.exits).toMatchObject([{ outcome: 'PROCESS_OUTCOME_EXPIRED', reason: 'dropped' }]);
  expect(await exists(join(home, 'ran'))).toBe(false);
  // After the answer `dropped`, the broker knows that the command did not run. It may send a second request with the
  // same id, which runs the command once.
  const again = await hear(start('echo ran >> ran', id));
  expect(again.exits).toMatchObject([{ outcome: 'PROCESS_OUTCOME_EXITED' }]);
  expect((await hear(start('echo ran >> ran', id))).exits).toEqual(again.exits);
  expect(await readFile(join(home, 'ran'), 'utf8')).toBe('ran\n');
});

test('an unknown id expires when followed and is not found when killed', async () => {
  await open();
  const { exits } = await hear(follow('cmd_unknown'));
  expect(exits).toMatchObject([{ outcome: 'PROCESS_OUTCOME_EXPIRED', reason: 'unknown_id' }]);
  const killed = processes.killProcess({ id: 'cmd_unknown', grace_ms: 0 }, call());
  await expect(killed).rejects.toMatchObject({ code: 'command_not_found' });
  await processes.forgetProcesses({ ids: ['cmd_unknown'] }, call());
});

test('an id that could leave the data directory is refused', async () => {
  await open();
  for (const id of ['', '../x', 'a/b', 'x'.repeat(101)]) {
    await expect(start('true', id).next()).rejects.toMatchObject({ code: 'invalid_request' });
  }
});

test('more processes than allowed are refused, and one more fits when one is over', async () => {
  await open({ open: 2 });
  const running = [newId('command'), newId('command')];
  for (const id of running) await start('sleep 60', id).next();
  await expect(start('true').next()).rejects.toMatchObject({ code: 'unavailable' });
  await processes.killProcess({ id: running[0]!, grace_ms: 0 }, call());
  await hear(follow(running[0]!));
  expect((await run('true')).exit.outcome).toBe('PROCESS_OUTCOME_EXITED');
});

/**
 * Makes the next write to any open file fail, as on a full disk. Calls `meanwhile` during this write. `path` is an
 * existing file.
 */
async function failNextWrite(path: string, meanwhile = (): void => {}): Promise<void> {
  const file = await openFile(path);
  const prototype = Object.getPrototypeOf(file) as { write: () => Promise<void> };
  await file.close();
  const full = vi.spyOn(prototype, 'write').mockImplementationOnce(() => {
    meanwhile();
    return Promise.reject(Object.assign(new Error('full'), { code: 'ENOSPC' }));
  });
  onTestFinished(() => full.mockRestore());
}

test('an id that the journal could not store is not used up, and may be requested again', async () => {
  await open();
  const id = newId('command');
  await failNextWrite(join(home, 'agent/journal'));
  await expect(start('touch ran', id).next()).rejects.toMatchObject({ code: 'no_space' });
  expect(await exists(join(home, 'ran'))).toBe(false);
  expect(processes.ids()).not.toContain(id);
  expect((await run('true', id)).exit.outcome).toBe('PROCESS_OUTCOME_EXITED');
});

/** Opens the journal in this directory as an agent does. */
async function journalIn(directory: string): Promise<Journal> {
  const log = createLogger('test', 'silent');
  await mkdir(directory, { recursive: true });
  return Journal.open(directory, await readJournal(directory, log), 60_000, log);
}

test('a full journal is rewritten without loss', async () => {
  const directory = join(home, 'journal');
  const journal = await journalIn(directory);
  const { ino } = await stat(join(directory, 'journal'));
  // Lines of 70 bytes, together more than a mebibyte.
  const ids = Array.from({ length: 18_000 }, () => newId('command'));
  for (let from = 0; from < ids.length; from += 6_000) {
    await Promise.all(ids.slice(from, from + 6_000).map((id) => journal.accept(id, 'command')));
  }
  for (const id of ids.slice(0, 9_000)) journal.forget(id);
  await journal.close();
  expect((await stat(join(directory, 'journal'))).ino).not.toBe(ino);
  const again = await journalIn(directory);
  expect([...again.entries.keys()]).toEqual(ids.slice(9_000));
  expect(ids.filter((id) => again.wasForgotten(id))).toEqual(ids.slice(0, 9_000));
  await again.close();
});

test('an entry that could not be written is not part of a later write for another id', async () => {
  const directory = join(home, 'journal');
  const journal = await journalIn(directory);
  const [refused, accepted] = [newId('command'), newId('command')];
  let second: Promise<void> | undefined;
  await failNextWrite(join(directory, 'journal'), () => {
    second = journal.accept(accepted, 'command');
  });
  await expect(journal.accept(refused, 'command')).rejects.toMatchObject({ code: 'no_space' });
  await second;
  await journal.close();
  const again = await journalIn(directory);
  expect([...again.entries.keys()]).toEqual([accepted]);
  await again.close();
});

test('the end of a command is written as soon as a full disk has space, even if no other command starts', async () => {
  const directory = join(home, 'journal');
  const journal = await journalIn(directory);
  const id = newId('command');
  await journal.accept(id, 'command');
  await failNextWrite(join(directory, 'journal'));
  journal.ended(id, unseen('PROCESS_OUTCOME_LOST', 'agent_restarted'));
  await expect.poll(() => readFile(join(directory, 'journal'), 'utf8')).toContain('"t":"end"');
  await journal.close();
});

/**
 * Creates the files that an agent of version 0.1.0 leaves if it is killed while the command cmd_ran is running. The id
 * of this command is not in the journal, but only in promises-0, a file of the agent's spawner.
 */
async function leave010(directory: string): Promise<void> {
  await mkdir(directory, { recursive: true });
  for (const name of ['journal', 'promises-0']) {
    const stored = await readFile(join(root, 'test/agent-0.1.0', `${name}.gz`));
    await writeFile(join(directory, name), gunzipSync(stored));
  }
}

test('an id that a crashed agent of 0.1.0 may have run is lost, not expired, and never runs again', async () => {
  const directory = join(home, 'agent');
  await leave010(directory);
  expect(await readFile(join(directory, 'journal'), 'utf8')).not.toContain('cmd_ran');
  // The ids in the files are older than a day. With the usual limit of a day, the agent would forget them, and run a
  // command with such an id again.
  const limits = { seenMs: Number.MAX_SAFE_INTEGER };
  for (let round = 0; round < 2; round++) {
    await open(limits);
    expect(processes.journalId).toBe('bc4fe9c1-f83e-46c8-9726-5f17e83ac3e3');
    expect(processes.ids()).toEqual(['cmd_ended', 'cmd_ran']);
    for (const [id, outcome, reason] of [
      ['cmd_ended', 'PROCESS_OUTCOME_EXITED', ''],
      ['cmd_ran', 'PROCESS_OUTCOME_LOST', 'agent_restarted'],
      ['cmd_forgotten', 'PROCESS_OUTCOME_LOST', 'forgotten'],
    ] as const) {
      expect((await hear(start('touch ran', id))).exits).toMatchObject([{ outcome, reason }]);
    }
    expect(await exists(join(home, 'ran'))).toBe(false);
    expect((await readdir(directory)).filter((name) => name.startsWith('promises'))).toEqual([]);
    await processes.stop();
  }
});

test('a directory with the name of a promises file of 0.1.0 is removed', async () => {
  await mkdir(join(home, 'agent/promises-0/in'), { recursive: true });
  await open();
  expect((await run('true')).exit.exit_code).toBe(0);
  expect(await exists(join(home, 'agent/promises-0'))).toBe(false);
});

test('no pipe stays open when a command is over or all are stopped', async () => {
  const pipesInUse = async (): Promise<string[]> => {
    const fds = await readdir('/proc/self/fd');
    const links = await Promise.all(fds.map((fd) => readlink(`/proc/self/fd/${fd}`).catch(() => '')));
    return links.filter((link) => link.startsWith(join(home, 'agent/pipes')));
  };
  await open();
  await run('true');
  await waitFor(async () => expect(await pipesInUse()).toEqual([]));
  const events = start('echo ready; sleep 60');
  await hear(events, sees('ready'));
  expect(await pipesInUse()).toHaveLength(2);
  await processes.stop();
  await waitFor(async () => expect(await pipesInUse()).toEqual([]));
});

test('an id runs once, however often it is requested and by whichever call', async () => {
  await open();
  const id = newId('command');
  const command = 'echo ran >> ran; echo out';
  const received = await Promise.all([
    hear(start(command, id)),
    hear(start(command, id)),
    hear(start(command, id)),
  ]);
  received.push(await hear(start(command, id)), await hear(follow(id)));
  for (const { stdout, exits } of received) {
    expect(stdout.toString()).toBe('out\n');
    expect(exits).toEqual(received[0].exits);
  }
  await processes.stop();
  await open();
  expect((await hear(start(command, id))).exits).toEqual(received[0].exits);
  await processes.forgetProcesses({ ids: [id] }, call());
  const forgotten = await hear(start(command, id));
  expect(forgotten.exits).toMatchObject([{ outcome: 'PROCESS_OUTCOME_LOST', reason: 'forgotten' }]);
  await processes.stop();
  await open();
  expect((await hear(start(command, id))).exits).toMatchObject([{ reason: 'forgotten' }]);
  expect(await readFile(join(home, 'ran'), 'utf8')).toBe('ran\n');
});

test('input and signals are refused for a process that cannot take them', async () => {
  await open();
  const [deaf, over] = [newId('command'), newId('command')];
  await hear(start('echo ready; sleep 60', deaf), sees('ready'));
  await run({ command: 'true', input: true }, over);
  await expect(give('cmd_unknown', 'x')).rejects.toMatchObject({ code: 'command_not_found' });
  await expect(give(deaf, 'x')).rejects.toMatchObject({ code: 'conflict', message: /takes no input/ });
  await expect(give(over, 'x')).rejects.toMatchObject({ code: 'conflict', message: /over/ });
  await expect(send('cmd_unknown', 'SIGHUP')).rejects.toMatchObject({ code: 'command_not_found' });
  await expect(send(over, 'SIGHUP')).rejects.toMatchObject({ code: 'conflict' });
  for (const signal of ['', 'SIGSEGV', 'sighup', 'SIGRTMIN', '9'])
    await expect(send(deaf, signal)).rejects.toMatchObject({ code: 'invalid_request' });
  await processes.forgetProcesses({ ids: [over] }, call());
  await expect(send(over, 'SIGHUP')).rejects.toMatchObject({ code: 'conflict' });
});

test('input with a gap, or after its end, is refused', async () => {
  await open();
  const id = newId('command');
  const events = start({ command: 'cat; sleep 60', input: true }, id);
  await events.next();
  await give(id, 'abc');
  await expect(give(id, 'x', { offset: 4 })).rejects.toMatchObject({ code: 'conflict' });
  expect(await give(id, 'def', { end: true })).toEqual({ taken: 6 });
  await expect(give(id, 'x')).rejects.toMatchObject({ code: 'conflict' });
  // Input that was received before may be sent again.
  expect(await give(id, 'cdef', { offset: 2, end: true })).toEqual({ taken: 6 });
  expect((await hear(events, sees('abcdef'))).stdout.toString()).toBe('abcdef');
});

test('a command that does not read its input is sent only what its queue can store, and loses none of it', async () => {
  await open();
  const id = newId('command');
  const events = start({ command: 'mkfifo go; echo ready; read go <go; cat', input: true }, id);
  await hear(events, sees('ready'));
  const piece = randomBytes(60_000);
  const given: Buffer[] = [];
  const full = await (async () => {
    for (;;) {
      const error: unknown = await give(id, piece).then(
        () => given.push(piece) && undefined,
        (failure: unknown) => failure,
      );
      if (error !== undefined) return error;
    }
  })();
  expect(full).toMatchObject({
    code: 'unavailable',
    message: 'the command does not read its input; send less, or try again later',
  });
  expect(given.length * piece.length).toBeGreaterThan(1_000_000);
  expect(given.length * piece.length).toBeLessThan(1_200_000);
  await give(id, '', { end: true });
  await writeFile(join(home, 'go'), '\n');
  expect((await hear(events, undefined, [6, 0])).stdout.equals(Buffer.concat(given))).toBe(true);
});

test('input for a command that has closed its input or exited is refused without harm', async () => {
  await open();
  const id = newId('command');
  const events = start(
    { command: 'exec <&-; echo closed; sleep 60', input: true, stdin: randomBytes(300_000) },
    id,
  );
  await hear(events, sees('closed'));
  await give(id, 'x').catch(() => {});
  await waitFor(() => expect(give(id, 'x')).rejects.toMatchObject({ code: 'conflict', message: /closed/ }));
  await processes.killProcess({ id, grace_ms: 0 }, call());
  expect((await hear(events, undefined, [7, 0])).exits).toHaveLength(1);
  const stdin = randomBytes(300_000);
  expect((await run({ command: 'head -c 5', stdin, input: true })).stdout.equals(stdin.subarray(0, 5))).toBe(
    true,
  );
});

test('an id whose result was removed can be used again only once no record of it is left', async () => {
  await open({ seenMs: -1 });
  const id = newId('command');
  await run('true', id);
  await processes.forgetProcesses({ ids: [id] }, call());
  await processes.stop();
  await open({ seenMs: -1 });
  expect((await hear(follow(id))).exits).toMatchObject([{ reason: 'unknown_id' }]);
});

test.each<[string, Wanted, Partial<ProcessExit>]>([
  ['a code', 'exit 3', { exit_code: 3, signal: '' }],
  ['a signal', 'kill -9 $$', { exit_code: 137, signal: 'SIGKILL' }],
  ['a command that begins with a dash', '-x', { exit_code: 127 }],
  [
    'arguments that no shell sees',
    { command: 'test', direct: true, args: ['$HOME; *', '=', '$HOME; *'] },
    { exit_code: 0 },
  ],
])('the exit reports how the process ended: %s', async (_what, wanted, exit) => {
  await open();
  expect((await run(wanted)).exit).toMatchObject({ outcome: 'PROCESS_OUTCOME_EXITED', ...exit });
});

test('both streams arrive complete, and the exit has their sizes', async () => {
  await open();
  const { stdout, stderr, exit, gaps } = await run('echo out; echo error >&2');
  expect([stdout.toString(), stderr, gaps]).toEqual(['out\n', 'error\n', []]);
  expect(exit).toMatchObject({ stdout_bytes: 4, stderr_bytes: 6, reason: '' });
  expect(Number(exit.finished_at_ms)).toBeGreaterThanOrEqual(Number(exit.started_at_ms));
});

test('bytes of any value and a line of 10 MB arrive identical', async () => {
  await open();
  const bytes = Buffer.concat([randomBytes(1_000_000), Buffer.alloc(5000), randomBytes(777)]);
  await writeFile(join(home, 'bytes'), bytes);
  expect((await run('cat bytes')).stdout.equals(bytes)).toBe(true);
  const { stdout, gaps } = await run(`head -c 10000000 /dev/zero | tr '\\0' x`);
  expect(gaps).toEqual([]);
  expect(stdout.equals(Buffer.alloc(10_000_000, 'x'))).toBe(true);
});

test('input reaches the command, ends, and can be opened as /dev/stdin; without input it is empty', async () => {
  await open();
  const stdin = randomBytes(300_000);
  const { stdout } = await run({ command: 'cat; cat /dev/stdin', stdin });
  expect(stdout.equals(Buffer.concat([stdin, stdin]))).toBe(true);
  expect((await run({ command: 'true', stdin })).exit.exit_code).toBe(0);
  expect((await run('cat')).stdout).toEqual(Buffer.alloc(0));
});

test('input arrives in order, and each byte once, however often it is sent', async () => {
  await open();
  const id = newId('command');
  const stdin = randomBytes(200_000);
  const events = start({ command: 'cat /dev/stdin', stdin, input: true }, id);
  const first = await hear(events, ({ stdout }) => stdout.length === stdin.length);
  const more = randomBytes(100_000);
  const taken = [];
  for (let at = 0; at < more.length; at += 10_000) {
    // The pieces overlap: a sender that retries does not know which bytes have arrived.
    const from = Math.max(0, at - 25_000);
    taken.push((await give(id, more.subarray(from, at + 10_000), { offset: from })).taken);
  }
  expect(taken).toEqual(Array.from({ length: 10 }, (_, i) => 10_000 * (i + 1)));
  expect(await give(id, more, { offset: 0 })).toEqual({ taken: 100_000 });
  expect(await give(id, '', { end: true })).toEqual({ taken: 100_000 });
  const rest = await hear(events, undefined, [stdin.length, 0]);
  expect(Buffer.concat([first.stdout, rest.stdout]).equals(Buffer.concat([stdin, more]))).toBe(true);
});

test('input and signals that come before the process wait for it', async () => {
  await open();
  const [fed, hit] = [newId('command'), newId('command')];
  const events = start({ command: 'cat', input: true }, fed);
  const [, taken] = await Promise.all([events.next(), give(fed, 'early', { end: true })]);
  expect(taken).toEqual({ taken: 5 });
  expect((await hear(events)).stdout.toString()).toBe('early');
  const struck = start('sleep 60', hit);
  await Promise.all([struck.next(), send(hit, 'SIGUSR1')]);
  expect((await hear(struck)).exits).toMatchObject([
    { outcome: 'PROCESS_OUTCOME_EXITED', exit_code: 138, signal: 'SIGUSR1' },
  ]);
});

test('a signal goes to the whole group, as a terminal would send it', async () => {
  await open();
  const id = newId('command');
  const trap = (name: string): string => `trap 'echo ${name}; exit 3' HUP; echo ready`;
  const command = `sh -c "${trap('child')}; while :; do sleep 0.02; done" & ${trap('main')}; wait`;
  const events = start(command, id);
  const both = ({ stdout }: Received): boolean => stdout.toString().split('ready').length === 3;
  const { stdout } = await hear(events, both);
  expect(await send(id, 'SIGHUP')).toEqual({});
  const received = await hear(events, undefined, [stdout.length, 0]);
  expect(received.stdout.toString().split('\n').sort().join(' ').trim()).toBe('child main');
  expect(received.exits).toMatchObject([{ outcome: 'PROCESS_OUTCOME_EXITED', exit_code: 3, signal: '' }]);
});

test('a command can open its own output as /dev/stdout', async () => {
  await open();
  const { stdout, stderr } = await run('echo out >/dev/stdout; echo error >/dev/stderr');
  expect([stdout.toString(), stderr]).toEqual(['out\n', 'error\n']);
});

test('the environment of a command has only the expected variables', async () => {
  vi.stubEnv('NODE_OPTIONS', '--no-warnings');
  vi.stubEnv('NODE_V8_COVERAGE', home);
  vi.stubEnv('FARHAND_TOKEN', 'secret');
  try {
    await open();
    const id = newId('command');
    const env = { MINE: 'a b', LANG: 'C', FARHAND_COMMAND_ID: 'forged' };
    const { stdout } = await run({ command: 'env', direct: true, env }, id);
    const lines = stdout.toString().trim().split('\n');
    const names = ['FARHAND_COMMAND_ID', 'HOME', 'LANG', 'LOGNAME', 'MINE', 'PATH', 'SHELL', 'USER'];
    expect(new Set(lines.map((line) => line.split('=')[0]))).toEqual(new Set(names));
    expect(lines).toEqual(expect.arrayContaining(['MINE=a b', 'LANG=C', `FARHAND_COMMAND_ID=${id}`]));
  } finally {
    vi.unstubAllEnvs();
  }
});

test('a command leads a session and has no signal blocked or ignored', async () => {
  await open();
  const { stdout } = await run({
    command: 'cat',
    direct: true,
    args: ['/proc/self/stat', '/proc/self/status'],
  });
  const [stat = '', ...status] = stdout.toString().split('\n');
  const [pid, , , , group, session] = stat.split(' ');
  expect([group, session]).toEqual([pid, pid]);
  const masks = status.filter((line) => /^Sig(Blk|Ign):/.test(line)).map((line) => line.split('\t')[1]);
  expect(masks).toEqual(['0000000000000000', '0000000000000000']);
});

test('a program is found by the PATH that it gets, even if it is a script that names no interpreter', async () => {
  await open();
  await mkdir(join(home, 'bin/probe'), { recursive: true });
  await writeFile(join(home, 'probe'), 'echo "$0 $1"', { mode: 0o755 });
  const env = { PATH: '/nonexistent:/etc/passwd:bin::/usr/bin:/bin' };
  const { stdout, exit } = await run({ command: 'probe', args: ['a b'], direct: true, cwd: home, env });
  expect([stdout.toString(), exit.exit_code]).toEqual(['probe a b\n', 0]);
});

test('a command has only its three standard files open', async () => {
  await open();
  const { stdout } = await run({ command: 'ls', direct: true, args: ['-l', '/proc/self/fd'] });
  const links = stdout.toString().trim().split('\n').slice(1);
  // The last entry is the directory that ls itself reads.
  expect(links.map((line) => line.split(' ').slice(-3).join(' '))).toEqual([
    '0 -> /dev/null',
    expect.stringMatching(/^1 -> .*pipes/),
    expect.stringMatching(/^2 -> .*pipes/),
    expect.stringMatching(/^3 -> \/proc\/\d+\/fd$/),
  ]);
});

test('file descriptors that the agent inherited are not passed to commands', async () => {
  const script = await writeAgentProgram(
    home,
    `
    for await (const { event } of processes.startProcess({ id: 'cmd_x', spec: { ...spec, command: 'ls /proc/self/fd' } }, call)) {
      if (event.output) process.stdout.write(event.output.data);
    }
    await processes.stop();`,
  );
  const null30 = `exec "$0" "$@" 9</dev/null 30</dev/null`;
  const child = spawn('bash', ['-c', null30, process.execPath, script], {
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  const chunks: Buffer[] = [];
  child.stdout.on('data', (chunk: Buffer) => chunks.push(chunk));
  await once(child, 'close');
  expect(Buffer.concat(chunks).toString().trim().split('\n')).toEqual(['0', '1', '2', '3']);
});

test.runIf(asRoot)('a command runs as another user, with that user’s groups, home and streams', async () => {
  await open();
  const stdin = Buffer.from('secret');
  const command = 'id -u; id -G; echo $HOME $USER; cat /dev/stdin; echo error >/dev/stderr';
  const { stdout, stderr } = await run({ command, user: 'daemon', cwd: '', stdin });
  const gid = (await readFile('/etc/passwd', 'utf8')).match(/^daemon:[^:]*:(\d+):(\d+):[^:]*:([^:]*)/m);
  const [, uid, group, userHome] = gid ?? [];
  const groups = (await readFile('/etc/group', 'utf8')).split('\n').map((line) => line.split(':'));
  const more = groups
    .filter(([, , , members = '']) => members.split(',').includes('daemon'))
    .map(([, , id]) => id);
  const [seenUid, seenGroups, names] = stdout.toString().split('\n');
  expect(seenUid).toBe(uid);
  expect(new Set(seenGroups?.split(' '))).toEqual(new Set([group, ...more]));
  expect(names).toBe(`${userHome} daemon`);
  expect(stdout.toString().endsWith('secret')).toBe(true);
  expect(stderr).toBe('error\n');
});

test('without a directory a command runs in the home of its user, and relative directories start there', async () => {
  await open();
  const homeOf = (await run({ command: 'echo $HOME', cwd: '/' })).stdout.toString().trim();
  expect((await run({ command: 'pwd -P', cwd: '' })).stdout.toString().trim()).toBe(homeOf);
  expect((await run({ command: 'pwd -P', cwd: '~/.' })).stdout.toString().trim()).toBe(homeOf);
  expect((await run({ command: 'pwd -P', cwd: '..' })).stdout.toString().trim()).toBe(join(homeOf, '..'));
});

test('a follower that leaves and returns continues at the exact byte, without effect on the process', async () => {
  await open();
  const id = newId('command');
  const expected = Array.from({ length: 100_000 }, (_, i) => `line ${i + 1}\n`).join('');
  const first = start(`seq -f 'line %.0f' 100000; seq 5 >&2`, id);
  const early = await hear(first, ({ stdout }) => stdout.length > 1000);
  await first.return?.();
  const cut = early.stdout.length - 7;
  const late = await hear(follow(id, cut, 4), undefined, [cut, 4]);
  expect(late.gaps).toEqual([]);
  expect(Buffer.concat([early.stdout.subarray(0, cut), late.stdout]).equals(Buffer.from(expected))).toBe(
    true,
  );
  expect(late.stderr).toBe('3\n4\n5\n');
  expect(late.exits).toMatchObject([{ outcome: 'PROCESS_OUTCOME_EXITED', stdout_bytes: expected.length }]);
});

test('a follower that leaves and returns at any offset gets all of 100,000 lines', async () => {
  await open();
  const id = newId('command');
  const expected = Buffer.from(Array.from({ length: 100_000 }, (_, i) => `line ${i + 1}\n`).join(''));
  const first = start(`seq -f 'line %.0f' 100000`, id);
  await first.next();
  await first.return?.();
  let known = Buffer.alloc(0);
  for (let i = 0; ; i++) {
    // Requests again some bytes that were already received.
    const from = known.length - (known.length > 0 ? randomBytes(2).readUInt16BE() % known.length : 0);
    const wanted = from + 1 + randomBytes(2).readUInt16BE();
    const events = follow(id, from);
    const received = await hear(events, ({ stdout }) => from + stdout.length >= wanted && i < 50, [from, 0]);
    await events.return?.();
    expect(received.gaps).toEqual([]);
    known = Buffer.concat([known.subarray(0, from), received.stdout]);
    if (received.exits.length > 0) break;
  }
  expect(known.equals(expected)).toBe(true);
});

test('a follower can leave while it waits, by signal', async () => {
  await open();
  const id = newId('command');
  const gone = new AbortController();
  const first = start('echo ready; sleep 60', id, gone.signal);
  await hear(first, sees('ready'));
  const waiting = first.next();
  gone.abort();
  expect(await waiting).toMatchObject({ done: true });
  await processes.killProcess({ id, grace_ms: 0 }, call());
  expect((await hear(follow(id))).exits).toMatchObject([{ outcome: 'PROCESS_OUTCOME_CANCELLED' }]);
});

test('several followers get all output, and one that does not read delays no other', async () => {
  await open();
  const id = newId('command');
  const lazy = start('seq 300000', id);
  await lazy.next();
  const received = await Promise.all([hear(follow(id)), hear(follow(id)), hear(follow(id))]);
  const hashes = received.map(({ stdout }) => createHash('sha256').update(stdout).digest('hex'));
  expect(new Set(hashes).size).toBe(1);
  expect((await hear(lazy)).stdout.equals(received[0].stdout)).toBe(true);
});

test('the output of a runaway process is limited on disk, and a late follower gets a gap for deleted bytes', async () => {
  const windowBytes = 1024 * 1024;
  await open({ windowBytes });
  const id = newId('command');
  const first = start('yes', id);
  let seen = 0;
  while (seen < 20 * windowBytes) {
    const { value } = await first.next();
    seen = Number(value.event?.output?.offset ?? 0);
  }
  const sizes = await onDisk(id);
  expect(sizes.reduce((sum, size) => sum + size, 0)).toBeLessThan(1.25 * windowBytes);
  const late = follow(id);
  const { gaps, stdout } = await hear(late, ({ stdout: bytes }) => bytes.length > 0);
  expect(gaps[0]?.from).toBe(0);
  expect(gaps[0]?.to).toBeGreaterThan(10 * windowBytes);
  expect(stdout.toString()).toMatch(/^(y\n|\ny)/);
  await processes.killProcess({ id, grace_ms: 0 }, call());
  let exit: ProcessExit | null | undefined;
  while (!exit) exit = (await late.next()).value.event?.exit;
  expect(exit).toMatchObject({ outcome: 'PROCESS_OUTCOME_CANCELLED' });
});

test('a process without followers never stalls, and its output is limited too', async () => {
  const windowBytes = 256 * 1024;
  await open({ windowBytes, stallMs: 600_000 });
  const id = newId('command');
  const first = start('yes | head -c 20000000; exec yes', id);
  await first.next();
  await first.return?.();
  const last = async (): Promise<number> =>
    Number((await readdir(join(home, 'agent/output', `${id}.stdout`))).sort().at(-1));
  await waitFor(async () => expect(await last()).toBeGreaterThan(40 * windowBytes));
  const sizes = await onDisk(id);
  expect(sizes.reduce((sum, size) => sum + size, 0)).toBeLessThan(1.5 * windowBytes);
  await processes.killProcess({ id, grace_ms: 0 }, call());
  const { exits } = await hear(follow(id, 0), ({ gaps }) => gaps.length > 0);
  expect(exits).toEqual([]);
});

test('a slow follower gets every byte of a fast process, through a window much smaller than the output', async () => {
  await open({ windowBytes: 512 * 1024, stallMs: 600_000 });
  const bytes = randomBytes(10_000_000);
  await writeFile(join(home, 'bytes'), bytes);
  const events = start('cat bytes');
  const slow: AsyncIterator<Answer> = {
    async next() {
      // This read takes a few milliseconds. In this time, a command that does not wait for its follower would write
      // beyond the window.
      await readFile(join(home, 'bytes'));
      return events.next();
    },
  };
  const { stdout, gaps } = await hear(slow);
  expect(gaps).toEqual([]);
  expect(stdout.equals(bytes)).toBe(true);
});

test('a follower that stopped reading stalls a process only for the stall timeout', async () => {
  await open({ windowBytes: 256 * 1024, stallMs: 100 });
  const id = newId('command');
  const first = start('head -c 5000000 /dev/zero; echo over >&2', id);
  await first.next();
  const dead = processes
    .followProcess({ id, stdout_offset: 0, stderr_offset: 0 }, call())
    [Symbol.asyncIterator]();
  await dead.next();
  await first.return?.();
  // The file of standard error appears once the command has written all of its standard output. By then the agent has
  // deleted bytes that the follower has not read.
  await waitFor(() => expect(access(join(home, 'agent/output', `${id}.stderr`))).resolves.toBeUndefined());
  const { gaps, exits } = await hear(dead);
  expect(gaps).toHaveLength(1);
  expect(exits).toMatchObject([{ exit_code: 0, stdout_bytes: 5_000_000 }]);
});

async function onDisk(id: string): Promise<number[]> {
  const directory = join(home, 'agent/output', `${id}.stdout`);
  const sizes = (await readdir(directory)).map((name) =>
    stat(join(directory, name)).then(
      ({ size }) => size,
      () => 0,
    ),
  );
  return Promise.all(sizes);
}

/** A process tree that tries to survive in every way. Each process writes its pid to a file. */
const survivors = ['main', 'child', 'daemon', 'cleared', 'piped', 'ownGroup'];
const stubborn = (name: string): string => `trap "" TERM; echo $$ > ${name}; while :; do sleep 1; done`;
const quiet = '>/dev/null 2>&1';
const tree = `
  setsid sh -c '${stubborn('child')}' &
  (setsid sh -c '(sh -c '\\''${stubborn('daemon')}'\\'' ${quiet} &)' &)
  env -i PATH=$PATH setsid sh -c '${stubborn('cleared')}' ${quiet} &
  (env -i PATH=$PATH setsid sh -c '${stubborn('piped')}' &)
  (env -i PATH=$PATH bash -mc '(${stubborn('ownGroup').replace('$$', '$BASHPID')}) ${quiet} & disown; exit' 2>/dev/null &)
  for one in child daemon cleared piped ownGroup; do until [ -s $one ]; do sleep 0.02; done; done
  trap '' TERM
  echo $$ > main
  echo ready
  while :; do sleep 1; done`;

async function expectTreeDead(): Promise<void> {
  for (const name of survivors) {
    const pid = await pidIn(name);
    expect(pid).toBeGreaterThan(1);
    expect({ name, alive: await alive(pid) }).toEqual({ name, alive: false });
  }
}

test('at its timeout the whole tree is killed, including processes that ignore TERM or left group, session or environment', async () => {
  await open({ graceMs: 100 });
  const id = newId('command');
  const events = start({ command: tree, timeout_ms: 2000 }, id);
  await hear(events, sees('ready'));
  const received = await hear(events, undefined, [6, 0]);
  expect(received.exits).toMatchObject([
    { outcome: 'PROCESS_OUTCOME_TIMEOUT', exit_code: 137, signal: 'SIGKILL' },
  ]);
  await expectTreeDead();
  await processes.killProcess({ id, grace_ms: 0 }, call());
  expect((await hear(follow(id))).exits).toEqual(received.exits);
});

test('a kill ends the whole tree, and a second one can shorten the grace', async () => {
  await open();
  const id = newId('command');
  const events = start(tree, id);
  await hear(events, sees('ready'));
  await processes.killProcess({ id, grace_ms: 600_000 }, call());
  await processes.killProcess({ id, grace_ms: 0 }, call());
  const received = await hear(events, undefined, [6, 0]);
  expect(received.exits).toMatchObject([{ outcome: 'PROCESS_OUTCOME_CANCELLED' }]);
  await expectTreeDead();
});

test('a process that ends on TERM gets no KILL, and the kill returns its exit code', async () => {
  await open();
  const id = newId('command');
  const events = start(
    `trap 'sleep 0.3; echo bye; exit 5' TERM; echo ready; while :; do sleep 0.05; done`,
    id,
  );
  await hear(events, sees('ready'));
  await processes.killProcess({ id, grace_ms: 60_000 }, call());
  const { stdout, exits } = await hear(events, undefined, [6, 0]);
  expect(stdout.toString()).toBe('bye\n');
  expect(exits).toMatchObject([{ outcome: 'PROCESS_OUTCOME_CANCELLED', exit_code: 5, signal: '' }]);
});

test('a cancel during the start or the exit results in exactly one end, and no process survives', async () => {
  await open();
  const outcomes: Record<string, number> = {};
  for (let i = 0; i < 150; i++) {
    const id = newId('command');
    const events = start(i % 2 === 0 ? 'exit 7' : 'echo x; exit 7', id);
    const ended = hear(events);
    // Cancels at a different moment in each round, from before the journal entry until after the exit.
    for (let turns = i % 30; turns > 0; turns--) await stat(home);
    if (i % 30 === 29) await ended;
    await processes.killProcess({ id, grace_ms: i % 3 === 0 ? 0 : 1000 }, call());
    const { exits } = await ended;
    expect(exits).toHaveLength(1);
    const { outcome = '', exit_code } = exits[0]!;
    if (outcome === 'PROCESS_OUTCOME_EXITED') expect(exit_code).toBe(7);
    else expect(outcome).toBe('PROCESS_OUTCOME_CANCELLED');
    outcomes[outcome] = (outcomes[outcome] ?? 0) + 1;
    expect((await hear(follow(id))).exits).toEqual(exits);
    await processes.forgetProcesses({ ids: [id] }, call());
  }
  expect(Object.keys(outcomes).sort()).toEqual(['PROCESS_OUTCOME_CANCELLED', 'PROCESS_OUTCOME_EXITED']);
});

test('a kill that arrives before the start prevents the start', async () => {
  await open();
  const id = newId('command');
  const received = hear(start('touch ran', id));
  await processes.killProcess({ id, grace_ms: 0 }, call());
  const { exits, pid } = await received;
  expect(exits).toMatchObject([{ outcome: 'PROCESS_OUTCOME_CANCELLED', reason: '' }]);
  expect(pid).toBeUndefined();
  expect(await exists(join(home, 'ran'))).toBe(false);
});

test('a stopped process (SIGSTOP) ends at SIGTERM, too', async () => {
  // On a busy machine the spawner may need more than 5 s to report the signal.
  await open({ lateMs: 60_000 });
  const id = newId('command');
  const events = start('echo ready; kill -STOP $$', id);
  await hear(events, sees('ready'));
  await processes.killProcess({ id, grace_ms: 60_000 }, call());
  const { exits } = await hear(events, undefined, [6, 0]);
  expect(exits).toMatchObject([{ outcome: 'PROCESS_OUTCOME_CANCELLED', signal: 'SIGTERM' }]);
});

test('background processes of a command delay its end only briefly and are not killed', async () => {
  await open({ drainMs: 200 });
  const begun = performance.now();
  const { stdout, exit } = await run('sleep 60 & echo $!');
  expect(performance.now() - begun).toBeLessThan(2000);
  expect(exit).toMatchObject({ outcome: 'PROCESS_OUTCOME_EXITED', exit_code: 0 });
  const pid = Number(stdout.toString());
  expect(await alive(pid)).toBe(true);
  process.kill(pid, 'SIGKILL');
});

test('a command whose background process has its own output ends at once', async () => {
  await open({ drainMs: 600_000 });
  const { stdout } = await run('sleep 60 >/dev/null 2>&1 & echo $!');
  process.kill(Number(stdout.toString()), 'SIGKILL');
});

test('pipes are reused only when no process can have them open', async () => {
  await open({ drainMs: 100 });
  await run('(trap "" PIPE; while :; do echo late; sleep 0.005; done) 2>&1 & echo $! > pid');
  for (let i = 0; i < 40; i++) expect((await run('echo own; sleep 0.01')).stdout.toString()).toBe('own\n');
  process.kill(await pidIn('pid'), 'SIGKILL');
});

test('a pipe that a process has left open for reading, or opens later for writing, is not used again', async () => {
  await open({ drainMs: 100 });
  // The background processes of the first two commands run until this file is removed.
  await writeFile(join(home, 'go'), '');
  const read = 'while [ -e go ]; do read -r line && echo $line; done';
  await run(`(${read}) </dev/stdout >stolen 2>&1 & sleep 0.1`);
  const write = 'while [ -e go ]; do echo late >&4; sleep 0.005; done';
  const late = `sleep 0.2; exec 4>/proc/self/fd/3 3<&-; touch opened; ${write}`;
  await run(`(trap "" PIPE; ${late}) 3</dev/stderr </dev/null >/dev/null 2>&1 & sleep 0.1`);
  await waitFor(async () => expect(await exists(join(home, 'opened'))).toBe(true));
  for (let i = 0; i < 40; i++) {
    const { stdout, stderr } = await run('echo own; sleep 0.01');
    expect([stdout.toString(), stderr]).toEqual(['own\n', '']);
  }
});

test('forgetting a process removes its files, and those of a running process once it has ended', async () => {
  await open();
  const [done, running] = [newId('command'), newId('command')];
  await run('echo out; echo error >&2', done);
  await hear(start('echo out; sleep 60', running), sees('out'));
  expect((await outputs()).sort()).toEqual([`${done}.stderr`, `${done}.stdout`, `${running}.stdout`].sort());
  expect(processes.ids()).toEqual([done, running]);
  await processes.forgetProcesses({ ids: [done] }, call());
  await processes.forgetProcesses({ ids: [running] }, call());
  expect(processes.ids()).toEqual([]);
  expect(await outputs()).toEqual([`${running}.stdout`]);
  const last = follow(running, 4);
  await processes.killProcess({ id: running, grace_ms: 0 }, call());
  expect((await hear(last, undefined, [4, 0])).exits).toMatchObject([
    { outcome: 'PROCESS_OUTCOME_CANCELLED' },
  ]);
  await processes.stop();
  expect(await outputs()).toEqual([]);
});

test('a command without output leaves no file', async () => {
  await open();
  await run('true');
  expect(await outputs()).toEqual([]);
});

test('stopping kills processes, ends their followers and refuses new ones; a restart still knows the results', async () => {
  await open({ stopGraceMs: 100 });
  const id = newId('command');
  const events = start(tree, id);
  await hear(events, sees('ready'));
  const stopped = processes.stop();
  await expect(start('true').next()).rejects.toMatchObject({ code: 'unavailable' });
  const lost = { outcome: 'PROCESS_OUTCOME_LOST', reason: 'agent_restarted', stdout_bytes: 6 };
  expect((await hear(events, undefined, [6, 0])).exits).toMatchObject([lost]);
  await stopped;
  await expectTreeDead();
  const { journalId } = processes;
  await open();
  expect(processes.journalId).toBe(journalId);
  const again = await hear(follow(id));
  expect(again.stdout.toString()).toBe('ready\n');
  expect(again.exits).toMatchObject([lost]);
});

/** Starts a command in a separate process that acts as the agent, and kills that process with SIGKILL. */
async function crash(id: string, command: string): Promise<void> {
  const script = await writeAgentProgram(
    home,
    `
    const spec2 = { ...spec, command: ${JSON.stringify(command)} };
    for await (const { event } of processes.startProcess({ id: '${id}', spec: spec2 }, call)) {
      if (String(event.output?.data).includes('ready')) console.log('ready');
    }`,
  );
  const agent: ChildProcess = spawn(process.execPath, [script], { stdio: ['ignore', 'pipe', 'inherit'] });
  if (agent.stdout) await once(agent.stdout, 'data');
  // The journal records a process shortly after its first output.
  const isRecorded = async () =>
    (await readFile(join(home, 'agent/journal'), 'utf8')).includes(`"started","id":"${id}"`);
  await expect.poll(isRecorded).toBe(true);
  agent.kill('SIGKILL');
  await once(agent, 'exit');
}

test('after a crash of the agent the outcome is lost, the process tree is killed, and the output is available', async () => {
  const id = newId('command');
  await crash(id, tree);
  expect(await alive(await pidIn('main'))).toBe(true);
  await open();
  await expectTreeDead();
  expect(processes.ids()).toEqual([id]);
  const { stdout, pid, exits } = await hear(follow(id));
  expect(stdout.toString()).toBe('ready\n');
  expect(pid).toBe(await pidIn('main'));
  expect(exits).toMatchObject([
    { outcome: 'PROCESS_OUTCOME_LOST', reason: 'agent_restarted', stdout_bytes: 6 },
  ]);
  expect((await hear(start('touch again', id))).exits).toEqual(exits);
  expect(await exists(join(home, 'again'))).toBe(false);
});

test('after a crash of the agent, processes that removed the command’s variable are killed by their session', async () => {
  const id = newId('command');
  const script = `echo $$ > ${join(home, 'main')}; echo ready; exec >/dev/null 2>&1; sleep 600 & wait`;
  await crash(id, `exec env -i sh -c '${script}'`);
  expect(await alive(await pidIn('main'))).toBe(true);
  await open();
  expect(await alive(await pidIn('main'))).toBe(false);
});

test('a line torn by a crash is ignored; a journal that cannot be read is replaced by one with a new id', async () => {
  const id = newId('command');
  await open();
  const { journalId } = processes;
  const { exit } = await run('echo out', id);
  await processes.stop();
  await appendFile(join(home, 'agent/journal'), '{"t":"accepted","id":"cmd_to');
  await open();
  expect(processes.journalId).toBe(journalId);
  expect(processes.ids()).toEqual([id]);
  expect((await hear(follow(id))).exits).toEqual([exit]);
  await processes.stop();
  await writeFile(join(home, 'agent/journal'), 'not a journal\n');
  await open();
  expect(processes.journalId).not.toBe(journalId);
  expect(processes.ids()).toEqual([]);
  expect(await outputs()).toEqual([]);
});

test('output that a power cut shortened has a gap before the exit', async () => {
  const id = newId('command');
  await open();
  const { exit } = await run('echo out', id);
  await processes.stop();
  await rm(join(home, 'agent/output'), { recursive: true });
  await open();
  const { gaps, exits } = await hear(follow(id));
  expect(gaps).toEqual([{ from: 0, to: 4 }]);
  expect(exits).toEqual([exit]);
});

test.runIf(asRoot)(
  'an agent with pid 1, as in a container, leaves no zombie of a command',
  async () => {
    const body = `
    const command = 'sleep 0.1 >/dev/null 2>&1 & echo /proc/$!';
    const { existsSync } = await import('node:fs');
    let orphan = '';
    for await (const { event } of processes.startProcess({ id: 'cmd_1', spec: { ...spec, command } }, call))
      orphan += event.output ? String(event.output.data).trim() : '';
    while (existsSync(orphan)) await new Promise(setImmediate);
    await processes.stop();
    console.log(process.pid, orphan);`;
    const script = await writeAgentProgram(home, body, { orphansMs: 50 });
    const inside = ['--pid', '--fork', '--kill-child', '--mount-proc', process.execPath, script];
    const container = spawn('unshare', inside, { stdio: ['ignore', 'pipe', 'inherit'] });
    onTestFinished(() => void container.kill('SIGKILL'));
    expect(String(await once(container.stdout, 'data'))).toMatch(/^1 \/proc\/\d+\n$/);
  },
  15_000,
);

test('only the agent’s user can read the files', async () => {
  await open();
  await run('echo out');
  expect((await stat(join(home, 'agent'))).mode & 0o777).toBe(0o700);
  expect((await stat(join(home, 'agent/journal'))).mode & 0o777).toBe(0o600);
});

/** Returns the directory of a process's cgroup v2. */
async function cgroupOf(pid: number | 'self'): Promise<string> {
  const mounts = (await readFile('/proc/self/mountinfo', 'utf8')).split('\n');
  const mount = mounts.find((line) => line.includes(' - cgroup2 '));
  const own = /^0::(.*)$/m.exec(await readFile(`/proc/${pid}/cgroup`, 'utf8'))?.[1] ?? '';
  return join(mount?.split(' ')[4] ?? '/nonexistent', own);
}

/**
 * Makes a cgroup inside the cgroup of this test. The test gives the cgroup to an agent of an unprivileged user, as a
 * unit with Delegate=yes does. Returns undefined if there is no writable cgroup v2.
 */
async function delegated(): Promise<string | undefined> {
  const directory = join(await cgroupOf('self'), newId('call'));
  const made = await mkdir(directory).then(
    () => exists(join(directory, 'cgroup.kill')),
    () => false,
  );
  return made ? directory : undefined;
}

test.runIf(asRoot)(
  'processes that an agent has no right to signal are killed through their cgroup',
  async (context) => {
    const directory = await delegated();
    if (!directory) return context.skip('needs a writable cgroup v2');
    try {
      await chmod(home, 0o777);
      const setpriv = join(home, 'setpriv');
      await copyFile('/usr/bin/setpriv', setpriv);
      await chmod(setpriv, 0o4755);
      // Like sudo, sets the real, effective and saved user of the process to root. The agent's unprivileged user cannot
      // signal such a process.
      const command = `exec ${setpriv} --reuid=0 --regid=0 --clear-groups sh -c 'echo $$ > rooted; sleep 60'`;
      const script = await writeAgentProgram(
        home,
        `
      for await (const { event } of processes.startProcess({ id: 'cmd_x', spec: { ...spec, command: ${JSON.stringify(command)}, timeout_ms: 1000 } }, call)) {
        if (event.exit) console.log(event.exit.outcome);
      }
      await processes.stop();`,
      );
      await chmod(script, 0o644);
      const chown = `chown -R 65534 ${directory} && echo $$ > ${directory}/cgroup.procs`;
      const agent = `exec setpriv --reuid=65534 --regid=65534 --clear-groups "$0" "$@"`;
      const child = spawn('/bin/sh', ['-c', `${chown} && ${agent}`, process.execPath, script], {
        stdio: ['ignore', 'pipe', 'inherit'],
      });
      const chunks: Buffer[] = [];
      child.stdout.on('data', (chunk: Buffer) => chunks.push(chunk));
      await once(child, 'close');
      expect(Buffer.concat(chunks).toString()).toBe('PROCESS_OUTCOME_TIMEOUT\n');
      expect(await alive(await pidIn('rooted'))).toBe(false);
    } finally {
      await rmdir(directory);
    }
  },
);

/** Declares a test of an agent that puts each command into a cgroup. It is skipped where the agent may not do that. */
function testInCgroups(name: string, work: () => Promise<void>): void {
  test.runIf(asRoot)(name, async (context) => {
    await open();
    if (!(await mayGroup())) return context.skip('needs a cgroup v2 that the agent may use');
    await work();
  });
}

/** Returns shell text for a daemon that removes every trace of the command that started it. */
function hidden(name: string): string {
  const file = join(home, name);
  return `(env -i setsid sh -c 'echo $$ > ${file}; exec sleep 600' </dev/null >/dev/null 2>&1 &); while [ ! -s ${file} ]; do sleep 0.01; done; echo ready`;
}

testInCgroups('a process that has removed every trace of its command is killed with it', async () => {
  const id = newId('command');
  await hear(start(`${hidden('daemon')}; sleep 600`, id), sees('ready'));
  await processes.killProcess({ id, grace_ms: 100 }, call());
  expect((await hear(follow(id))).exits).toMatchObject([{ outcome: 'PROCESS_OUTCOME_CANCELLED' }]);
  expect(await alive(await pidIn('daemon'))).toBe(false);
});

testInCgroups(
  'a chain of processes that each start the next one and exit is killed with its command',
  async () => {
    const id = newId('command');
    await writeFile(join(home, 'wait'), '');
    // A list of all processes can miss a chain: each process lives shorter than it takes to read the list. The chain also
    // ends if the test fails, because its folder is removed.
    const chain = `trap "" TERM; next() { [ -e ${home}/wait ] && next & }; next`;
    const command = `(${chain}) >/dev/null 2>&1; echo $$ > pid; echo ready; exec sleep 600`;
    await hear(start(command, id), sees('ready'));
    const threads = join(await cgroupOf(await pidIn('pid')), 'cgroup.threads');
    await processes.killProcess({ id, grace_ms: 100 }, call());
    expect((await hear(follow(id))).exits).toMatchObject([{ outcome: 'PROCESS_OUTCOME_CANCELLED' }]);
    expect(await readFile(threads, 'utf8')).toBe('');
  },
);

testInCgroups('processes that a daemon of an earlier command may have started are not killed', async () => {
  const go = join(home, 'go');
  const file = join(home, 'worker');
  // A daemon that starts a worker once the file `go` exists. A later command creates that file.
  const master = `while [ ! -e ${go} ]; do sleep 0.02; done; setsid sh -c "echo \\$\\$ > ${file}; exec sleep 600" & wait`;
  await run(`(env -i setsid sh -c '${master}' </dev/null >/dev/null 2>&1 &)`);
  // The kernel counts start times in hundredths of a second. The pause lets the daemon and the next command start at
  // different times.
  await run('sleep 0.1');
  const id = newId('command');
  const command = `touch ${go}; while [ ! -s ${file} ]; do sleep 0.01; done; echo ready; sleep 600`;
  await hear(start(command, id), sees('ready'));
  await processes.killProcess({ id, grace_ms: 100 }, call());
  expect((await hear(follow(id))).exits).toMatchObject([{ outcome: 'PROCESS_OUTCOME_CANCELLED' }]);
  const pid = await pidIn('worker');
  expect(await alive(pid)).toBe(true);
  process.kill(pid, 'SIGKILL');
});

testInCgroups(
  'a process that has removed every trace is killed with its own command and no other',
  async () => {
    const [other, id] = [newId('command'), newId('command')];
    await hear(start(`${hidden('daemon')}; sleep 600`, id), sees('ready'));
    await hear(start('echo ready; sleep 600', other), sees('ready'));
    await processes.killProcess({ id: other, grace_ms: 100 }, call());
    expect((await hear(follow(other))).exits).toMatchObject([{ outcome: 'PROCESS_OUTCOME_CANCELLED' }]);
    expect(await alive(await pidIn('daemon'))).toBe(true);
    await processes.killProcess({ id, grace_ms: 100 }, call());
    expect((await hear(follow(id))).exits).toMatchObject([{ outcome: 'PROCESS_OUTCOME_CANCELLED' }]);
    expect(await alive(await pidIn('daemon'))).toBe(false);
  },
);

testInCgroups(
  'the kill of a command that its spawner has just started ends neither the spawner nor another command',
  async () => {
    const [other, id] = [newId('command'), newId('command')];
    await hear(start('echo ready; exec sleep 600', other), sees('ready'));
    await hear(start('echo $$ > pid; echo ready; exec sleep 600', id), sees('ready'));
    // While a spawner starts a command, one of its threads is in the cgroup of the command.
    const [spawner = 0] = processes.pids();
    await writeFile(join(await cgroupOf(await pidIn('pid')), 'cgroup.threads'), String(spawner));
    await processes.killProcess({ id, grace_ms: 100 }, call());
    expect((await hear(follow(id))).exits).toMatchObject([{ outcome: 'PROCESS_OUTCOME_CANCELLED' }]);
    expect(await alive(spawner)).toBe(true);
    await processes.killProcess({ id: other, grace_ms: 100 }, call());
    expect((await hear(follow(other))).exits).toMatchObject([
      { outcome: 'PROCESS_OUTCOME_CANCELLED', signal: 'SIGTERM' },
    ]);
  },
);

test('after a reboot, a session with the number of a command’s first process is left alone', async () => {
  await open();
  await processes.stop();
  // A foreign daemon, whose session has no leader any more.
  const session = `echo $$ > ${home}/session; sleep 600 >/dev/null 2>&1 & echo $! > ${home}/daemon`;
  await once(spawn('/bin/sh', ['-c', session], { stdio: 'ignore', detached: true }), 'exit');
  const [pid, daemon] = [await pidIn('session'), await pidIn('daemon')];
  const lines = [
    { t: 'accepted', id: 'cmd_old', at: Date.now() },
    { t: 'started', id: 'cmd_old', pid, start: '1', at: Date.now(), boot: 'another' },
  ];
  await appendFile(join(home, 'agent/journal'), lines.map((line) => `${JSON.stringify(line)}\n`).join(''));
  await open();
  const isAlive = await alive(daemon);
  process.kill(daemon, 'SIGKILL');
  expect(isAlive).toBe(true);
});

testInCgroups(
  'a process that has removed every trace is also killed after a crash of the agent',
  async () => {
    await processes.stop();
    await crash(newId('command'), `${hidden('daemon')}; sleep 600`);
    expect(await alive(await pidIn('daemon'))).toBe(true);
    await open();
    expect(await alive(await pidIn('daemon'))).toBe(false);
  },
);

testInCgroups('a cgroup whose last process outlives its command is released later', async () => {
  const directory = await cgroupOf(processes.pids()[0]!);
  const cgroups = async (): Promise<number> =>
    (await readdir(directory, { withFileTypes: true })).filter((one) => one.isDirectory()).length;
  // The processes also end if the test fails, because its folder is removed.
  await writeFile(join(home, 'wait'), '');
  for (let n = 0; n < 40; n++)
    await run(`(while [ -e ${home}/wait ]; do sleep 0.05; done) >/dev/null 2>&1 &`);
  expect(await cgroups()).toBeGreaterThanOrEqual(40);
  await rm(join(home, 'wait'));
  await waitFor(async () => {
    await run('true');
    expect(await cgroups()).toBeLessThanOrEqual(32);
  });
});

testInCgroups('a cgroup is used by one command after the other, and all are removed at the end', async () => {
  const directory = await cgroupOf(processes.pids()[0]!);
  const inside = async (): Promise<string[]> =>
    (await readdir(directory, { withFileTypes: true }))
      .filter((one) => one.isDirectory())
      .map(({ name }) => name)
      .sort();
  const id = newId('command');
  await hear(start('echo ready; sleep 600', id), sees('ready'));
  const [first] = await inside();
  await run('true');
  await run('true');
  await run({ command: 'nonexistent', direct: true });
  expect(await inside()).toEqual([first, expect.any(String)]);
  await processes.killProcess({ id, grace_ms: 0 }, call());
  await hear(follow(id));
  await processes.stop();
  expect(await exists(directory)).toBe(false);
});

/** True if the spawner is in a cgroup of its own. */
async function mayGroup(): Promise<boolean> {
  // The first command starts the spawner.
  await run('true');
  return (await readFile(`/proc/${processes.pids()[0]}/cgroup`, 'utf8')).includes('farhand-');
}
