// The spawner of commands: what happens to the spawner and its commands when either the spawner or its agent dies.
import { type ChildProcess, spawn } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import { once } from 'node:events';
import { closeSync, constants, existsSync, openSync } from 'node:fs';
import {
  mkdir,
  mkdtemp,
  open as openFile,
  readdir,
  readFile,
  readlink,
  rm,
  writeFile,
} from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, onTestFinished, test, vi } from 'vitest';
import { type Processes, startProcesses } from '../../agent/processes/index.ts';
import { Spawners } from '../../agent/processes/spawner/spawner-pool.ts';
import type { ProcessEvent } from '../../proto/types/farhand/agent/v1/ProcessEvent.ts';
import type { ProcessExit } from '../../proto/types/farhand/agent/v1/ProcessExit.ts';
import type { AgentCall } from '../../shared/agent-rpcs.ts';
import { newId } from '../../shared/ids-and-secrets.ts';
import { createLogger } from '../../shared/logger.ts';
import { alive, specOf, writeAgentProgram } from '../agent/process-calls.ts';
import { waitFor } from '../wait-for.ts';

const log = createLogger('test', 'silent');
const mayMount = process.getuid?.() === 0 && existsSync('/dev/fuse');

let home: string;
let processes: Processes;
let started: Processes[];

async function open(more: { lateMs?: number } = {}): Promise<void> {
  const limits = { stopGraceMs: 50, killForMs: 2000, ...more };
  processes = await startProcesses({ directory: join(home, 'agent'), log, mayRunAs: true, limits });
  started.push(processes);
  // The first command starts the spawner.
  await end(start('true'));
}

function call(signal: AbortSignal = new AbortController().signal): AgentCall {
  return { signal };
}

interface Answer {
  event?: ProcessEvent | null;
}

function start(command: string, id = newId('command')): AsyncIterator<Answer> {
  const spec = specOf({ command, cwd: home });
  return processes.startProcess({ id, spec }, call())[Symbol.asyncIterator]();
}

/** Reads all events until the exit. */
async function end(events: AsyncIterator<Answer>): Promise<{ output: string; event: ProcessEvent }> {
  let output = '';
  for (;;) {
    const { value, done } = await events.next();
    if (done) throw new Error('no exit was reported');
    output += Buffer.from(value.event?.output?.data ?? '').toString();
    if (value.event?.exit) return { output, event: value.event };
  }
}

async function until(text: string, events: AsyncIterator<Answer>): Promise<void> {
  for (let seen = ''; !seen.includes(text); ) {
    const { value } = await events.next();
    seen += Buffer.from(value.event?.output?.data ?? '').toString();
  }
}

/** Returns the pids of the spawners of an agent, zombies included. The agent is identified by its journal id. */
async function spawners(journalId: string): Promise<number[]> {
  const pids = (await readdir('/proc')).filter((name) => /^\d+$/.test(name));
  const found = await Promise.all(
    pids.map(async (pid) => {
      const environ = await readFile(`/proc/${pid}/environ`, 'latin1').catch(() => '');
      return environ.includes(`spawner:${journalId}:`) ? [Number(pid)] : [];
    }),
  );
  return found.flat();
}

async function spawnerPid(): Promise<number> {
  const [pid, ...more] = await spawners(processes.journalId);
  expect(more).toEqual([]);
  return pid!;
}

/** Returns the pids of processes whose working directory is that of the test. */
async function inHome(): Promise<string[]> {
  const pids = (await readdir('/proc')).filter((name) => /^\d+$/.test(name));
  const places = await Promise.all(pids.map((pid) => readlink(`/proc/${pid}/cwd`).catch(() => '')));
  return pids.filter((_, index) => places[index] === home);
}

const lost = { outcome: 'PROCESS_OUTCOME_LOST', reason: 'spawner_died', exit_code: 0, signal: '' };

/** Runs a program to its end. Returns its output and exit. */
async function result(more: object): Promise<ProcessExit & { output: string }> {
  const spec = specOf({ direct: true, cwd: home, ...more });
  const events = processes.startProcess({ id: newId('command'), spec }, call());
  const { output, event } = await end(events[Symbol.asyncIterator]());
  return { output, ...event.exit };
}

const { execArgv } = process;

/** Processes start by posix_spawn with the addon for libc, and by fork without it. */
const ways = [
  { way: 'posix_spawn', flags: [] },
  { way: 'fork', flags: ['--no-addons'] },
] as const;

describe.each(ways)('by $way', ({ way, flags }) => {
  beforeEach(async () => {
    process.execArgv = [...execArgv, ...flags];
    started = [];
    home = await mkdtemp(join(tmpdir(), 'farhand-spawner-'));
    await open();
  });
  afterEach(async () => {
    process.execArgv = execArgv;
    await Promise.all(started.map((one) => one.stop()));
    await rm(home, { recursive: true, force: true });
  });

  test('the agent uses this way', async () => {
    const maps = await readFile(`/proc/${await spawnerPid()}/maps`, 'latin1');
    expect(maps.includes('koffi')).toBe(way === 'posix_spawn');
  });

  test('a program is found, started and ended with the same results', async () => {
    await writeFile(join(home, 'no-interpreter'), 'echo "$0 $1"', { mode: 0o755 });
    const PATH = '/nonexistent:/etc/passwd::/usr/bin:/bin';
    expect(await result({ command: 'no-interpreter', args: ['a b'], env: { PATH } })).toMatchObject({
      output: 'no-interpreter a b\n',
      exit_code: 0,
    });
    expect(await result({ command: 'sh', args: ['-c', 'exit 3'] })).toMatchObject({
      exit_code: 3,
      signal: '',
    });
    expect(await result({ command: 'sh', args: ['-c', 'kill -USR1 $$'] })).toMatchObject({
      exit_code: 138,
      signal: 'SIGUSR1',
    });
    expect(await result({ command: 'not-there' })).toMatchObject({ outcome: 'PROCESS_OUTCOME_NOT_STARTED' });
    expect(await result({ command: 'true', cwd: '/nonexistent' })).toMatchObject({
      outcome: 'PROCESS_OUTCOME_NOT_STARTED',
    });
    const status = ['grep', ['-E', '^(Sig(Blk|Ign)|NSsid|NSpid):', '/proc/self/status']] as const;
    const { output } = await result({ command: status[0], args: [...status[1]] });
    const [pid, session, ...masks] = output
      .trim()
      .split('\n')
      .map((line) => line.split('\t').at(-1));
    expect(session).toBe(pid);
    expect(masks).toEqual(['0000000000000000', '0000000000000000']);
  });

  test.runIf(way === 'posix_spawn')('a real-time signal has a number and a name of its own', async () => {
    for (const [number, name] of [
      [33, 'SIG33'],
      [34, 'SIGRTMIN'],
      [37, 'SIGRTMIN+3'],
    ])
      expect(await result({ command: 'sh', args: ['-c', `kill -${number} $$`] })).toMatchObject({
        exit_code: 128 + Number(number),
        signal: name,
      });
  });

  test('a command whose spawner cannot start fails with a clear error, and the next command works', async () => {
    process.kill(await spawnerPid(), 'SIGKILL');
    await waitFor(() => expect(processes.pids()).toEqual([]));
    const node = vi.spyOn(process, 'execPath', 'get').mockReturnValue('/nonexistent');
    try {
      expect(await result({ command: 'true' })).toMatchObject({
        outcome: 'PROCESS_OUTCOME_NOT_STARTED',
        reason: expect.stringContaining('spawner'),
      });
    } finally {
      node.mockRestore();
    }
    expect(await result({ command: 'true' })).toMatchObject({ exit_code: 0 });
  });

  test('an agent has no spawner before its first command', async () => {
    await processes.stop();
    const other = await startProcesses({ directory: join(home, 'agent'), log, mayRunAs: true });
    started.push(other);
    expect(await spawners(other.journalId)).toEqual([]);
  });

  test('no spawner starts while the agent has no free file descriptors, and the agent goes on', async () => {
    const limits = await readFile('/proc/self/limits', 'utf8');
    const before = /^Max open files\s+(\S+)/m.exec(limits)?.[1] ?? '';
    const set = 'prlimit --pid "$0" --nofile="$1":';
    // While the limit is low, the test cannot start another process. So one child process sets the low limit, waits,
    // and restores the old limit.
    const limiter = spawn('sh', [
      '-c',
      `${set.replace('$1', '5')}; echo; read -r _; ${set}`,
      `${process.pid}`,
      before,
    ]);
    await once(limiter.stdout, 'data');
    const own = new Spawners(randomUUID(), { lateMs: 5_000, cgroup: undefined, log });
    try {
      await expect(own.ready()).rejects.toMatchObject({ code: 'unavailable' });
    } finally {
      limiter.stdin.end('\n');
      await once(limiter, 'exit');
    }
    await own.ready();
    await own.stop();
  });

  test('when the spawner is killed, running commands are killed and lost, and the next command works', async () => {
    const events = [
      start('echo ready; sleep 60'),
      start('trap "" TERM; echo ready; while :; do sleep 1; done'),
    ];
    const escaped = `env -i setsid sh -c 'echo $$ > escaped; echo ready; sleep 60' & sleep 60`;
    events.push(start(escaped));
    for (const one of events) await until('ready', one);
    process.kill(await spawnerPid(), 'SIGKILL');
    for (const one of events) expect((await end(one)).event.exit).toMatchObject(lost);
    expect(await alive(Number(await readFile(join(home, 'escaped'), 'utf8')))).toBe(false);
    expect(await end(start('echo again'))).toMatchObject({
      output: 'again\n',
      event: { exit: { outcome: 'PROCESS_OUTCOME_EXITED', exit_code: 0 } },
    });
    expect(await spawners(processes.journalId)).toHaveLength(1);
  });

  test('a command that cleared its environment and closed its pipes is found and killed when its spawner is killed', async () => {
    const events = start('echo $$ > leader; exec env -i sleep 60 >/dev/null 2>&1');
    await events.next();
    const leader = (): Promise<string> => readFile(join(home, 'leader'), 'utf8');
    await waitFor(async () =>
      expect(await readFile(`/proc/${Number(await leader())}/environ`)).toHaveLength(0),
    );
    process.kill(await spawnerPid(), 'SIGKILL');
    expect((await end(events)).event.exit).toMatchObject(lost);
    expect(await inHome()).toEqual([]);
  });

  test('a spawner that dies during starts leaves each command run at most once, and no process alive', async () => {
    const pid = await spawnerPid();
    const first = start('sleep 60');
    const others = Array.from({ length: 30 }, (_, i) => end(start(`echo ${i} >> ran; sleep 60`)));
    await first.next();
    process.kill(pid, 'SIGKILL');
    for (const { event } of await Promise.all([end(first), ...others]))
      expect(event.exit).toMatchObject(lost);
    expect(await inHome()).toEqual([]);
    const ran = (await readFile(join(home, 'ran'), 'utf8').catch(() => '')).trim().split('\n');
    expect(new Set(ran).size).toBe(ran.length);
    expect((await end(start('echo again'))).output).toBe('again\n');
  });

  test('a hung spawner delays the starts that were sent to it, but no later ones', async () => {
    await processes.stop();
    await open({ lateMs: 300 });
    const hung = await spawnerPid();
    process.kill(hung, 'SIGSTOP');
    const held = end(start('echo held'));
    const later: string[] = [];
    await waitFor(() => {
      // Starts a command at each attempt. Until the agent detects the hang, these commands still go to the hung spawner
      // and wait.
      void end(start('echo later')).then(({ output }) => later.push(output));
      expect(later).toContain('later\n');
    });
    // The hung spawner and its replacement. On a busy machine there may be more, if a replacement was late as well.
    expect((await spawners(processes.journalId)).length).toBeGreaterThan(1);
    process.kill(hung, 'SIGCONT');
    expect((await held).output).toBe('held\n');
    await processes.stop();
    expect(await spawners(processes.journalId)).toEqual([]);
  });

  test('while a spawner hangs, the exits of its commands are reported', async () => {
    await processes.stop();
    await open({ lateMs: 300 });
    const hung = await spawnerPid();
    const ids = [newId('command'), newId('command'), newId('command')];
    const [three, killed, cancelled] = [
      start('echo ready; while [ ! -e go ]; do sleep 0.02; done; exit 3', ids[0]),
      start('echo ready; while [ ! -e go ]; do sleep 0.02; done; kill -USR1 $$', ids[1]),
      start('echo ready; exec sleep 60', ids[2]),
    ];
    for (const one of [three, killed, cancelled]) await until('ready', one);
    process.kill(hung, 'SIGSTOP');
    const held = end(start('echo held'));
    await writeFile(join(home, 'go'), '');
    expect((await end(three)).event.exit).toMatchObject({ exit_code: 3, signal: '' });
    expect((await end(killed)).event.exit).toMatchObject({ exit_code: 138, signal: 'SIGUSR1' });
    await processes.killProcess({ id: ids[2]!, grace_ms: 60_000 }, call());
    expect((await end(cancelled)).event.exit).toMatchObject({ exit_code: 143, signal: 'SIGTERM' });
    process.kill(hung, 'SIGCONT');
    expect((await held).output).toBe('held\n');
  });

  test.runIf(mayMount)(
    'a start that hangs on a dead disk ends when it is cancelled or its timeout is over',
    async () => {
      await processes.stop();
      const dead = join(home, 'dead');
      await mkdir(dead);
      const script = await writeAgentProgram(
        home,
        `import { existsSync, writeFileSync } from 'node:fs';
      const run = async (id, more) => {
        for await (const { event } of processes.startProcess({ id, spec: { ...spec, ...more } }, call))
          if (event.exit) return event.exit;
      };
      const program = { command: ${JSON.stringify(join(dead, 'program'))}, direct: true };
      // This command has started at the spawner that hangs, and is not ended with the start that hangs.
      const other = run('cmd_other', { command: ${JSON.stringify(`touch ${join(home, 'begun')}; while [ ! -e ${join(home, 'go')} ]; do sleep 0.02; done`)} });
      while (!existsSync(${JSON.stringify(join(home, 'begun'))})) await new Promise(setImmediate);
      const [hung, late] = [run('cmd_hung', program), run('cmd_late', { ...program, timeout_ms: 100 })];
      // These commands go to the spawner that hangs, until the agent detects that.
      for (let n = 0, ended; !ended; n++)
        ended = await Promise.race([run('cmd_' + n, { command: 'true' }), new Promise((resolve) => setTimeout(resolve, 50))]);
      await processes.killProcess({ id: 'cmd_hung', grace_ms: 0 }, call);
      for (const { outcome, signal } of await Promise.all([hung, late])) console.log(outcome, signal);
      writeFileSync(${JSON.stringify(join(home, 'go'))}, '');
      console.log('other', (await other).exit_code);
      await processes.stop();`,
        { lateMs: 300 },
      );
      // A FUSE file system without a server. Like a disk that no longer responds, it blocks each program that uses it. Only
      // the agent of this test sees the mount.
      const fuse = await openFile('/dev/fuse', 'r+');
      const options = 'fd=3,rootmode=40000,user_id=0,group_id=0';
      const mounting = `mount -i -t fuse -o ${options} dead "$0" && exec 3>&- && exec "$@"`;
      const args = ['--mount', 'sh', '-c', mounting, dead, process.execPath, ...flags, script];
      const agent = spawn('unshare', args, { stdio: ['ignore', 'pipe', 'inherit', fuse.fd] });
      try {
        const chunks: Buffer[] = [];
        agent.stdout!.on('data', (chunk: Buffer) => chunks.push(chunk));
        await once(agent, 'close');
        expect(Buffer.concat(chunks).toString()).toBe(
          'PROCESS_OUTCOME_CANCELLED SIGKILL\nPROCESS_OUTCOME_TIMEOUT SIGKILL\nother 0\n',
        );
      } finally {
        agent.kill('SIGKILL');
        await fuse.close();
      }
    },
  );

  test('64 commands at once all start and end', async () => {
    const ends = Array.from({ length: 64 }, (_, i) => end(start(`echo ${i}`)));
    const outputs = (await Promise.all(ends)).map(({ output }) => output);
    expect(outputs).toEqual(Array.from({ length: 64 }, (_, i) => `${i}\n`));
  });

  test('signals to the whole process group do not end the spawner; stopping the agent does', async () => {
    const [pid] = await spawners(processes.journalId);
    for (const signal of ['SIGTERM', 'SIGINT', 'SIGHUP']) process.kill(pid!, signal);
    expect((await end(start('echo out'))).output).toBe('out\n');
    expect(await spawners(processes.journalId)).toEqual([pid]);
    await processes.stop();
    expect(await alive(pid!)).toBe(false);
  });

  /**
   * Starts another agent in a separate process on the same directory. `body` can use `processes` and start(command,
   * id). Resolves with the agent and its journal id.
   */
  async function otherAgent(body = ''): Promise<{ agent: ChildProcess; journalId: string }> {
    await processes.stop();
    const path = await writeAgentProgram(
      home,
      `const start = (command, id) => processes.startProcess({ id, spec: { ...spec, command } }, call).next();
      for await (const _ of processes.startProcess({ id: 'cmd_first', spec: { ...spec, command: 'true' } }, call));
      ${body}
      console.log(processes.journalId);`,
    );
    const agent: ChildProcess = spawn(process.execPath, [path], { stdio: ['pipe', 'pipe', 'inherit'] });
    const [line]: string[] = await once(agent.stdout!.setEncoding('utf8'), 'data');
    return { agent, journalId: line!.trim() };
  }

  /**
   * Resolves when the journal contains this text. By then, the starts of earlier entries have been sent to the spawner.
   */
  async function journalled(text: string): Promise<void> {
    const journal = join(home, 'agent/journal');
    await waitFor(async () => expect(await readFile(journal, 'utf8')).toContain(text));
  }

  test('the spawner ends with a killed agent', async () => {
    const { agent, journalId } = await otherAgent(`await start('sleep 60', 'cmd_running');`);
    const [pid] = await spawners(journalId);
    expect(pid).toBeGreaterThan(1);
    agent.kill('SIGKILL');
    await once(agent, 'exit');
    await waitFor(async () => expect(await alive(pid!)).toBe(false));
    expect(await inHome()).not.toEqual([]);
    await open();
    expect(await inHome()).toEqual([]);
  });

  test('a spawner that survives its killed agent starts no more commands, even if the journal is gone', async () => {
    const { agent, journalId } = await otherAgent(`
      process.stdin.once('data', () => {
        for (let n = 0; n < 8; n++) void start('touch ran', 'cmd_asked' + n);
        process.stdin.once('data', () => void start('touch ran', 'cmd_later'));
      });`);
    const [pid] = await spawners(journalId);
    process.kill(pid!, 'SIGSTOP');
    agent.stdin!.write('go');
    await journalled('"cmd_asked7"');
    agent.stdin!.write('go');
    await journalled('"cmd_later"');
    agent.kill('SIGKILL');
    await once(agent, 'exit');
    // Without the journal, the next agent does not know these commands. But it removes the pipes of the killed agent,
    // so the old spawner cannot start the commands.
    await rm(join(home, 'agent/journal'));
    await open();
    process.kill(pid!, 'SIGCONT');
    await waitFor(async () => expect(await alive(pid!)).toBe(false));
    expect(await inHome()).toEqual([]);
    expect(await readdir(home)).not.toContain('ran');
  });

  test('a spawner starts nothing after the death of its agent, even if another program reads the output', async () => {
    const { agent, journalId } = await otherAgent(`
      process.stdin.once('data', () => {
        void start('touch ran', 'cmd_asked');
        process.stdin.once('data', () => void start('touch ran', 'cmd_later'));
      });`);
    const [pid] = await spawners(journalId);
    process.kill(pid!, 'SIGSTOP');
    agent.stdin!.write('go');
    await journalled('"cmd_asked"');
    // Once the journal has the second command, the spawner has the request of the first one.
    agent.stdin!.write('go');
    await journalled('"cmd_later"');
    const pipes = await readdir(join(home, 'agent/pipes'));
    const reading = pipes.map((name) =>
      openSync(join(home, 'agent/pipes', name), constants.O_RDONLY | constants.O_NONBLOCK),
    );
    onTestFinished(() => {
      for (const fd of reading) closeSync(fd);
    });
    agent.kill('SIGKILL');
    await once(agent, 'exit');
    process.kill(pid!, 'SIGCONT');
    await waitFor(async () => expect(await alive(pid!)).toBe(false));
    expect(reading.length).toBeGreaterThan(0);
    expect(await readdir(home)).not.toContain('ran');
  });

  test('a cancelled command is reported with SIGTERM, even if its spawner hangs meanwhile', async () => {
    await processes.stop();
    // The agent waits so long for the report of the spawner. On a busy machine this test needs more than 5 s.
    await open({ lateMs: 60_000 });
    const pid = await spawnerPid();
    const id = newId('command');
    const events = start('echo ready; exec sleep 60', id);
    await until('ready', events);
    const other = newId('command');
    await until('ready', start('trap "" TERM; echo ready; sleep 60', other));
    process.kill(pid, 'SIGSTOP');
    await processes.killProcess({ id, grace_ms: 60_000 }, call());
    await processes.killProcess({ id: other, grace_ms: 500 }, call());
    // The agent waits 500 ms before it kills `other`. In this time it sees that no process of the first command is
    // left.
    await waitFor(async () => expect(await inHome()).toEqual([]));
    process.kill(pid, 'SIGCONT');
    const { event } = await end(events);
    expect(event.exit).toMatchObject({ outcome: 'PROCESS_OUTCOME_CANCELLED', signal: 'SIGTERM' });
  });

  test('a hung spawner does not prevent the stop of the agent', async () => {
    await processes.stop();
    await open({ lateMs: 100 });
    const [pid] = await spawners(processes.journalId);
    process.kill(pid!, 'SIGSTOP');
    const id = newId('command');
    const asked = end(start('touch ran', id));
    await journalled(id);
    const later = newId('command');
    void start('touch ran', later).next();
    await journalled(later);
    await processes.stop();
    expect((await asked).event.exit).toMatchObject(lost);
    expect(await spawners(processes.journalId)).toEqual([]);
    expect(await readdir(home)).not.toContain('ran');
  });

  test.each([
    ['while another command runs', ['cmd_running']],
    ['while no command runs', []],
  ])(
    'a command that a killed agent requested from a hung spawner never runs under the next agent, %s',
    async (_, running) => {
      const { agent, journalId } = await otherAgent(`
      for (const id of ${JSON.stringify(running)}) await start('sleep 60', id);
      process.stdin.once('data', () => {
        void start('touch ran; sleep 60', 'cmd_asked');
        process.stdin.once('data', () => void start('touch ran', 'cmd_later'));
      });`);
      const [pid] = await spawners(journalId);
      process.kill(pid!, 'SIGSTOP');
      agent.stdin!.write('go');
      await journalled('"cmd_asked"');
      agent.stdin!.write('go');
      await journalled('"cmd_later"');
      agent.kill('SIGKILL');
      await once(agent, 'exit');
      await open();
      expect(await alive(pid!)).toBe(false);
      expect(await inHome()).toEqual([]);
      for (const id of [...running, 'cmd_asked']) {
        const events = processes.followProcess({ id, stdout_offset: 0, stderr_offset: 0 }, call());
        const { event } = await end(events[Symbol.asyncIterator]());
        expect(event.exit).toMatchObject({ outcome: 'PROCESS_OUTCOME_LOST', reason: 'agent_restarted' });
      }
      expect(await readdir(home)).not.toContain('ran');
    },
  );
});
