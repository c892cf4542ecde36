// The real programs as processes: their command lines, one broker per data directory, and how they end.

import { type ChildProcess, execFileSync, spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import {
  chownSync,
  existsSync,
  readdirSync,
  readFileSync,
  statSync,
  truncateSync,
  writeFileSync,
} from 'node:fs';
import { readFile } from 'node:fs/promises';
import { connect, createServer } from 'node:net';
import { join } from 'node:path';
import { describe, expect, onTestFinished, test } from 'vitest';
import { withSocket } from '../../broker/cli/call-or-start-local-broker.ts';
import { openState } from '../../broker/state/index.ts';
import { takeDirectory } from '../../shared/directory-lock.ts';
import { Farhand } from '../../shared/sdk/index.ts';
import { shipped, shippedProgram } from '../bundled-programs.ts';
import { call, startFarhand, temporaryFolder } from '../start-farhand.ts';
import { waitFor } from '../wait-for.ts';

const mains = {
  broker: shippedProgram('farhand-broker'),
  agent: shippedProgram('farhand-agent'),
  cli: shippedProgram('farhand'),
  /** The CLI as it runs from a checkout. There it advises how to start an agent from the checkout. */
  cliSource: join(import.meta.dirname, '../../broker/cli/main.ts'),
};

const { PATH, NODE_COMPILE_CACHE } = process.env;

type Environment = Record<string, string | undefined>;

interface Ending {
  code: number | null;
  signal: NodeJS.Signals | null;
  stdout: string;
  stderr: string;
}

interface Running {
  child: ChildProcess;
  /** Resolves when the process has ended and all of its output is read. */
  ended: Promise<Ending>;
  /** Resolves with the first match on standard error. Rejects if the program ends without a match. */
  said(pattern: RegExp): Promise<RegExpExecArray>;
}

/** Starts a program with its own environment. It is killed at the end of the test if it still runs. */
function start(program: keyof typeof mains, args: string[], env: Environment = {}): Running {
  const child = spawn(process.execPath, [mains[program], ...args], {
    env: { PATH, NODE_COMPILE_CACHE, HOME: temporaryFolder('home'), XDG_CACHE_HOME: shipped, ...env },
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  onTestFinished(() => void child.kill('SIGKILL'));
  const output = { stdout: '', stderr: '' };
  const lookers = new Set<() => void>();
  for (const name of ['stdout', 'stderr'] as const) {
    child[name].setEncoding('utf8').on('data', (text: string) => {
      output[name] += text;
      for (const look of lookers) look();
    });
  }
  const ended = new Promise<Ending>((resolve) => {
    child.once('close', (code, signal) => resolve({ code, signal, ...output }));
  });
  return {
    child,
    ended,
    said: (pattern) =>
      new Promise((resolve, reject) => {
        const look = (): void => {
          const match = pattern.exec(output.stderr);
          if (match) resolve(match);
        };
        lookers.add(look);
        look();
        void ended.then(() => reject(new Error(`ended without ${pattern}: ${output.stderr}`)));
      }),
  };
}

const run = (program: keyof typeof mains, args: string[], env: Environment = {}): Promise<Ending> =>
  start(program, args, env).ended;

interface RunningBroker extends Running {
  dataDir: string;
  url: string;
  grpc: string;
}

const isUp = /"http":"([^"]+)","grpc":"([^"]+)"/;

async function startBroker(dataDir = temporaryFolder('broker')): Promise<RunningBroker> {
  const free = ['--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0'];
  const running = start('broker', ['--data-dir', dataDir, ...free]);
  const [, url = '', grpc = ''] = await running.said(isUp);
  await fetch(`${url}/readyz`);
  return { ...running, dataDir, url, grpc };
}

async function json<T>(args: string[], env: Environment = {}): Promise<T> {
  const { code, stdout, stderr } = await run('cli', [...args, '-o', 'json'], env);
  expect([code, stderr.replace(/^farhand: creating the data directory of a new broker: .*\n/, '')]).toEqual([
    0,
    '',
  ]);
  return JSON.parse(stdout) as T;
}

const createKey = (dataDir: string, ...more: string[]) =>
  json<{ id: string; key: string; name: string; scopes: string[] }>([
    ...['auth', 'create-key', '--data-dir', dataDir],
    ...more,
  ]);

interface JoinToken {
  id: string;
  token: string;
  name: string | null;
  uses: number;
  tags: string[] | null;
  created_at: string;
  expires_at: string;
}

const me = (url: string, key: string) => call(`${url}/api/v1/auth/me`, 'GET', { key });

/** Returns the pids of processes with a text in their arguments. */
function processesWith(text: string): string[] {
  return readdirSync('/proc')
    .filter((name) => /^\d+$/.test(name))
    .filter((pid) => {
      try {
        return readFileSync(`/proc/${pid}/cmdline`, 'utf8').includes(text);
      } catch {
        return false;
      }
    });
}

/** Sends signals to a program. Resolves with its end and the milliseconds until then. */
async function stop({ child, ended }: Running, ...signals: NodeJS.Signals[]): Promise<[Ending, number]> {
  const asked = performance.now();
  for (const signal of signals.length > 0 ? signals : (['SIGTERM'] as const)) child.kill(signal);
  return [await ended, performance.now() - asked];
}

/** Starts a real agent. Resolves when it is linked. */
async function startAgent(broker: RunningBroker): Promise<Running & { dataDir: string; machineId: string }> {
  const { token } = await json<JoinToken>(['join-tokens', 'create', '--data-dir', broker.dataDir]);
  const dataDir = temporaryFolder('agent');
  const args = ['--broker', broker.grpc, '--data-dir', dataDir, '--join-token', token];
  const running = start('agent', args);
  await running.said(/"msg":"linked"/);
  const identity = JSON.parse(readFileSync(join(dataDir, 'identity.json'), 'utf8')) as { machine_id: string };
  return { ...running, dataDir, machineId: identity.machine_id };
}

// ---- The command line

describe('the command line ends', () => {
  test.each([
    ['an unknown scope', ['auth', 'create-key', '--scopes', 'machines:read,root'], 'There is no scope root'],
    ['no scope at all', ['auth', 'create-key', '--scopes', ''], 'There is no scope'],
    ['a time that is no duration', ['join-tokens', 'create', '--expires-in', 'soon'], "'soon' is invalid"],
    ['a key that expires at once', ['auth', 'create-key', '--expires-in', '0s'], 'longer than 0'],
    ['a new secret for no time', ['auth', 'rotate-key', 'key_a', '--expires-in', '0s'], 'longer than 0'],
    ['a key valid for no time', ['auth', 'create-key', '--expires', '0s'], 'longer than 0'],
    ['a count that is no number', ['join-tokens', 'create', '--uses', 'many'], "'many' is invalid"],
  ])('with 2 for %s, and starts nothing', async (_what, args, part) => {
    const dataDir = temporaryFolder('broker');
    const { code, stdout, stderr } = await run('cli', [...args, '--data-dir', dataDir]);
    expect([code, stdout, stderr]).toEqual([2, '', expect.stringContaining(part)]);
    expect(readdirSync(dataDir)).toEqual([]);
  });

  test.each<[string, Environment, string]>([
    ['neither a URL nor a key', {}, 'FARHAND_URL'],
    ['a URL without a key', { FARHAND_URL: 'http://127.0.0.1:1' }, 'farhand login http://127.0.0.1:1'],
    ['a key without a URL', { FARHAND_API_KEY: 'x' }, 'FARHAND_URL'],
  ])('with 78 and a line that helps when the environment has %s', async (_what, env, part) => {
    const { code, stdout, stderr } = await run('cli', ['auth', 'create-key'], env);
    expect([code, stdout, stderr.trimEnd().split('\n').length]).toEqual([78, '', 1]);
    for (const text of [part, 'FARHAND_API_KEY', '--data-dir']) expect(stderr).toContain(text);
  });

  test('with 1 and a line that names the broker when it does not answer', async () => {
    const env = { FARHAND_URL: 'http://127.0.0.1:1', FARHAND_API_KEY: 'service_apikey_x' };
    const { code, stdout, stderr } = await run('cli', ['auth', 'create-key'], env);
    expect([code, stdout, stderr.trimEnd().split('\n').length]).toEqual([1, '', 2]);
    expect(stderr).toMatch(/^farhand: .*http:\/\/127.0.0.1:1.*\nRun farhand doctor to find out why.\n$/);
    expect(stderr).not.toContain('TypeError');
  });

  test('with 1 and the broker’s message when it refuses, without the key', async () => {
    const system = await startFarhand();
    const limited = await system.keyed(['machines:read']);
    for (const [key, code_] of [
      ['service_apikey_wrong', 'unauthorized'],
      [limited.key, 'forbidden'],
    ] as const) {
      const env = { FARHAND_URL: system.url, FARHAND_API_KEY: key };
      const { code, stdout, stderr } = await run('cli', ['auth', 'create-key'], env);
      expect([code, stdout]).toEqual([1, '']);
      expect(stderr).toMatch(
        new RegExp(`^farhand: .* \\(${code_}, request req_\\w+\\)\\n.*farhand (login|whoami)`),
      );
      expect(stderr).not.toContain(key);
    }
  });

  test('with an error that says how to recover when the broker’s state is damaged', async () => {
    const dataDir = temporaryFolder('broker');
    await createKey(dataDir);
    truncateSync(join(dataDir, 'state.json'));
    const args = ['auth', 'create-key', '--data-dir', dataDir];
    const { code, stdout, stderr } = await run('cli', args);
    expect([code, stdout]).toEqual([expect.any(Number), '']);
    expect(code).not.toBe(0);
    expect(stderr).toContain(`cp -p ${dataDir}/state.json.last ${dataDir}/state.json`);
    expect(processesWith(dataDir)).toEqual([]);
  });
});

test('a data directory that was mistyped does not become a broker', async () => {
  const [none, other] = [join(temporaryFolder('none'), 'none'), temporaryFolder('other')];
  writeFileSync(join(other, 'notes'), 'mine');
  const answers = await Promise.all([
    run('cli', ['machines', 'list', '--data-dir', none]),
    run('cli', ['broker', 'backup', '--data-dir', none, '--to', `${none}-copy`]),
    run('cli', ['auth', 'create-key', '--data-dir', other]),
  ]);
  for (const { code, stderr } of answers)
    expect([code, stderr]).toEqual([78, expect.stringContaining('does not contain a broker’s data')]);
  expect([existsSync(none), existsSync(`${none}-copy`), readdirSync(other)]).toEqual([
    false,
    false,
    ['notes'],
  ]);
});

test('a broker that hangs is reported, and no other is started beside it', async () => {
  const dataDir = temporaryFolder('stuck');
  const server = createServer(() => {}).listen(join(dataDir, 'broker.sock'));
  await once(server, 'listening');
  onTestFinished(() => void server.close());
  const asked = withSocket(dataDir, (client) => client.keys.me(), { answerMs: 50 });
  await expect(asked).rejects.toThrow('runs, but does not answer');
  expect(processesWith(dataDir)).toEqual([]);
});

test('a broker that the command line has started ends with it, also if it is killed', async () => {
  const { dataDir, ...first } = await startBroker();
  await stop(first, 'SIGTERM');
  for (const signal of ['SIGTERM', 'SIGKILL'] as const) {
    const following = start('cli', ['events', '--follow', '--data-dir', dataDir]);
    await waitFor(() => expect(existsSync(join(dataDir, 'broker.sock'))).toBe(true));
    following.child.kill(signal);
    await waitFor(() => expect(existsSync(join(dataDir, 'broker.sock'))).toBe(false));
  }
});

test('the command line waits, up to a timeout, for a broker that has its directory and does not listen yet', async () => {
  const { dataDir, ...first } = await startBroker();
  await stop(first, 'SIGTERM');
  const release = takeDirectory(dataDir, 'broker');
  const asked = withSocket(dataDir, (client) => client.keys.me(), { startMs: 0 });
  await expect(asked).rejects.toThrow(
    `a broker uses ${dataDir}, but still does not listen after 0 s; see systemctl`,
  );
  const waiting = start('cli', ['auth', 'list-keys', '--data-dir', dataDir]);
  await waiting.said(/waiting for the broker/);
  release();
  const { code, stderr } = await waiting.ended;
  expect([code, stderr]).toEqual([0, expect.stringMatching(/^farhand: waiting for the broker on .*\n$/)]);
});

test.skipIf(process.getuid?.() !== 0)(
  'the error about a data directory of another user names that user',
  async () => {
    const dataDir = temporaryFolder('foreign');
    chownSync(dataDir, 65_534, 65_534);
    const drop = ['--reuid=12345', '--clear-groups', process.execPath, mains.cli];
    const received = ['machines list', 'auth create-key', 'doctor'].map((verb) => {
      const args = [...drop, ...verb.split(' '), '--data-dir', dataDir];
      return spawnSync('setpriv', args, { encoding: 'utf8', env: { PATH: process.env.PATH, HOME: '/' } });
    });
    for (const { status, stdout, stderr } of received)
      expect([status, `${stdout}${stderr}`]).toEqual([
        1,
        expect.stringMatching(/belongs to nobody; run the same command with sudo/),
      ]);
  },
);

describe('farhand auth create-key', () => {
  test('uses the running broker of the directory, where the key works at once', async () => {
    const broker = await startBroker();
    const made = await createKey(broker.dataDir, '--name', 'ci', '--scopes', 'files:read, machines:read');
    expect(made).toMatchObject({ name: 'ci', scopes: ['files:read', 'machines:read'] });
    expect((await me(broker.url, made.key)).body.data).toMatchObject({ id: made.id, name: 'ci' });
    expect(existsSync(join(broker.dataDir, 'broker.sock'))).toBe(true);
  });

  test('without a broker starts one temporarily, and leaves no process and no socket behind', async () => {
    const dataDir = join(temporaryFolder('broker'), 'new');
    const [first, second] = [await createKey(dataDir), await createKey(dataDir)];
    expect(first).toMatchObject({ name: 'cli', scopes: ['admin'] });
    expect(processesWith(dataDir)).toEqual([]);
    expect(readdirSync(dataDir).sort()).toEqual([
      'authority.json',
      'history.db',
      'lock.db',
      'state.json',
      'state.json.last',
      'webhooks.key',
    ]);
    const broker = await startBroker(dataDir);
    for (const { id, key } of [first, second]) {
      expect((await me(broker.url, key)).body.data).toMatchObject({ id, scopes: ['admin'] });
    }
  });

  test('ignores the socket file of a killed broker', async () => {
    const broker = await startBroker();
    await stop(broker, 'SIGKILL');
    expect(existsSync(join(broker.dataDir, 'broker.sock'))).toBe(true);
    await createKey(broker.dataDir);
    expect(existsSync(join(broker.dataDir, 'broker.sock'))).toBe(false);
  });

  test('prints only the key on standard output, for a file or a variable', async () => {
    const { code, stdout, stderr } = await run('cli', [
      ...['auth', 'create-key', '--data-dir', temporaryFolder('broker')],
    ]);
    expect([code, stdout]).toEqual([0, expect.stringMatching(/^service_apikey_[0-9A-Za-z]{43}\n$/)]);
    expect(stderr).toMatch(/^Store this key now/m);
  });

  const otherUid = 65_534;
  const readable = spawnSync(process.execPath, [mains.broker, '--version'], { uid: otherUid });

  test.runIf(process.getuid?.() === 0 && readable.status === 0)(
    'as root makes nothing that the owner of the directory could not use',
    async () => {
      const dataDir = temporaryFolder('broker');
      chownSync(dataDir, otherUid, otherUid);
      await createKey(dataDir);
      for (const name of readdirSync(dataDir)) {
        const { uid, gid } = statSync(join(dataDir, name));
        expect([name, uid, gid]).toEqual([name, otherUid, otherUid]);
      }
    },
  );
});

describe('farhand join-tokens create', () => {
  test('creates a token with which a real agent joins', async () => {
    const broker = await startBroker();
    const made = await json<JoinToken>([
      ...['join-tokens', 'create', '--data-dir', broker.dataDir],
      ...['--name', 'rack', '--uses', '2', '--tags', 'prod,eu', '--expires-in', '30m'],
    ]);
    expect(made).toMatchObject({ name: 'rack', uses: 2, tags: ['prod', 'eu'] });
    expect(Date.parse(made.expires_at) - Date.parse(made.created_at)).toBeLessThan(1_801_000);
    const args = ['--broker', broker.grpc, '--data-dir', temporaryFolder('agent'), '--name', 'web-1'];
    const agent = start('agent', args, { FARHAND_JOIN_TOKEN: made.token });
    await agent.said(/"msg":"linked"/);
    const { key } = await createKey(broker.dataDir);
    const { items } = await new Farhand({ baseUrl: broker.url, apiKey: key }).machines.list();
    expect(items).toMatchObject([{ name: 'web-1', tags: ['prod', 'eu'], status: 'online' }]);
  });

  test('names the address for agents that the broker announces, unless it has no host that a client can use', async () => {
    const advised = async (announced: string): Promise<string> => {
      const { url, key } = await startFarhand({ flags: ['--public-grpc', announced] });
      const env = { FARHAND_URL: url, FARHAND_API_KEY: key };
      return (await run('cliSource', ['join-tokens', 'create', '--name', 'web 1'], env)).stderr;
    };
    expect(await advised('127.7.0.9:8421')).toContain(
      "agent/main.ts --broker 127.7.0.9:8421 --join-token-file FILE --name 'web 1'",
    );
    expect(await advised('0.0.0.0:9421')).toContain('agent/main.ts --broker 127.0.0.1:9421 ');
  });

  test('without a broker creates a token that a later broker accepts', async () => {
    const dataDir = temporaryFolder('broker');
    const { token } = await json<JoinToken>(['join-tokens', 'create', '--data-dir', dataDir]);
    expect(processesWith(dataDir)).toEqual([]);
    const system = await startFarhand({ dataDir });
    await system.agent({ joinToken: token });
  });
});

describe('the command line finds its broker', () => {
  test('by FARHAND_URL with FARHAND_API_KEY, from any machine', async () => {
    const system = await startFarhand();
    const env = { FARHAND_URL: `${system.url}/`, FARHAND_API_KEY: system.key };
    const { key } = await json<{ key: string }>(['auth', 'create-key'], env);
    expect((await me(system.url, key)).status).toBe(200);
    const { token } = await json<JoinToken>(['join-tokens', 'create'], env);
    await system.agent({ joinToken: token });
  });

  test('by --data-dir first, then FARHAND_URL, then FARHAND_DATA_DIR', async () => {
    const [a, b] = [await startFarhand(), await startFarhand()];
    const overHttp = { FARHAND_URL: a.url, FARHAND_API_KEY: a.key };
    const made = async (args: string[], env: Environment): Promise<string> => {
      const { key } = await json<{ key: string }>(['auth', 'create-key', ...args], env);
      return (await me(a.url, key)).status === 200 ? 'a' : (await me(b.url, key)).status === 200 ? 'b' : '';
    };
    expect(await made(['--data-dir', b.dataDir], overHttp)).toBe('b');
    expect(await made([], { ...overHttp, FARHAND_DATA_DIR: b.dataDir })).toBe('a');
    expect(await made([], { FARHAND_DATA_DIR: b.dataDir })).toBe('b');
  });
});

// ---- One broker, one agent per directory

describe('a data directory', () => {
  test('is refused at once to a second broker, without effect on the first', async () => {
    const first = await startBroker();
    const before = readFileSync(join(first.dataDir, 'state.json'));
    for (const more of [[], ['--local']]) {
      const args = ['--data-dir', first.dataDir, '--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0', ...more];
      const { code, stderr } = await run('broker', args);
      expect(code).toBe(1);
      expect(stderr).toBe(
        `farhand-broker: another broker already uses ${first.dataDir}; stop that process, or choose another --data-dir\n`,
      );
    }
    expect(readFileSync(join(first.dataDir, 'state.json'))).toEqual(before);
    const { key } = await createKey(first.dataDir);
    expect((await me(first.url, key)).status).toBe(200);
  });

  test('is free again after its broker was killed, and no acknowledged change is lost', async () => {
    const first = await startBroker();
    const { key } = await createKey(first.dataDir);
    const client = new Farhand({ baseUrl: first.url, apiKey: key });
    const answered: string[] = [];
    let enough = (): void => {};
    const fifty = new Promise<void>((resolve) => {
      enough = resolve;
    });
    const writers = Array.from({ length: 16 }, async (_, writer) => {
      // Creates keys until the broker is killed. Then a request fails, which ends the loop.
      for (let n = 0; ; n += 1) {
        const made = await client.keys.create({ name: `${writer}-${n}`, scopes: ['machines:read'] });
        answered.push(made.id);
        if (answered.length === 50) enough();
      }
    });
    const killed = Promise.allSettled(writers);
    await fifty;
    await stop(first, 'SIGKILL');
    await killed;
    const state = await openState(first.dataDir);
    expect(answered.filter((id) => !state.keys.has(id))).toEqual([]);
    await state.close();
    const second = await startBroker(first.dataDir);
    expect((await me(second.url, key)).status).toBe(200);
  });

  test('is refused at once to a second agent, and free when the first was killed', async () => {
    const broker = await startBroker();
    const agent = await startAgent(broker);
    const args = ['--data-dir', agent.dataDir, '--broker', broker.grpc];
    const { code, stderr } = await run('agent', [...args, '--log-level', 'error']);
    expect([code, stderr]).toEqual([
      1,
      expect.stringContaining(`another agent already uses ${agent.dataDir}`),
    ]);
    await stop(agent, 'SIGKILL');
    await start('agent', args).said(/"msg":"linked"/);
  });
});

test('broker.sock can be used only by its owner, and is removed when the broker ends', async () => {
  const broker = await startBroker();
  const socket = join(broker.dataDir, 'broker.sock');
  expect([statSync(socket).isSocket(), statSync(socket).mode & 0o777]).toEqual([true, 0o600]);
  const [{ code }] = await stop(broker);
  expect([code, existsSync(socket)]).toEqual([0, false]);
});

// ---- The end of programs

describe('SIGTERM ends the broker with 0 within 10 s', () => {
  test('and the agent too, although a request waits for a command; that request is answered first', async () => {
    const broker = await startBroker();
    const agent = await startAgent(broker);
    const { key } = await createKey(broker.dataDir);
    const fifo = join(agent.dataDir, 'running');
    execFileSync('mkfifo', [fifo]);
    const body = { machine_id: agent.machineId, command: `echo > ${fifo}; sleep 300`, wait: 50_000 };
    const answer = call(`${broker.url}/api/v1/commands`, 'POST', { key, body });
    await readFile(fifo);
    const [ended, took] = await stop(broker);
    expect([ended.code, ended.signal]).toEqual([0, null]);
    expect(took).toBeLessThan(10_000);
    const { status, body: answered } = await answer;
    expect([status, answered.data.finished_at]).toEqual([201, null]);
    // The machine may already run the command although the broker has no report of it yet.
    expect(['queued', 'running']).toContain(answered.data.status);
    const [gone, tookAgent] = await stop(agent);
    expect([gone.code, gone.signal]).toEqual([0, null]);
    expect(tookAgent).toBeLessThan(10_000);
  });

  test('also with an agent that hangs', async () => {
    const broker = await startBroker();
    const agent = await startAgent(broker);
    agent.child.kill('SIGSTOP');
    const [{ code }, took] = await stop(broker);
    expect(code).toBe(0);
    expect(took).toBeLessThan(10_000);
  });

  test('also with silent connections that never end', async () => {
    const broker = await startBroker();
    const silent = [broker.grpc, new URL(broker.url).host].map((address) => {
      const [host = '', port = ''] = address.split(':');
      return connect({ host, port: Number(port), allowHalfOpen: true }).on('error', () => {});
    });
    onTestFinished(() => {
      for (const socket of silent) socket.destroy();
    });
    await Promise.all(silent.map((socket) => new Promise((resolve) => socket.once('connect', resolve))));
    const [{ code }, took] = await stop(broker);
    expect(code).toBe(0);
    expect(took).toBeLessThan(10_000);
  });

  test('also right after its start, and its port is then free', async () => {
    const dataDir = temporaryFolder('broker');
    const broker = start('broker', ['--data-dir', dataDir, '--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0']);
    const [, url = ''] = await broker.said(isUp);
    const [{ code, signal }] = await stop(broker);
    expect([code, signal, existsSync(join(dataDir, 'broker.sock'))]).toEqual([0, null, false]);
    await expect(fetch(url)).rejects.toThrow();
  });
});

test('a broker that is asked twice to close has closed when either call resolves', async () => {
  const system = await startFarhand();
  await system.agent();
  const first = system.broker.close();
  await system.broker.close();
  expect(existsSync(system.broker.socket)).toBe(false);
  await startFarhand({ dataDir: system.dataDir });
  await first;
});

describe('SIGTERM ends an agent with 0 within 10 s', () => {
  test('while it cannot connect to a broker to join', async () => {
    const token = `farhand_join_${'a'.repeat(43)}.${'0'.repeat(64)}`;
    const args = ['--broker', '127.0.0.1:1', '--join-token', token, '--data-dir', temporaryFolder('agent')];
    const agent = start('agent', args);
    const [line] = await agent.said(/^.*could not join the broker.*$/m);
    expect(line).not.toContain('a'.repeat(43));
    expect(line).toContain('check that the broker runs');
    expect(line).not.toContain('stack');
    expect((await stop(agent))[0]).toMatchObject({ code: 0, signal: null });
  });

  test('while its broker is gone', async () => {
    const broker = await startBroker();
    const agent = await startAgent(broker);
    await stop(broker, 'SIGKILL');
    await agent.said(/not linked to the broker; trying again/);
    const [{ code }, took] = await stop(agent);
    expect(code).toBe(0);
    expect(took).toBeLessThan(10_000);
  });

  test('while its broker hangs', async () => {
    const broker = await startBroker();
    const agent = await startAgent(broker);
    broker.child.kill('SIGSTOP');
    const [{ code }, took] = await stop(agent);
    expect(code).toBe(0);
    expect(took).toBeLessThan(10_000);
  });
});
