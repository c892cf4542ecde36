// Terminals as users see them: full-screen programs over an attach, and `farhand shell` in a terminal or through pipes.
import { execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { closeSync, constants, existsSync, openSync, readFileSync, writeFileSync, writeSync } from 'node:fs';
import { join } from 'node:path';
import { DatabaseSync } from 'node:sqlite';
import { Terminal as Screen } from '@xterm/headless';
import { describe, expect, onTestFinished, test } from 'vitest';
import type { Terminal } from '../../shared/sdk/index.ts';
import { shipped, shippedProgram } from '../bundled-programs.ts';
import { createLine, open } from '../cli-fixture.ts';
import { lacks, needs } from '../skip-without-programs.ts';
import { type AgentHandle, startFarhand, type TestSystem, temporaryFolder } from '../start-farhand.ts';
import { startProxy } from '../tcp-proxy.ts';
import { waitFor } from '../wait-for.ts';

const main = shippedProgram('farhand');
async function startScene(): Promise<{ system: TestSystem; agent: AgentHandle }> {
  const system = await startFarhand();
  return { system, agent: await system.agent({ name: 'web-1' }) };
}

/** Opens a pipe that nothing reads from. */
function pipeWithoutReader(): number {
  const path = join(temporaryFolder('pipe'), 'fifo');
  execFileSync('mkfifo', [path]);
  const pipe = openSync(path, constants.O_RDWR | constants.O_NONBLOCK);
  onTestFinished(() => closeSync(pipe));
  return pipe;
}

// ---- Terminals over the SDK

/** Starts a session in an xterm, with a shell that reads no settings of the user. */
async function startScreen({ system, agent }: { system: TestSystem; agent: AgentHandle }, command: string[]) {
  const { client } = system;
  const [shell = '', ...args] = command;
  const { session_id } = await client.sessions.create({ machine_id: agent.machineId, shell, args });
  const terminal = await client.sessions.terminal(await client.sessions.attach({ session_id }));
  const screen = new Screen({ cols: terminal.cols, rows: terminal.rows, allowProposedApi: true });
  onTestFinished(() => {
    terminal.detach();
    screen.dispose();
  });
  screen.onData((data) => void terminal.write(data));
  screen.onResize(({ cols, rows }) => terminal.resize(cols, rows));
  void show(terminal, screen);
  const lines = (): string[] =>
    Array.from({ length: screen.rows }, (_, row) =>
      (
        screen.buffer.active.getLine(screen.buffer.active.baseY + row)?.translateToString(true) ?? ''
      ).trimEnd(),
    );
  return {
    terminal,
    screen,
    lines,
    sees: (look: (lines: string[]) => void) => waitFor(() => look(lines())),
  };
}

async function show(terminal: Terminal, screen: Screen): Promise<void> {
  for await (const bytes of terminal.output) await new Promise<void>((done) => screen.write(bytes, done));
}

const wide = 'naïve 漢字 ✓ Ελλάδα';

describe('over an attach', () => {
  needs('vim')('vim draws, follows the size of the window, and writes what was typed', async () => {
    const file = join(temporaryFolder('vim'), 'text');
    writeFileSync(file, `${wide}\nsecond\n`);
    const { terminal, screen, sees } = await startScreen(await startScene(), [
      'vim',
      '-u',
      'NONE',
      '-N',
      file,
    ]);
    await sees((lines) => {
      expect(lines.slice(0, 3)).toEqual([wide, 'second', '~']);
      expect(lines[22]).toBe('~');
      expect(lines[23]).toContain('text');
    });
    screen.resize(60, 12);
    await sees((lines) => expect(lines.slice(0, 11)).toEqual([wide, 'second', ...Array(9).fill('~')]));
    void terminal.write('o日本語 typed\x1b:wq\r');
    expect(await terminal.ended).toMatchObject({ why: 'ended', exit_code: 0 });
    expect(readFileSync(file, 'utf8')).toBe(`${wide}\n日本語 typed\nsecond\n`);
  });

  needs('less')('less draws a page, and the next one after a key', async () => {
    const file = join(temporaryFolder('less'), 'text');
    writeFileSync(file, Array.from({ length: 100 }, (_, line) => `${line} ${wide}\n`).join(''));
    const { terminal, sees } = await startScreen(await startScene(), ['less', file]);
    const page = (from: number) => Array.from({ length: 23 }, (_, line) => `${from + line} ${wide}`);
    await sees((lines) => expect(lines.slice(0, 23)).toEqual(page(0)));
    void terminal.write(' ');
    await sees((lines) => expect(lines.slice(0, 23)).toEqual(page(23)));
    void terminal.write('q');
    expect(await terminal.ended).toMatchObject({ why: 'ended', exit_code: 0 });
  });

  needs('top')(
    'top draws its table over the whole window, before and after the window is resized',
    async () => {
      const { terminal, screen, sees } = await startScreen(await startScene(), ['top', '-d', '1']);
      const table = (lines: string[]): void => {
        expect(lines[0]).toMatch(/^top - /);
        expect(lines.find((line) => line.includes('PID'))).toMatch(/PID USER .*COMMAND/);
      };
      await sees(table);
      screen.resize(100, 40);
      await sees((lines) => {
        table(lines);
        expect(lines).toHaveLength(40);
      });
      void terminal.write('q');
      expect(await terminal.ended).toMatchObject({ why: 'ended', exit_code: 0 });
    },
  );

  test('two clients see the same terminal; input of an observer is refused; a detached client is notified', async () => {
    const { system, agent } = await startScene();
    const { client } = system;
    const { session_id } = await client.sessions.create({ machine_id: agent.machineId, shell: '/bin/cat' });
    const operator = await client.sessions.terminal(await client.sessions.attach({ session_id }));
    const refusals: string[] = [];
    const attached = await client.sessions.attach({ session_id, mode: 'observer' });
    const observer = await client.sessions.terminal(attached, {
      onNote: (note) => void (note.type === 'refused' && refusals.push(note.message)),
    });
    void observer.write('by the observer\n');
    void operator.write('by the operator\n');
    let seen = '';
    for await (const bytes of observer.output) {
      seen += Buffer.from(bytes).toString();
      if (seen.includes('by the operator')) break;
    }
    expect(seen).not.toContain('by the observer');
    await waitFor(() => expect(refusals).toHaveLength(1));
    await client.sessions.detach({ session_id, client_id: observer.client_id });
    expect(await observer.ended).toEqual({ why: 'detached' });
    await client.sessions.end({ session_id });
    expect(await operator.ended).toMatchObject({ why: 'ended' });
  });
});

// ---- farhand shell through pipes

interface Ended {
  code: number | null;
  stdout: string;
  stderr: string;
}

function environment({ url, key }: Pick<TestSystem, 'url' | 'key'>): NodeJS.ProcessEnv {
  return {
    PATH: process.env.PATH,
    HOME: '/nowhere',
    XDG_CACHE_HOME: shipped,
    FARHAND_URL: url,
    FARHAND_API_KEY: key,
  };
}

async function farhand(env: NodeJS.ProcessEnv, args: string[], input = ''): Promise<Ended> {
  const child = spawn(process.execPath, [main, ...args], { env });
  onTestFinished(() => void child.kill('SIGKILL'));
  const said = { stdout: '', stderr: '' };
  for (const name of ['stdout', 'stderr'] as const) {
    child[name].setEncoding('utf8').on('data', (text: string) => {
      said[name] += text;
    });
  }
  child.stdin.end(input);
  const [code] = await once(child, 'close');
  return { code, ...said };
}

describe('through pipes, farhand shell', () => {
  test('reports what is wrong: no machine, an unknown one, an unknown session, two with the same name', async () => {
    const { system } = await startScene();
    const twins = [await system.agent({ name: 'twin' }), await system.agent({ name: 'twin' })];
    const cases: [string[], number, RegExp][] = [
      [['shell'], 2, /choose either a machine or an open session/],
      [['shell', 'web-1', '--session', 'sess_x'], 2, /choose either/],
      [['shell', 'web-1', '--observe'], 2, /--observe needs a session/],
      [['shell', 'web'], 1, /no machine is named web; names: \w/],
      [['shell', 'mach_none'], 1, /no machine is named mach_none/],
      [['shell', '--session', 'sess_none'], 1, /no session has the id sess_none/],
      [['shell', 'twin'], 1, new RegExp(twins.map(({ machineId }) => machineId).join('|'))],
    ];
    const answers = await Promise.all(cases.map(([args]) => farhand(environment(system), args)));
    for (const [at, [args, code, text]] of cases.entries()) {
      expect([args, answers[at]?.code]).toEqual([args, code]);
      expect(answers[at]?.stderr).toMatch(text);
      expect(answers[at]?.stderr).not.toContain('    at ');
    }
  });

  test('sends its input, prints the output and exits with the code of the shell', async () => {
    const { system, agent } = await startScene();
    const input = 'echo $((6 * 7)) 漢字\nexit 3\n';
    const { code, stdout } = await farhand(environment(system), ['shell', agent.machineId], input);
    expect([code, stdout]).toEqual([3, expect.stringContaining('42 漢字')]);
  });

  test.each([
    ['without exit', 'sleep 0.3; echo $((6 * 7))\n', '42'],
    ['whose last line has no end', 'echo $((6 * 7))', '42'],
    ['that is empty', '', ''],
  ])('ends with input %s', async (_what, input, output) => {
    const { system } = await startScene();
    const { code, stdout } = await farhand(environment(system), ['shell', 'web-1'], input);
    expect([code, stdout]).toEqual([0, expect.stringContaining(output)]);
  });

  test('exits when the reader of its output leaves', async () => {
    const { system, agent } = await startScene();
    const { session_id } = await system.client.sessions.create({
      machine_id: agent.machineId,
      shell: '/bin/sh',
      args: ['-c', 'while sleep 0.05; do echo line; done'],
    });
    const child = spawn(process.execPath, [main, 'shell', '--session', session_id, '--observe'], {
      env: environment(system),
      stdio: ['ignore', 'pipe', 'ignore'],
    });
    onTestFinished(() => void child.kill('SIGKILL'));
    await once(child.stdout, 'data');
    child.stdout.destroy();
    const [code] = await once(child, 'exit');
    expect(code).toBe(141);
    await system.client.sessions.end({ session_id });
  });

  test('ends on a signal although the reader of its output reads nothing', async () => {
    const { system, agent } = await startScene();
    const { client } = system;
    const { session_id } = await client.sessions.create({
      machine_id: agent.machineId,
      shell: '/usr/bin/yes',
    });
    const pipe = pipeWithoutReader();
    const child = spawn(process.execPath, [main, 'shell', '--session', session_id, '--observe'], {
      env: environment(system),
      stdio: ['ignore', pipe, 'ignore'],
    });
    onTestFinished(() => void child.kill('SIGKILL'));
    await waitFor(() => expect(() => writeSync(pipe, 'x')).toThrow('EAGAIN'));
    child.kill('SIGTERM');
    expect(await once(child, 'exit')).toEqual([null, 'SIGTERM']);
    await client.sessions.end({ session_id });
  });

  test('works over the socket file on the broker’s own machine, and so do the verbs list and end', async () => {
    const { system } = await startScene();
    const local = { PATH: process.env.PATH, HOME: '/nowhere', FARHAND_DATA_DIR: system.dataDir };
    const { code } = await farhand(local, ['shell', 'web-1'], 'exit 4\n');
    expect(code).toBe(4);
    const machine_id = (await system.client.machines.list()).items[0]?.id ?? '';
    const { session_id } = await system.client.sessions.create({ machine_id, shell: '/bin/cat' });
    const list = await farhand(local, ['sessions', 'list']);
    expect(list).toMatchObject({
      code: 0,
      stdout: expect.stringMatching(new RegExp(`^${session_id}  CONNECTED +web-1 `, 'm')),
    });
    // The list has a line of titles and one for the session.
    expect(list.stdout.trim().split('\n')).toHaveLength(2);
    // Adds 100 later copies of each ended session. The open session must still be listed and found.
    const history = new DatabaseSync(join(system.dataDir, 'history.db'));
    history.exec(`WITH RECURSIVE count (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM count WHERE n < 100)
      INSERT INTO sessions SELECT id || n, machine_id, machine_hostname, shell, status, created_at + 60000, connected_at,
        last_heartbeat_at, grace_period, grace_period_started_at, ended_at, exit_code, signal, reason, cols, rows,
        requested_by, instance_id, ending, sent_to FROM sessions, count WHERE ended_at IS NOT NULL`);
    history.close();
    const listed: unknown = JSON.parse((await farhand(local, ['sessions', 'list', '-o', 'json'])).stdout);
    expect(listed).toEqual([expect.objectContaining({ session_id })]);
    const ended = await farhand(local, ['sessions', 'end', session_id, '-o', 'json']);
    expect(JSON.parse(ended.stdout)).toMatchObject({ session_id, status: 'DISCONNECTED' });
  });
});

test.each(['shell --session', 'sessions attach'])(
  'farhand %s ends on a signal over a connection that no longer answers',
  async (verb) => {
    const { system, agent } = await startScene();
    const { session_id } = await system.client.sessions.create({
      machine_id: agent.machineId,
      shell: '/bin/sh',
    });
    const proxy = await startProxy(new URL(system.url).host);
    const line = createLine({ ...system, url: `http://${proxy.address}` });
    const running = line.start(verb, [session_id], { input: open });
    await running.says(/[$#] $/);
    proxy.stall();
    running.child.kill('SIGTERM');
    expect((await running.ended).code).toBe(143);
  },
);

// ---- farhand shell in a terminal

/** Starts tmux with a plain shell. The test ends it. */
function startTmux(env: NodeJS.ProcessEnv) {
  const folder = temporaryFolder('tmux');
  const tmux = (...args: string[]): string =>
    execFileSync('tmux', ['-S', join(folder, 'socket'), '-f', '/dev/null', '-u', ...args], {
      env: { ...env, HOME: folder, PS1: 'local$ ', LANG: 'C.UTF-8' },
      encoding: 'utf8',
    });
  onTestFinished(() => void tmux('kill-server'));
  tmux('new-session', '-d', '-x', '100', '-y', '30', '-c', folder, 'stty -g > before; exec sh');
  const lines = (): string[] => tmux('capture-pane', '-p').trimEnd().split('\n');
  return {
    type: (...keys: string[]) => void tmux('send-keys', ...keys),
    line: (text: string) => void tmux('send-keys', '-l', `${text}\n`),
    shell: (rest: string) => void tmux('send-keys', '-l', `${process.execPath} ${main} shell ${rest}\n`),
    resize: (x: number, y: number) => void tmux('resize-window', '-x', String(x), '-y', String(y)),
    /** Returns the pid of the program that the shell is waiting for. */
    child: () => {
      const shell = tmux('display-message', '-p', '#{pane_pid}').trim();
      return Number(readFileSync(`/proc/${shell}/task/${shell}/children`, 'utf8').trim());
    },
    closeWindow(): void {
      tmux('new-window');
      tmux('kill-window', '-t', ':0');
    },
    lines,
    mode: (what: string) => tmux('display-message', '-p', `#{${what}}`).trim(),
    sees: (look: (lines: string[]) => void) => waitFor(() => look(lines())),
    says: (text: string | RegExp) => waitFor(() => expect(lines().join('\n')).toMatch(text)),
  };
}

/** Expects that the terminal has its line settings, screen, cursor and mouse mode back. */
async function restored(tmux: ReturnType<typeof startTmux>): Promise<void> {
  tmux.line('clear; stty -g | cmp - before && echo as "it was"');
  await tmux.says(/^as it was$/m);
  const modes = ['alternate_on', 'cursor_flag', 'mouse_any_flag'].map((mode) => tmux.mode(mode));
  expect(modes).toEqual(['0', '1', '0']);
}

describe('in tmux, farhand shell', () => {
  needs('tmux', 'vim')(
    'draws vim, follows the window size, keeps wide characters, and exits with the code of the shell',
    async () => {
      const { system } = await startScene();
      const file = join(temporaryFolder('vim'), 'text');
      writeFileSync(file, `${wide}\nsecond\n`);
      const tmux = startTmux(environment(system));
      tmux.shell('web-1; echo "code $?"');
      await tmux.says(/Ctrl-\] detaches/);
      tmux.line('PS1="far> "; clear; stty size');
      await tmux.says(/^30 100\nfar>/m);
      tmux.line(`vim -u NONE -N ${file}`);
      await tmux.sees((lines) =>
        expect([lines[0], lines[28], lines[29]]).toEqual([
          wide,
          '~',
          expect.stringContaining(file.slice(0, 20)),
        ]),
      );
      tmux.resize(70, 15);
      await tmux.sees((lines) =>
        expect(lines.slice(0, 14)).toEqual([wide, 'second', ...Array(12).fill('~')]),
      );
      tmux.type('o');
      tmux.type('-l', '日本語');
      tmux.type('Escape');
      await tmux.sees((lines) => expect(lines[1]).toBe('日本語'));
      tmux.line(':wq');
      await waitFor(() => expect(readFileSync(file, 'utf8')).toBe(`${wide}\n日本語\nsecond\n`));
      await tmux.says(/far> $|far>$/m);
      // Ctrl-C reaches the remote terminal even during much output.
      tmux.line('yes 漢字');
      await tmux.sees((lines) => expect(new Set(lines.slice(0, 14))).toEqual(new Set(['漢字'])));
      tmux.type('C-c');
      await tmux.sees((lines) => expect(lines.at(-1)).toBe('far>'));
      tmux.line('exit 7');
      await tmux.says(/^code 7$/m);
      await restored(tmux);
    },
  );

  needs('tmux', 'vim')(
    'Ctrl-] detaches and restores the terminal, the session stays open and is attached to again',
    async () => {
      const { system } = await startScene();
      const tmux = startTmux(environment(system));
      tmux.shell('web-1; echo "code $?"');
      await tmux.says(/Ctrl-\] detaches/);
      tmux.line('exec vim -u NONE -N -c "set mouse=a"');
      await tmux.says(/^~$/m);
      tmux.type('C-]');
      await tmux.says(/detached: the session stays open[\s\S]*code 0/);
      await restored(tmux);
      const { items } = await system.client.sessions.list({ status: 'CONNECTED' });
      const session = items[0]?.session_id ?? '';
      tmux.shell(`--session ${session}; echo "code $?"`);
      await tmux.says(/^~$/m);
      tmux.line(':cq');
      await tmux.says(/^code 1$/m);
      await restored(tmux);
    },
  );

  needs('tmux')('a window that is closed leaves its session running', async () => {
    const { system } = await startScene();
    const tmux = startTmux(environment(system));
    tmux.shell('web-1');
    await tmux.says(/Ctrl-\] detaches/);
    const pid = tmux.child();
    tmux.closeWindow();
    await waitFor(() => expect(existsSync(`/proc/${pid}`)).toBe(false));
    await waitFor(async () => {
      const { items } = await system.client.sessions.list();
      expect(items.map(({ status, attached_count }) => [status, attached_count])).toEqual([['CONNECTED', 0]]);
    });
  });

  needs('tmux', 'vim')(
    'attaches again after the connection broke, and the program draws its screen again',
    async () => {
      const { tmux, proxy } = await vimBehindProxy();
      proxy.forbid();
      await tmux.says(/the connection broke: attaching again/);
      proxy.allow();
      await tmux.sees((lines) => expect(lines.slice(1, 29)).toEqual(Array(28).fill('~')));
      tmux.type('-l', 'iback');
      await tmux.sees((lines) => expect(lines[0]).toBe('back'));
      tmux.type('Escape');
      tmux.line(':cq');
      await tmux.says(/^code 1$/m);
      await restored(tmux);
    },
  );

  needs('tmux', 'vim')('ends if its session has ended while the connection was broken', async () => {
    const { system, tmux, proxy } = await vimBehindProxy();
    proxy.forbid();
    await tmux.says(/attaching again/);
    const { items } = await system.client.sessions.list({ status: 'CONNECTED' });
    await system.client.sessions.end({ session_id: items[0]?.session_id ?? '' });
    proxy.allow();
    await tmux.says(/session sess_\w+ has ended[\s\S]*code 1/);
    await restored(tmux);
  });

  test.skipIf(lacks('tmux', 'vim')).each([
    ['the broker stops', 'stop', /the broker is stopping, or another broker .*; the session stays open/],
    ['the connection breaks', 'cut', /the connection broke; the session stays open/],
    ['it is ended by a signal', 'kill', /code 143/],
  ])('restores the terminal when %s and the user leaves (needs tmux, vim)', async (_what, how, received) => {
    const { system, tmux, proxy } = await vimBehindProxy();
    if (how === 'kill') process.kill(tmux.child(), 'SIGTERM');
    else {
      if (how === 'stop') void system.broker.close();
      else proxy.forbid();
      await tmux.says(/attaching again; Ctrl-] leaves/);
      tmux.type(how === 'stop' ? 'C-]' : 'C-c');
    }
    await tmux.says(received);
    await restored(tmux);
  });
});

/** Starts vim in `farhand shell` in tmux, with a proxy between farhand and the broker. */
async function vimBehindProxy() {
  const { system } = await startScene();
  const proxy = await startProxy(new URL(system.url).host);
  onTestFinished(() => proxy.close());
  const tmux = startTmux(environment({ ...system, url: `http://${proxy.address}` }));
  tmux.shell('web-1; echo "code $?"');
  await tmux.says(/Ctrl-\] detaches/);
  tmux.line('exec vim -u NONE -N -c "set mouse=a"');
  await tmux.says(/^~$/m);
  return { system, proxy, tmux };
}
