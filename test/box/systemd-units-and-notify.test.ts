// The unit files of both programs, checked by systemd, and the notifications that programs send to systemd.
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, mkdirSync, statSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { createInterface } from 'node:readline';
import { describe, expect, onTestFinished, test } from 'vitest';
import { BrokerAddresses } from '../../agent/link/broker-addresses.ts';
import { keepLinked, type LinkOptions } from '../../agent/link/index.ts';
import { service as agentService } from '../../agent/systemd-service.ts';
import { scriptFor } from '../../broker/agent-packages/install-line-and-script.ts';
import { service as brokerService } from '../../broker/systemd-service.ts';
import { readRegularFile } from '../../shared/read-regular-file.ts';
import { place, unitText } from '../../shared/systemd/install.ts';
import { createNotify } from '../../shared/systemd/notify.ts';
import { version } from '../../shared/version.ts';
import { fakeClock } from '../fake-clock.ts';
import { joinScripted } from '../scripted-agent.ts';
import { lacks, needs } from '../skip-without-programs.ts';
import { quiet, startFarhand, temporaryFolder } from '../start-farhand.ts';
import { execute } from './boot-container.ts';

const command = ['/opt/some where/node', '/opt/50%/$main', '--config', '/etc/farhand/x.toml'];
const unit = (name: string, user: string, ...blocks: string[]): string =>
  unitText(`${name}.service`, 252, { command, user, blocks });
const units = {
  'agent of its own user': unit('farhand-agent', 'farhand-agent', 'locked'),
  'agent that may use sudo': unit('farhand-agent', 'farhand-agent'),
  'agent that is root': unit('farhand-agent', 'root', 'root'),
  broker: unit('farhand-broker', 'farhand-broker'),
  'broker with a low port': unit('farhand-broker', 'farhand-broker', 'low-port'),
};

const invocation = (...argv: string[]) => ({ argv, env: {} });

describe('install refuses, before it changes anything,', () => {
  test.each([
    ['an agent without a broker', ['--join-token', 'x'], '--broker is required'],
    ['an agent with half a token', ['--broker', 'b:1', '--join-token', 'farhand_join_x'], 'incomplete'],
    ['another data directory', ['--broker', 'b:1', '--data-dir', '/x'], '--data-dir'],
  ])('%s', async (_what, argv, part) => {
    const failure = agentService('install', invocation(...argv), command);
    await expect(failure).rejects.toMatchObject({ exitCode: 78, message: expect.stringContaining(part) });
  });

  test.each([
    ['another data directory', ['--data-dir', '/x'], '--data-dir'],
    ['a flag for one start only', ['--new-history'], '--new-history'],
    ['a flag that skips a check for one start', ['--accept-state'], '--accept-state'],
    ['a flag for one start after a loss', ['--old-history'], '--old-history'],
  ])('a broker with %s', async (_what, argv, part) => {
    const failure = brokerService('install', invocation(...argv), command);
    await expect(failure).rejects.toMatchObject({ exitCode: 78, message: expect.stringContaining(part) });
  });

  test('to uninstall a broker without --yes', async () => {
    const failure = brokerService('uninstall', invocation('--purge'), command);
    await expect(failure).rejects.toThrow('/var/lib/farhand-broker');
  });
});

describe('files that root stores for a service', () => {
  const content = {
    text: 'x = 1\n',
    mode: 0o640,
    uid: process.getuid?.() ?? 0,
    gid: process.getgid?.() ?? 0,
  };
  const modeOf = (path: string): number => statSync(path).mode & 0o7777;

  test('can be read by the service whatever the umask of root', async () => {
    const file = join(temporaryFolder('etc'), 'farhand/agent.toml');
    const before = process.umask(0o077);
    await place(file, content).finally(() => process.umask(before));
    expect([modeOf(dirname(file)), modeOf(file)]).toEqual([0o755, 0o640]);
    expect(await readRegularFile(file)).toEqual(content);
  });

  test('leaves an existing directory unchanged, and is removed without a trace', async () => {
    const file = join(temporaryFolder('etc'), 'agent.toml');
    await place(file, content);
    expect(modeOf(dirname(file))).toBe(0o700);
    await place(file, undefined);
    expect(existsSync(dirname(file))).toBe(false);
  });
});

test('the public address is reported as it was set, to agents and to clients', async () => {
  const { client } = await startFarhand({ flags: ['--public-grpc', '[2001:db8::1]:443'] });
  expect((await client.service.info()).grpc_address).toBe('[2001:db8::1]:443');
  const reached = { url: 'https://b.example', grpc: '0.0.0.0:8421', publicGrpc: '', pin: '' };
  expect(scriptFor(reached)).toContain('broker=b.example:8421\n');
  expect(scriptFor({ ...reached, publicGrpc: 'agents.example:443' })).toContain(
    'broker=agents.example:443\n',
  );
});

describe('a unit', () => {
  const isMissing = lacks('systemd-analyze');

  /** Returns a file with this unit, under a name that systemd accepts. */
  function fileOf(name: keyof typeof units): string {
    const file = join(temporaryFolder('unit'), 'x.service');
    writeFileSync(file, units[name]);
    return file;
  }

  test.skipIf(isMissing).each([
    ['agent of its own user', 5.5],
    ['broker', 1.5],
    ['broker with a low port', 2],
  ] as const)('of the %s has an exposure of at most %d (needs systemd-analyze)', async (name, most) => {
    const args = ['security', '--offline=true', '--no-pager', `--threshold=${most * 10}`, fileOf(name)];
    const { code, stdout } = await execute('systemd-analyze', args);
    expect(stdout).toContain('Overall exposure level');
    expect(code, stdout.trim().split('\n').at(-1)).toBe(0);
  });

  const names = Object.keys(units) as (keyof typeof units)[];
  test.skipIf(isMissing).each(names)(
    'of the %s passes systemd-analyze without a warning (needs systemd-analyze)',
    async (name) => {
      const root = temporaryFolder('root');
      const place = join(root, 'etc/systemd/system');
      mkdirSync(place, { recursive: true });
      writeFileSync(join(place, 'x.service'), units[name].replace(/^ExecStart=.*$/m, 'ExecStart=/bin/true'));
      const { stderr } = await execute('systemd-analyze', ['verify', '--man=no', join(place, 'x.service')]);
      expect(stderr).not.toMatch(/x\.service:\d+/);
    },
  );

  test('names its program as systemd reads it, and with systemd 254 or newer waits longer before each restart', () => {
    expect(units.broker).toContain(
      'ExecStart="/opt/some where/node" /opt/50%%/$$main --config /etc/farhand/x.toml\n',
    );
    expect(units.broker).not.toContain('RestartSteps');
    const later = unitText('farhand-broker.service', 254, { command, user: 'x', blocks: [] });
    expect(later).toContain('RestartSteps=5\n');
    expect(units['agent of its own user']).toContain('NoNewPrivileges=yes');
    expect(units['agent that may use sudo']).not.toContain('NoNewPrivileges');
  });
});

/** Receives notifications as systemd would. A Python program does that, because Node has no Unix datagram sockets. */
async function listener(): Promise<{ socket: string; next(): Promise<string> }> {
  const socket = join(temporaryFolder('notify'), 'socket');
  const script = `import socket
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.bind(${JSON.stringify(socket)})
print('bound', flush=True)
while True:
    data, fds, _, _ = socket.recv_fds(s, 4096, 4)
    if not data.startswith(b'BARRIER'): print(data.decode().strip().replace('\\n', ' | '), flush=True)
    for fd in fds: socket.close(fd)`;
  const child = spawn('python3', ['-c', script], { stdio: ['ignore', 'pipe', 'inherit'] });
  onTestFinished(() => void child.kill());
  const lines = createInterface({ input: child.stdout });
  const heard: string[] = [];
  lines.on('line', (line) => heard.push(line));
  const next = async (): Promise<string> => {
    while (heard.length === 0) await once(lines, 'line');
    return heard.shift() ?? '';
  };
  expect(await next()).toBe('bound');
  return { socket, next };
}

describe('a program that systemd has started', () => {
  test('sends nothing where there is no systemd', async () => {
    const notify = createNotify({}, 1, quiet);
    notify.up('x', () => true);
    await notify.ending('y');
  });

  needs('python3')(
    'removes the variables of systemd from its environment and sends its status in order',
    async () => {
      const { socket, next } = await listener();
      const env = { NOTIFY_SOCKET: socket, WATCHDOG_USEC: '1', WATCHDOG_PID: '2', HOME: '/' };
      const notify = createNotify(env, 1, quiet);
      expect(env).toEqual({ HOME: '/' });
      notify.up('waits', () => true);
      notify.up('two\nlines', () => true);
      const received = notify.ending('stops');
      notify.up('too late', () => true);
      await received;
      await notify.ending('ended');
      expect([await next(), await next(), await next(), await next()]).toEqual([
        `READY=1 | STATUS=waits (${version})`,
        `READY=1 | STATUS=two lines (${version})`,
        'STOPPING=1 | STATUS=stops',
        'STOPPING=1 | STATUS=ended',
      ]);
    },
  );

  needs('python3')('shows that it is alive, only while it is', async () => {
    const { socket, next } = await listener();
    const clock = fakeClock(0);
    let alive = true;
    const notify = createNotify({ NOTIFY_SOCKET: socket, WATCHDOG_USEC: '60000000' }, 1, quiet);
    notify.up('up', () => alive);
    expect(await next()).toBe(`READY=1 | STATUS=up (${version})`);
    await clock.advance(30_000);
    expect(await next()).toBe('WATCHDOG=1');
    alive = false;
    await clock.advance(300_000);
    alive = true;
    await clock.advance(30_000);
    await notify.ending('over');
    expect([await next(), await next()]).toEqual(['WATCHDOG=1', 'STOPPING=1 | STATUS=over']);
  });
});

test('a broker reports that it is alive until it stops', async () => {
  const { broker } = await startFarhand();
  expect(await broker.alive()).toBe(true);
  await broker.close();
  expect(await broker.alive()).toBe(false);
});

describe('an agent', () => {
  test('counts as hanging once its link neither gets messages nor reconnects', async () => {
    const system = await startFarhand();
    const identity = await joinScripted(system);
    const due: number[] = [];
    const stuck = Promise.withResolvers<never>();
    const stopping = new AbortController();
    const asked = Promise.withResolvers<void>();
    // These options are enough: the agent uses no others before it sends its hello.
    const options = {
      brokers: await BrokerAddresses.open(temporaryFolder('agent'), [system.grpc], quiet),
      identity,
      handlers: {},
      capabilities: [],
      roots: ['/'],
      processes: { missing: [], journalId: 'j', ids: () => [] },
      upgrades: { installation: () => ({}) },
      report: () => {
        asked.resolve();
        return stuck.promise;
      },
      log: quiet,
      onProgress: (ms: number) => due.push(ms),
    } as unknown as LinkOptions;
    const linked = keepLinked(options, stopping.signal);
    await asked.promise;
    // The agent has reported progress at the start of its loop and at the challenge. `due` has the milliseconds until
    // it must report again. While the agent is stuck, it reports nothing.
    expect(due).toEqual([60_000, 90_000]);
    stopping.abort();
    stuck.reject(new Error('over'));
    await linked;
  });

  test('whose token is in a file deletes the file once it has joined', async () => {
    const system = await startFarhand();
    const file = join(temporaryFolder('token'), 'join-token');
    writeFileSync(file, `${await system.joinToken()}\n`);
    const { dataDir, close } = await system.agent({ joinToken: '', flags: ['--join-token-file', file] });
    await expect(execute('cat', [file])).resolves.toMatchObject({ code: 1 });
    await close();
    // The next start works without the file.
    await system.agent({ dataDir, joinToken: '', flags: ['--join-token-file', file] });
  });
});
