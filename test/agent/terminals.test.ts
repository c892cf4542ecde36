// Terminals on one machine, without a link: real programs on real ptys, with clients that attach, leave or read slowly.
import { spawn } from 'node:child_process';
import { createHash } from 'node:crypto';
import { once } from 'node:events';
import { readdirSync, readlinkSync } from 'node:fs';
import { readdir, readFile, readlink, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { expect, onTestFinished, test, vi } from 'vitest';
import { loadPtyMaker, Pty } from '../../agent/processes/terminals/pty.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import { createLogger } from '../../shared/logger.ts';
import { needs } from '../skip-without-programs.ts';
import { call, sh, startBench, type Viewer } from '../terminals-fixture.ts';
import { waitFor } from '../wait-for.ts';
import { alive, specOf, writeAgentProgram } from './process-calls.ts';

/** Returns the pids of processes with this command line. */
async function running(line: string): Promise<number[]> {
  const pids = (await readdir('/proc')).filter((name) => /^\d+$/.test(name)).map(Number);
  const lines = await Promise.all(
    pids.map((pid) => readFile(`/proc/${pid}/cmdline`, 'latin1').catch(() => '')),
  );
  return pids.filter((_, index) => lines[index] === `${line.replaceAll(' ', '\0')}\0`);
}

/** Returns a duration that no other test passes to `sleep`, so that the process can be found by its command line. */
function unusual(): number {
  return 1_000_000 + Math.floor(Math.random() * 1_000_000);
}

test.each([
  ['a missing program', { program: 'nonexistent' }, /^program nonexistent was not found/],
  ['a file that is no program', { program: '/etc/passwd' }, /is not executable/],
  ['a missing directory', { cwd: '/nonexistent' }, /^working directory \/nonexistent does not exist/],
  ['an impossible variable', { env: { 'A=B': 'c' } }, /environment variable/],
])('%s means not started, and the reason says so', async (_what, spec, reason) => {
  const bench = await startBench();
  const id = newId('session');
  const exit = await bench.open(spec, id).exit();
  expect(exit).toMatchObject({ outcome: 'PROCESS_OUTCOME_NOT_STARTED', started_at_ms: 0 });
  expect(exit.reason).toMatch(reason);
  const viewer = bench.attach(id);
  await viewer.ended;
  expect(viewer.text()).toBe('');
});

test('a size that no terminal has is refused, when opening and later', async () => {
  const bench = await startBench();
  for (const size of [{ cols: 0, rows: 24 }, { cols: 80, rows: 1001 }, null])
    await expect(bench.open({ size }).started()).rejects.toMatchObject({ code: 'invalid_request' });
  const id = newId('session');
  await bench.open({}, id).started();
  const viewer = bench.attach(id);
  await viewer.sees('$ ');
  viewer.do({ size: { cols: 0, rows: 0 } });
  await expect(viewer.ended).rejects.toMatchObject({ code: 'invalid_request' });
});

test('commands and terminals are not found under each other’s ids', async () => {
  const bench = await startBench();
  const { processes } = bench;
  const [terminal, command] = [newId('session'), newId('command')];
  await bench.open({}, terminal).started();
  const spec = specOf({ command: 'sleep 60', input: true });
  const start = (id: string): AsyncIterator<unknown> =>
    processes.startProcess({ id, spec }, call())[Symbol.asyncIterator]();
  await start(command).next();
  const missing = { code: 'command_not_found' };
  const offsets = { stdout_offset: 0, stderr_offset: 0 };
  const followed = processes.followProcess({ id: terminal, ...offsets }, call())[Symbol.asyncIterator]();
  await expect(followed.next()).rejects.toMatchObject(missing);
  await expect(start(terminal).next()).rejects.toMatchObject(missing);
  const data = Buffer.from('x');
  await expect(processes.writeInput({ id: terminal, data, end: false }, call())).rejects.toMatchObject(
    missing,
  );
  await expect(processes.signalProcess({ id: terminal, signal: 'SIGHUP' }, call())).rejects.toMatchObject(
    missing,
  );
  const session = { code: 'session_not_found' };
  await expect(bench.keep(command).started()).rejects.toMatchObject(session);
  await expect(bench.open({}, command).started()).rejects.toMatchObject(session);
  for (const id of [command, 'ses_unknown'])
    await expect(bench.attach(id).ended).rejects.toMatchObject(session);
  expect(await bench.keep('ses_unknown').exit()).toMatchObject({ outcome: 'PROCESS_OUTCOME_EXPIRED' });
});

test('more terminals or clients than allowed are refused', async () => {
  const bench = await startBench({ terminals: 1, clients: 1 });
  const id = newId('session');
  await bench.open({}, id).started();
  const refused = { code: 'unavailable', details: { limit: 1 } };
  await expect(bench.open().started()).rejects.toMatchObject(refused);
  const first = bench.attach(id);
  await first.sees('$ ');
  await expect(bench.attach(id).ended).rejects.toMatchObject(refused);
  first.leave();
  await first.ended;
  await bench.attach(id).sees('$ ');
});

test('a terminal that cannot be opened leaves no file open', async () => {
  const terminals = (): number =>
    readdirSync('/proc/self/fd').filter((fd) => {
      try {
        return /^\/dev\/(ptmx|pts\/)/.test(readlinkSync(`/proc/self/fd/${fd}`));
      } catch {
        return false;
      }
    }).length;
  const maker = loadPtyMaker();
  if (!maker) throw new Error('no terminals here');
  const plan = { file: '', args: [], cwd: '/', env: {}, foreign: false, program: '' };
  const output = { append: async () => {}, release: () => {} };
  const log = createLogger('test', 'silent');
  // Opening the pty fails, as in an agent that has too many files open.
  const broken = { ...maker, open: () => ({ ...maker.open(80, 24), pty: '/dev/pts/none' }) };
  const before = terminals();
  const open = (): Pty => new Pty(broken, { id: 'x', plan, size: { cols: 80, rows: 24 }, output, log });
  expect(open).toThrow('ENOENT');
  expect(terminals()).toBe(before);
});

test('commands run without the native addon, but terminals do not', async () => {
  const arch = vi.spyOn(process, 'arch', 'get').mockReturnValue('mips');
  try {
    const bench = await startBench();
    expect(bench.processes.missing).toEqual(['OpenTerminal', 'KeepTerminal', 'AttachTerminal']);
    await expect(bench.open().started()).rejects.toMatchObject({ code: 'not_supported' });
    const spec = specOf({ command: 'true' });
    const events = [];
    for await (const { event } of bench.processes.startProcess({ id: 'cmd_1', spec }, call()))
      events.push(event);
    expect(events.at(-1)?.exit).toMatchObject({ outcome: 'PROCESS_OUTCOME_EXITED' });
  } finally {
    arch.mockRestore();
  }
});

test('a client receives the echo of what it types, and the exit of the shell', async () => {
  const bench = await startBench();
  const id = newId('session');
  const keeper = bench.open({}, id);
  expect(await alive(await keeper.started())).toBe(true);
  const viewer = bench.attach(id);
  await viewer.sees('$ ');
  viewer.type('echo one$((1 + 1))three; exit 7\n');
  await viewer.sees('echo one$((1 + 1))three');
  await viewer.sees('one2three');
  await viewer.ended;
  expect(await keeper.exit()).toMatchObject({
    outcome: 'PROCESS_OUTCOME_EXITED',
    exit_code: 7,
    signal: '',
    stdout_bytes: viewer.position(),
  });
  // A client that attaches after the exit receives the same output, and the exit.
  const late = bench.attach(id);
  await late.ended;
  expect(late.text()).toBe(viewer.text());
  await bench.processes.forgetProcesses({ ids: [id] }, call());
  expect(bench.processes.ids()).toEqual([]);
  expect(await bench.keep(id).exit()).toMatchObject({ reason: 'forgotten' });
});

test('the login shell of the user starts without a program, with a terminal’s environment and job control', async () => {
  const bench = await startBench();
  const id = newId('session');
  await bench.open({ program: '', env: { HOME: bench.home, TERM: 'vt100' } }, id).started();
  const viewer = bench.attach(id);
  // The typed text differs from the expected output, so its echo does not match.
  viewer.type('echo "<$TERM|$COLORTERM|$LANG|$-|$0|$(tty)>" | sed s/^/OUT:/\n');
  await viewer.sees(/OUT:<vt100\|truecolor\|C\.UTF-8\|\w*m\w*\|-?\S+\|\/dev\/pts\/\d+>/);
  viewer.type('cat <<< a"b"c > /dev/tty && jobs && exit\n');
  await viewer.sees('abc');
  await viewer.ended;
});

test('opening a terminal twice with one id starts one shell', async () => {
  const bench = await startBench();
  const id = newId('session');
  const shell = sh('echo $$ >> ran; echo up; cat');
  const keepers = [bench.open(shell, id), bench.open(shell, id)];
  const pids = await Promise.all(keepers.map((one) => one.started()));
  expect(pids[0]).toBe(pids[1]);
  await bench.attach(id).sees('up');
  await bench.processes.killProcess({ id, grace_ms: 1000 }, call());
  const exits = await Promise.all(keepers.map((one) => one.exit()));
  expect(exits[0]).toEqual(exits[1]);
  expect(exits[0]).toMatchObject({ outcome: 'PROCESS_OUTCOME_CANCELLED', signal: 'SIGHUP' });
  expect(await bench.open(sh('echo $$ >> ran'), id).exit()).toEqual(exits[0]);
  expect(await readFile(join(bench.home, 'ran'), 'utf8')).toBe(`${pids[0]}\n`);
});

test('a new size is set for the program and sent to other clients, and the last size counts', async () => {
  const bench = await startBench();
  const id = newId('session');
  await bench
    .open({ ...sh('trap "stty size" WINCH; stty size; while :; do sleep 0.02; done') }, id)
    .started();
  const [one, other] = [bench.attach(id), bench.attach(id)];
  await one.sees('24 80');
  await other.sees('24 80');
  one.do({ size: { cols: 100, rows: 30 } });
  await other.sees('30 100');
  expect(other.sizes).toEqual([{ cols: 100, rows: 30 }]);
  expect(one.sizes).toEqual([]);
  other.do({ size: { cols: 1000, rows: 1 } });
  await one.sees('1 1000');
  expect(one.sizes).toEqual([{ cols: 1000, rows: 1 }]);
  const third = bench.attach(id);
  await third.sees('1 1000');
  expect(third.head()).toEqual({ offset: 0, cols: 1000, rows: 1 });
});

test('Ctrl-C and signals end the foreground process, not the shell', async () => {
  const bench = await startBench();
  const id = newId('session');
  await bench.open({ program: 'bash', args: ['--norc', '-i'] }, id).started();
  const viewer = bench.attach(id);
  await viewer.sees('$ ');
  const [first, second] = [unusual(), unusual()];
  const sleeps = (ms: number): Promise<void> =>
    waitFor(async () => expect(await running(`sleep ${ms}`)).toHaveLength(1));
  viewer.type(`sleep ${first}; echo over$?\n`);
  await sleeps(first);
  viewer.type('\x03');
  await viewer.sees('^C');
  viewer.type(`echo code$?; sleep ${second}\n`);
  await viewer.sees('code130\r\n');
  await sleeps(second);
  viewer.do({ signal: 'SIGTERM' });
  await viewer.sees('Terminated');
  viewer.type('echo code$?\n');
  await viewer.sees('code143');
  viewer.do({ signal: 'SIGSEGV' });
  await expect(viewer.ended).rejects.toMatchObject({ code: 'invalid_request' });
});

needs('less')('a pager draws its screen and leaves it', async () => {
  const bench = await startBench();
  const id = newId('session');
  await writeFile(join(bench.home, 'text'), Array.from({ length: 100 }, (_, i) => `line ${i}\n`).join(''));
  const keeper = bench.open({ program: 'less', args: ['text'] }, id);
  const viewer = bench.attach(id);
  // The client attached before the terminal was open, and receives its output.
  await viewer.sees('line 22');
  viewer.type('G');
  await viewer.sees('line 99');
  viewer.type('q');
  expect(await keeper.exit()).toMatchObject({ exit_code: 0 });
});

test('characters of several bytes arrive whole, also at the start of a replay', async () => {
  const bench = await startBench();
  const id = newId('session');
  const wide = '漢字 ﷽ 👩‍💻 é\n';
  await bench.open(sh('stty -echo; echo ready; cat'), id).started();
  const viewer = bench.attach(id);
  await viewer.sees('ready');
  viewer.type(wide);
  await viewer.sees('漢字 ﷽ 👩‍💻 é\r\n');
  viewer.type(`${'漢'.repeat(1000)}\n`.repeat(100));
  await viewer.reaches(300_000);
  const late = bench.attach(id);
  await late.reaches(viewer.position());
  expect(late.position() - late.head().offset).toBeGreaterThan(256 * 1024 - 4);
  expect(late.position() - late.head().offset).toBeLessThanOrEqual(256 * 1024);
  expect(late.text()).not.toContain('\ufffd');
});

test('input that the program does not read waits, delays no other terminal, and is not lost', async () => {
  const bench = await startBench();
  const [deaf, other] = [newId('session'), newId('session')];
  await promisedFifo(join(bench.home, 'go'));
  await bench.open(sh('stty raw -echo; echo ready; read x < go; head -c 300000 | md5sum'), deaf).started();
  await bench.open({}, other).started();
  const viewer = bench.attach(deaf);
  await viewer.sees('ready');
  const bytes = Buffer.alloc(300_000, 'abcdefg');
  for (let at = 0; at < bytes.length; at += 60_000) viewer.type(bytes.subarray(at, at + 60_000));
  const lively = bench.attach(other);
  lively.type('echo a"li"ve\n');
  await lively.sees('alive');
  await writeFile(join(bench.home, 'go'), 'go\n');
  await viewer.sees(createHash('md5').update(bytes).digest('hex'));
});

test('a client that pastes much input into a program with much output loses neither', async () => {
  const bench = await startBench();
  const id = newId('session');
  await bench.open(sh('stty -echo; echo ready; while read -r x; do echo $x$x$x$x$x; done'), id).started();
  const viewer = bench.attach(id);
  await viewer.sees('ready\r\n');
  for (let i = 0; i < 10; i++) viewer.type(`${'x'.repeat(99)}\n`.repeat(500));
  viewer.type('the end\n');
  // The end of the last line can arrive later than its beginning.
  await expect.poll(() => viewer.position()).toBe(7 + 5000 * (5 * 99 + 2) + 5 * 7 + 2);
});

async function promisedFifo(path: string): Promise<void> {
  await once(spawn('mkfifo', [path], { stdio: 'ignore' }), 'exit');
}

/** Returns the output of `seq 1 last` as a terminal prints it. */
function seq(last: number): Buffer {
  const parts: string[] = [];
  for (let i = 1; i <= last; i++) parts.push(`${i}\r\n`);
  return Buffer.from(parts.join(''));
}

const digest = (bytes: Uint8Array): string => createHash('sha256').update(bytes).digest('hex');

test('50 MB arrive to the byte, even if the reader pauses', async () => {
  const bench = await startBench();
  const id = newId('session');
  const last = 5_700_000;
  const viewer = ((): Viewer => {
    bench.open(sh(`seq 1 ${last}`), id);
    return bench.attach(id);
  })();
  for (const stop of [1_000_000, 20_000_000]) {
    await viewer.reaches(stop);
    viewer.taking(false);
    await bench.processes.forgetProcesses({ ids: [] }, call());
    viewer.taking(true);
  }
  await viewer.ended;
  const expected = seq(last);
  expect(viewer.position()).toBe(expected.length);
  expect(digest(viewer.bytes())).toBe(digest(expected));
});

test('the program stalls while no client acknowledges its output, and a client gets 256 KiB at most', async () => {
  const bench = await startBench();
  const id = newId('session');
  const keeper = bench.open(sh('echo ready; yes'), id);
  const viewer = bench.attach(id, { taking: false });
  const pid = await keeper.started();
  await viewer.sees('ready');
  // Waits for 128 KiB. On a busy machine the program may pause earlier, and still() would take the pause for a stall.
  await viewer.reaches(128 * 1024);
  const still = async (): Promise<string> => {
    for (let before = ''; ; ) {
      const [yes] = await children(pid);
      const io = await readFile(`/proc/${yes}/io`, 'utf8').catch(() => '');
      const written = /wchar: (\d+)/.exec(io)?.[1] ?? '';
      if (written !== '' && written === before) return written;
      before = written;
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
  };
  const written = Number(await still());
  expect(written).toBeLessThan(1024 * 1024);
  expect(viewer.position()).toBeLessThanOrEqual(256 * 1024);
  viewer.taking(true);
  await viewer.reaches(5_000_000);
});

async function children(pid: number): Promise<number[]> {
  const text = await readFile(`/proc/${pid}/task/${pid}/children`, 'utf8').catch(() => '');
  return text.trim().split(' ').filter(Boolean).map(Number);
}

test('a slow client delays no fast one, is detached when it falls out of the window, and may attach again', async () => {
  const bench = await startBench();
  const id = newId('session');
  bench.open(sh('yes | head -c 3000000; cat'), id);
  const [fast, slow] = [bench.attach(id), bench.attach(id, { taking: false })];
  await fast.reaches(4_500_000);
  await expect(slow.ended).rejects.toMatchObject({
    code: 'range_not_satisfiable',
    details: { from: expect.any(Number), to: expect.any(Number) },
  });
  const past = bench.attach(id, { offset: slow.position() });
  await expect(past.ended).rejects.toMatchObject({ code: 'range_not_satisfiable' });
  const future = bench.attach(id, { offset: 4_500_001 });
  await expect(future.ended).rejects.toMatchObject({ code: 'range_not_satisfiable' });
  const again = bench.attach(id);
  await again.reaches(4_500_000);
  expect(again.head().offset).toBe(4_500_000 - 256 * 1024);
});

test.skipIf(process.getuid?.() !== 0)(
  'a terminal that ends kills no program on a terminal of a container with the same path (needs root)',
  async () => {
    const bench = await startBench();
    const id = newId('session');
    const terminal = bench.open(sh('tty; read line'), id);
    await terminal.started();
    const viewer = bench.attach(id);
    await viewer.sees(/pts.\d+\r/);
    const [path = ''] = /\/dev\/pts\/\d+/.exec(viewer.text()) ?? [];
    const seconds = unusual();
    // A new instance of devpts, the file system of terminals, counts its terminals from 0. So the terminal of the last
    // program has the path `path`.
    const script = `mount -t devpts -o newinstance,ptmxmode=0666 devpts /dev/pts
      mount --bind /dev/pts/ptmx /dev/ptmx
      for n in $(seq 0 ${path.replace('/dev/pts/', '')}); do script -qfc 'exec sleep ${seconds}' /dev/null & done
      wait`;
    const container = spawn('unshare', ['--mount', 'sh', '-c', script], { stdio: 'ignore', detached: true });
    onTestFinished(() => {
      if (container.pid) process.kill(-container.pid, 'SIGKILL');
    });
    const pids = async (): Promise<number[]> => {
      const all = await running(`sleep ${seconds}`);
      const files = await Promise.all(all.map((pid) => readlink(`/proc/${pid}/fd/1`).catch(() => '')));
      return all.filter((_, n) => files[n] === path);
    };
    await waitFor(async () => expect(await pids()).toHaveLength(1));
    const before = await pids();
    viewer.type('\n');
    await terminal.exit();
    expect(await pids()).toEqual(before);
  },
);

test('without a client the program goes on and the oldest output is dropped', async () => {
  const bench = await startBench({ terminalWindowBytes: 64 * 1024 });
  const id = newId('session');
  await bench.open(sh('yes | head -c 300000; touch done; cat'), id).started();
  await waitFor(() => readFile(join(bench.home, 'done')));
  const viewer = bench.attach(id);
  await viewer.reaches(450_000);
  expect(viewer.head().offset).toBeGreaterThan(450_000 - 80 * 1024);
});

test('a client whose call was cut during much output continues without a gap', async () => {
  const bench = await startBench();
  const id = newId('session');
  const last = 3_000_000;
  let keeper = bench.open(sh(`seq 1 ${last}; cat`), id);
  const expected = seq(last);
  let viewer = bench.attach(id, { client: 'c' });
  const pieces: Buffer[] = [];
  let from = 0;
  for (const stop of [2_000_000, 9_000_000, 15_000_000]) {
    await viewer.reaches(stop);
    viewer.lose();
    keeper.leave();
    await viewer.ended.catch(() => {});
    pieces.push(viewer.bytes());
    from = viewer.position();
    await waitFor(async () => expect(await keeper.exit().catch(() => 'left')).toBe('left'));
    keeper = bench.keep(id);
    viewer = bench.attach(id, { client: 'c', offset: from });
  }
  await viewer.reaches(expected.length);
  pieces.push(viewer.bytes());
  expect(digest(Buffer.concat(pieces))).toBe(digest(expected));
});

test('output waits for a client with a lost link, but only for a limited time after the broker is back', async () => {
  const bench = await startBench({ heldMs: 200, terminalWindowBytes: 256 * 1024 });
  const id = newId('session');
  const keeper = bench.open(sh('yes | head -c 2000000; touch done; cat'), id);
  const viewer = bench.attach(id, { client: 'c' });
  await viewer.reaches(100_000);
  viewer.lose();
  keeper.leave();
  await viewer.ended.catch(() => {});
  // The broker is away for longer than `heldMs`. The time limit begins only when the broker is back, so until then the
  // output must wait for the client.
  await new Promise((resolve) => setTimeout(resolve, 400));
  await expect(readFile(join(bench.home, 'done'))).rejects.toThrow();
  bench.keep(id);
  await waitFor(() => readFile(join(bench.home, 'done')));
  const late = bench.attach(id, { client: 'c', offset: viewer.position() });
  await expect(late.ended).rejects.toMatchObject({ code: 'range_not_satisfiable' });
});

test('each echo has the count of received input, and the count continues after a lost link', async () => {
  const bench = await startBench();
  const id = newId('session');
  bench.open(sh('stty raw; echo ready; read go; stty -echo; echo; exec cat >/dev/null'), id);
  const first = bench.attach(id, { client: 'c' });
  await first.sees('ready');
  first.type('go\n');
  await first.sees(/go.*\n/);
  expect(first.input()).toEqual({ taken: 3, known: false });
  // The terminal no longer echoes, so the agent reports the count of received bytes in separate messages, once per
  // 8 KiB.
  first.type('x'.repeat(4 * 1024));
  first.type('x'.repeat(4 * 1024));
  await waitFor(() => expect(first.input().taken).toBe(3 + 8 * 1024));
  first.lose();
  await first.ended.catch(() => {});
  const second = bench.attach(id, { client: 'c', offset: first.position() });
  await waitFor(() => expect(second.input()).toEqual({ taken: 3 + 8 * 1024, known: true }));
  // The client attaches again while its second attach is still open, as if the agent had not yet noticed a lost link.
  const third = bench.attach(id, { client: 'c', offset: first.position() });
  await waitFor(() => expect(third.input()).toEqual({ taken: 3 + 8 * 1024, known: true }));
  third.leave();
  await third.ended.catch(() => {});
  const stranger = bench.attach(id, { client: 'c', offset: first.position() });
  await waitFor(() => expect(stranger.input()).toEqual({ taken: 0, known: false }));
});

test('a client that detached on purpose delays no other', async () => {
  const bench = await startBench();
  const id = newId('session');
  bench.open(sh('yes | head -c 3000000; touch done; cat'), id);
  const viewer = bench.attach(id, { taking: false });
  await viewer.reaches(100_000);
  viewer.leave();
  await waitFor(() => readFile(join(bench.home, 'done')));
});

test('a terminal without a broker ends after its grace period, unless the broker is back in time', async () => {
  const bench = await startBench();
  const [id, other] = [newId('session'), newId('session')];
  const first = bench.open({ grace_ms: 300 }, id);
  await first.started();
  first.leave();
  const second = bench.keep(id);
  const pid = await second.started();
  await new Promise((resolve) => setTimeout(resolve, 500));
  expect(await alive(pid)).toBe(true);
  second.leave();
  await waitFor(async () => expect(await alive(pid)).toBe(false));
  const over = { outcome: 'PROCESS_OUTCOME_CANCELLED', reason: 'grace_period_over' };
  expect(await bench.keep(id).exit()).toMatchObject(over);
  const brief = bench.open({ grace_ms: 0 }, other);
  await brief.started();
  brief.leave();
  expect(await bench.keep(other).exit()).toMatchObject(over);
});

test('no process that was started in a terminal outlives it', async () => {
  const bench = await startBench({ hangupMs: 300 });
  const id = newId('session');
  const [plainly, apart, deaf] = [unusual(), unusual(), unusual()];
  const keeper = bench.open({ program: 'bash', args: ['--norc', '-i'] }, id);
  const viewer = bench.attach(id);
  await viewer.sees('$ ');
  viewer.type(`sleep ${plainly} & setsid sleep ${apart} & nohup sleep ${deaf} >/dev/null 2>&1 &\n`);
  await waitFor(async () => {
    for (const one of [plainly, apart, deaf]) expect(await running(`sleep ${one}`)).toHaveLength(1);
  });
  viewer.type('exit 4\n');
  await viewer.ended;
  expect(await keeper.exit()).toMatchObject({ outcome: 'PROCESS_OUTCOME_EXITED', exit_code: 4 });
  for (const one of [plainly, apart, deaf]) expect(await running(`sleep ${one}`)).toEqual([]);
});

test('a kill ends an interactive shell and processes that ignore the hangup, and a stop of the agent ends all', async () => {
  const bench = await startBench();
  const [killed, stopped] = [newId('session'), newId('session')];
  const deaf = unusual();
  const shell = bench.open(
    { program: 'bash', args: ['--norc', '-ic', `trap "" HUP TERM; sleep ${deaf}; :`] },
    killed,
  );
  await shell.started();
  await waitFor(async () => expect(await running(`sleep ${deaf}`)).toHaveLength(1));
  await bench.processes.killProcess({ id: killed, grace_ms: 100 }, call());
  expect(await shell.exit()).toMatchObject({ outcome: 'PROCESS_OUTCOME_CANCELLED', signal: 'SIGKILL' });
  expect(await running(`sleep ${deaf}`)).toEqual([]);
  const pid = await bench.open({}, stopped).started();
  await bench.again();
  expect(await alive(pid)).toBe(false);
  const lost = { outcome: 'PROCESS_OUTCOME_LOST', reason: 'agent_restarted' };
  expect(await bench.keep(stopped).exit()).toMatchObject(lost);
  expect(bench.processes.ids()).toEqual([killed, stopped]);
  const empty = bench.attach(stopped);
  await empty.ended;
  expect(empty.text()).toBe('');
});

test('a killed agent leaves no process of a terminal, and the next one reports it as lost', async () => {
  const bench = await startBench();
  await bench.processes.stop();
  const duration = unusual();
  const path = await writeAgentProgram(
    bench.home,
    `const args = ['-c', 'trap "" HUP; setsid sleep ${duration} & sleep ${duration}'];
    const terminal = { program: '/bin/sh', args, cwd: '', env: {}, size: { cols: 80, rows: 24 }, grace_ms: 60000 };
    for await (const { event } of processes.openTerminal({ id: 'ses_1', spec: terminal }, call)) console.log(event.started.pid);`,
  );
  const agent = spawn(process.execPath, [path], { stdio: ['ignore', 'pipe', 'inherit'] });
  await once(agent.stdout.setEncoding('utf8'), 'data');
  await waitFor(async () => expect(await running(`sleep ${duration}`)).toHaveLength(2));
  agent.kill('SIGKILL');
  await once(agent, 'exit');
  await bench.again();
  expect(await running(`sleep ${duration}`)).toEqual([]);
  const lost = { outcome: 'PROCESS_OUTCOME_LOST', reason: 'agent_restarted' };
  expect(await bench.keep('ses_1').exit()).toMatchObject(lost);
});

/** Returns the open files of a process other than its three standard files. */
async function otherFilesOf(pid: number | 'self'): Promise<string[]> {
  const fds = (await readdir(`/proc/${pid}/fd`)).filter((fd) => Number(fd) > 2);
  return Promise.all(fds.map((fd) => readlink(`/proc/${pid}/fd/${fd}`).catch(() => 'closed')));
}

test('no program inherits a file of the agent, not even through a spawner that started later', async () => {
  await (await startBench()).open().started();
  // The second spawner starts while this terminal is open, so it could inherit the terminal's files.
  const bench = await startBench();
  const parent = async (pid: number): Promise<number> =>
    Number(/PPid:\s+(\d+)/.exec(await readFile(`/proc/${pid}/status`, 'utf8'))?.[1]);
  for (let round = 0; round < 2; round++) {
    const keeper = bench.open(sh('exec sleep 60'));
    const pid = await keeper.started();
    // Tries again, because a program that has just started has the files of its libraries open.
    await waitFor(async () => {
      expect(await readlink(`/proc/${pid}/exe`)).toContain('sleep');
      expect(await otherFilesOf(pid)).toEqual([]);
    });
    const spawner = await parent(pid);
    expect((await otherFilesOf(spawner)).filter((name) => /ptmx|pts/.test(name))).toEqual([]);
    process.kill(spawner, 'SIGKILL');
    expect(await keeper.exit()).toMatchObject({ reason: 'spawner_died' });
  }
});

test('a second agent in the same process does not end terminals of the first', async () => {
  const bench = await startBench();
  const id = newId('session');
  await bench.open({}, id).started();
  const other = await startBench();
  await other.open(sh('true')).exit();
  const viewer = bench.attach(id);
  viewer.type('echo still$((1 + 1))here\n');
  await viewer.sees('still2here');
});

test('200 terminals that were opened and ended leave no file open', async () => {
  const bench = await startBench({ hangupMs: 0 });
  const terminals = async (): Promise<number> =>
    (await otherFilesOf('self')).filter((name) => /ptmx|pts/.test(name)).length;
  const before = [await terminals(), (await otherFilesOf('self')).length];
  for (let round = 0; round < 20; round++) {
    const keepers = Array.from({ length: 10 }, () => bench.open(sh('echo x')));
    for (const one of keepers) expect(await one.exit()).toMatchObject({ exit_code: 0, stdout_bytes: 3 });
  }
  expect(await terminals()).toBe(before[0]);
  expect((await otherFilesOf('self')).length).toBeLessThanOrEqual(before[1]! + 2);
});
