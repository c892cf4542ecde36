// Settings from flags, variables and a file. Also the real programs with wrong settings, and with servers that they
// must not trust.
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { type AddressInfo, createServer } from 'node:net';
import { networkInterfaces } from 'node:os';
import { join } from 'node:path';
import { text } from 'node:stream/consumers';
import { createServer as createTlsServer } from 'node:tls';
import { describe, expect, onTestFinished, test } from 'vitest';
import { z } from 'zod';
import { loadIdentity } from '../../agent/join-or-load-identity.ts';
import { agentSettings } from '../../agent/settings-schema.ts';
import { loadAuthority } from '../../broker/ca-and-broker-certificates.ts';
import { brokerSettings } from '../../broker/settings-schema.ts';
import { StartError, UsageError } from '../../shared/errors.ts';
import { nodeIsGood } from '../../shared/program-start-and-end.ts';
import { givenSettings, helpText, readSettings, settingsText } from '../../shared/read-settings.ts';
import { startFarhand, temporaryFolder } from '../start-farhand.ts';

type Environment = Record<string, string>;

const broker = (argv: string[], env: Environment = {}) => readSettings(brokerSettings, { argv, env });
const agent = (argv: string[], env: Environment = {}) =>
  readSettings(agentSettings, { argv: ['--broker', '127.0.0.1:1', ...argv], env });

/** Writes a TOML file, and removes it at the end of the test. */
function fileWith(content: string): string {
  const file = join(temporaryFolder('settings'), 'farhand.toml');
  writeFileSync(file, content);
  return file;
}

/** Returns the error that `read` throws. */
function failureOf(read: () => unknown): Error {
  try {
    read();
  } catch (error) {
    if (error instanceof Error) return error;
  }
  throw new Error('read() threw no error');
}

describe('wrong usage is a UsageError', () => {
  test.each([
    ['an unknown flag', ['--no-such-flag']],
    ['a setting as the file spells it', ['--data_dir', 'x']],
    ['a flag without its value', ['--data-dir']],
    ['a flag whose value looks like a flag', ['--data-dir', '--local']],
    ['a switch with a value', ['--local=yes']],
    ['a word that belongs to no flag', ['start']],
    ['a short flag', ['-x']],
  ])('for %s', (_what, argv) => {
    expect(failureOf(() => broker(argv))).toBeInstanceOf(UsageError);
  });
});

describe('a bad value is refused with an error that names its flag', () => {
  test.each([
    ['--http', 'localhost', 'HOST:PORT'],
    ['--http', '8420', 'HOST:PORT'],
    ['--http', ':8420', 'HOST:PORT'],
    ['--http', '::1:8420', 'HOST:PORT'],
    ['--http', '[::1]', 'HOST:PORT'],
    ['--http', '127.0.0.1:65536', '65535'],
    ['--http', '127.0.0.1:-1', 'HOST:PORT'],
    ['--http', '127.0.0.1:80a', 'HOST:PORT'],
    ['--grpc', 'http://127.0.0.1:8421', 'HOST:PORT'],
    ['--public-url', 'not a url', 'https://HOST:8420'],
    ['--public-url', 'farhand.example.org:8420', 'https://HOST:8420'],
    ['--public-url', '//farhand.example.org', 'https://HOST:8420'],
    ['--public-url', 'https:///', 'https://HOST:8420'],
    ['--public-url', 'https://:8420', 'https://HOST:8420'],
    ['--public-url', 'https://farhand.example.org:84200', 'https://HOST:8420'],
    ['--public-url', 'https://me@farhand.example.org', 'https://HOST:8420'],
    ['--public-url', 'https://farhand.example.org?a=b', 'https://HOST:8420'],
    ['--public-url', 'ftp://farhand.example.org', 'https://HOST:8420'],
    ['--keep-history', '30', 'duration'],
    ['--keep-history', '-1d', 'duration'],
    ['--keep-history', '1.5h', 'duration'],
    ['--keep-history', '1 h', 'duration'],
    ['--keep-history', '2w', 'duration'],
    ['--keep-history', '1h30m', 'duration'],
    ['--keep-history', '', 'duration'],
    ['--webhook-retry', '1m,soon', 'duration'],
    ['--webhook-attempts', '0', '1'],
    ['--heartbeat-every', '0s', 'more than 0'],
    ['--log-level', 'loud', 'debug'],
    ['--data-dir', '', '1 character'],
  ])('%s %j', (flag, value, part) => {
    const error = failureOf(() => broker([`${flag}=${value}`]));
    expect(error).toBeInstanceOf(StartError);
    expect(error).toMatchObject({ exitCode: 78 });
    expect(error.message).toContain(`${flag} ${JSON.stringify(value)}: `);
    expect(error.message).toContain(part);
  });

  test.each([
    ['--name', 'a\u0007', 'control characters'],
    ['--tags', 'a\u0007', 'control characters'],
    ['--allow', 'exec,everything', 'exec'],
    ['--root', 'relative', 'absolute'],
    ['--root', '', '1'],
  ])('%s %j of the agent', (flag, value, part) => {
    const error = failureOf(() => agent([flag, value]));
    expect(error).toMatchObject({ name: 'StartError', exitCode: 78 });
    expect(error.message).toContain(`${flag} `);
    expect(error.message).toContain(part);
  });

  test('also if a variable or the file contains it', () => {
    expect(failureOf(() => broker([], { FARHAND_KEEP_EVENTS: 'x' })).message).toContain('--keep-events "x"');
    for (const content of ['keep_events = "x"', 'keep-events = 72']) {
      const file = fileWith(content);
      expect(failureOf(() => broker(['--config', file])).message).toContain('--keep-events ');
    }
  });

  test('and so is a missing value, with the names of its flag and its variable', () => {
    const error = failureOf(() => readSettings(agentSettings, { argv: [], env: {} }));
    expect(error).toMatchObject({ name: 'StartError', exitCode: 78 });
    expect(error.message).toContain('--broker');
    expect(error.message).toContain('FARHAND_BROKER');
  });
});

describe('a file is refused', () => {
  test.each([
    ['with a setting that does not exist', 'data_dirr = "x"', 'data_dirr'],
    ['with a table', '[broker]\nhttp = "127.0.0.1:1"', 'broker'],
    ['with the name of an object’s own property', 'constructor = 1', 'constructor'],
    ['that is no TOML', 'http = ', 'TOML'],
  ])('%s', (_what, content, part) => {
    const file = fileWith(content);
    const error = failureOf(() => broker(['--config', file]));
    expect(error).toMatchObject({ name: 'StartError', exitCode: 78 });
    expect(error.message).toContain(file);
    expect(error.message).toContain(part);
  });

  test('that does not exist', () => {
    const file = join(temporaryFolder('settings'), 'none.toml');
    expect(failureOf(() => broker(['--config', file])).message).toContain(file);
    expect(failureOf(() => broker([], { FARHAND_CONFIG: file })).message).toContain(file);
  });
});

describe('settings', () => {
  test('come from a flag before a variable, from a variable before the file, and otherwise have defaults', () => {
    const config = fileWith('keep_history = "3d"\nkeep-events = "3h"\nhttp = "127.0.0.1:3"');
    const env = { FARHAND_KEEP_HISTORY: '2d', FARHAND_KEEP_EVENTS: '2h' };
    const settings = broker(['--config', config, '--keep-history', '1d'], env);
    expect([settings.keep_history, settings.keep_events, settings.http.port, settings.grpc.port]).toEqual([
      86_400_000, 7_200_000, 3, 8421,
    ]);
    expect(broker([], { ...env, FARHAND_CONFIG: config }).http.port).toBe(3);
    expect(broker(['--config', fileWith('')], { FARHAND_CONFIG: config }).http.port).toBe(8420);
  });

  test('that are set can be written to a file, which another start reads with the same result', () => {
    const table = { ...brokerSettings, tls_cert: { schema: z.string().optional(), value: 'FILE', help: '' } };
    const argv = ['--config', fileWith('keep_history = "3d"'), '--tls-cert', 'cert.pem', '--insecure-http'];
    const { config: _, ...given } = givenSettings(table, {
      argv,
      env: { FARHAND_WEBHOOK_ALLOW: '10.0.0.0/8' },
    });
    const file = fileWith(settingsText(table, given));
    const again = readSettings(table, { argv: ['--config', file], env: {} });
    expect(again).toMatchObject({ insecure_http: true, tls_cert: join(process.cwd(), 'cert.pem') });
    expect([again.keep_history, again.webhook_allow]).toEqual([3 * 86_400_000, ['10.0.0.0/8']]);
  });

  test('of a switch also come from flag, variable and file, and can be false', () => {
    const config = fileWith('insecure_http = true');
    expect(broker([]).insecure_http).toBe(false);
    expect(broker(['--config', config]).insecure_http).toBe(true);
    expect(broker(['--config', config], { FARHAND_INSECURE_HTTP: 'false' }).insecure_http).toBe(false);
    expect(broker(['--insecure-http'], { FARHAND_INSECURE_HTTP: 'false' }).insecure_http).toBe(true);
  });

  test.each([
    ['0s', 0],
    ['300ms', 300],
    ['15s', 15_000],
    ['5m', 300_000],
    ['24h', 86_400_000],
    ['30d', 2_592_000_000],
  ])('take the duration %s as %d ms', (text_, ms) => {
    expect(broker(['--keep-history', text_]).keep_history).toBe(ms);
  });

  test.each([
    ['127.0.0.1:8420', '127.0.0.1', 8420],
    ['example.org:0', 'example.org', 0],
    ['[::1]:65535', '::1', 65_535],
    ['[2001:db8::7]:80', '2001:db8::7', 80],
    ['[::ffff:192.0.2.1]:80', '::ffff:192.0.2.1', 80],
  ])('take the address %s', (address, host, port) => {
    expect(broker(['--http', address]).http).toEqual({ host, port });
    expect(readSettings(agentSettings, { argv: ['--broker', address], env: {} }).broker).toEqual([address]);
  });

  test('accept lists with commas, and arrays in the file', () => {
    expect(agent(['--tags', ' a, b,,a ']).tags).toEqual(['a', 'b']);
    expect(agent(['--config', fileWith('tags = ["a", "b c"]\nallow = ["exec"]')])).toMatchObject({
      tags: ['a', 'b c'],
      allow: ['exec'],
    });
    expect(agent([])).toMatchObject({ tags: [], root: ['/'] });
  });

  test('have the absolute path of the data directory', () => {
    expect(broker(['--data-dir', 'some/where']).data_dir).toBe(join(process.cwd(), 'some/where'));
  });

  test('are not changed by the variables FARHAND_HELP and FARHAND_VERSION', () => {
    const env = { FARHAND_VERSION: '1.2.3', FARHAND_HELP: 'https://example.org' };
    expect(broker([], env).http.port).toBe(8420);
    expect(agent([], env).tags).toEqual([]);
  });
});

test.each([
  ['v20.19.0', false],
  ['v22.23.1', false],
  ['v22.23.2', true],
  ['v22.24.0', true],
  ['v23.11.0', false],
  ['v24.18.0', false],
  ['v24.18.1', true],
  ['v24.21.0', true],
  ['v25.0.0', true],
])('Node %s is good: %s', (version, good) => {
  expect(nodeIsGood(version)).toBe(good);
});

// ---- The real programs

const root = join(import.meta.dirname, '../..');
const { PATH, NODE_COMPILE_CACHE } = process.env;
const mains = {
  'farhand-broker': 'broker/main.ts',
  'farhand-agent': 'agent/main.ts',
  farhand: 'broker/cli/main.ts',
};
type Program = keyof typeof mains;

interface Ending {
  code: number | null;
  stdout: string;
  stderr: string;
}

/** Runs a program to its end in an environment of its own. */
async function run(program: Program, args: string[], env: Environment = {}): Promise<Ending> {
  const child = spawn(process.execPath, [join(root, mains[program]), ...args], {
    env: { PATH, NODE_COMPILE_CACHE, FARHAND_DATA_DIR: temporaryFolder('data'), ...env },
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  onTestFinished(() => void child.kill('SIGKILL'));
  const ended = new Promise<number | null>((resolve) => child.once('close', resolve));
  const [stdout, stderr, code] = await Promise.all([text(child.stdout), text(child.stderr), ended]);
  return { code, stdout, stderr };
}

/** Returns HOST:PORT of an address that is in use until the end of the test. */
async function takenAddress(): Promise<string> {
  const server = createServer().listen(0, '127.0.0.1');
  onTestFinished(() => void server.close());
  await once(server, 'listening');
  return `127.0.0.1:${(server.address() as AddressInfo).port}`;
}

test('a start that fails at its last address releases the others', async () => {
  const dataDir = temporaryFolder('broker');
  const [http, grpc] = [await takenAddress(), `127.0.0.2:${(await takenAddress()).split(':')[1]}`];
  const start = (address: string) => startFarhand({ dataDir, flags: ['--http', address, '--grpc', grpc] });
  await expect(start(http)).rejects.toMatchObject({ name: 'StartError', exitCode: 1 });
  await start('127.0.0.1:0');
});

describe('the real programs', () => {
  test.each(['agent', 'broker'])('farhand-%s goes on when its output is not read', async (side) => {
    const fifo = join(temporaryFolder('fifo'), 'out');
    const gone = 'mkfifo "$0" && { (exec 3<"$0") & } && exec >"$0" && wait && exec "$@"';
    const program = [process.execPath, join(import.meta.dirname, `../../${side}/main.ts`), '--help'];
    const child = spawn('sh', ['-c', gone, fifo, ...program], { stdio: ['ignore', 'ignore', 'pipe'] });
    const [stderr, [code]] = await Promise.all([text(child.stderr), once(child, 'exit')]);
    expect([code, stderr]).toEqual([0, '']);
  });

  test.each<[Program, string[]]>([
    ['farhand-broker', ['--no-such-flag']],
    ['farhand-broker', ['start']],
    ['farhand-agent', ['--no-such-flag']],
    ['farhand', ['--no-such-flag']],
    ['farhand', ['no-such-verb']],
    ['farhand', ['auth', 'create-key', '--no-such-flag']],
    ['farhand', ['auth', 'create-key', '--output', 'yaml']],
  ])('%s ends with 2 for wrong usage: %j', async (program, args) => {
    const { code, stdout, stderr } = await run(program, args);
    expect([code, stdout]).toEqual([2, '']);
    expect(stderr).toContain(args.at(-1));
    const verb = args[0] === 'auth' ? ' auth create-key' : '';
    expect(stderr).toContain(`See ${program}${verb} --help.`);
  });

  test.each<[Program, string[], Environment, string]>([
    ['farhand-broker', ['--http', 'x'], {}, '--http "x"'],
    ['farhand-broker', ['--http', '0.0.0.0:0'], {}, '--insecure-http'],
    ['farhand-broker', ['--tls', '--insecure-http'], {}, 'cannot be used with --tls'],
    ['farhand-broker', [], { FARHAND_KEEP_EVENTS: 'x' }, '--keep-events "x"'],
    ['farhand-agent', [], {}, '--broker is required'],
    ['farhand-agent', ['--broker', '127.0.0.1:1'], {}, '--join-token'],
    ['farhand-agent', ['--broker', '127.0.0.1:1', '--join-token', 'x'], {}, 'join token is incomplete'],
  ])('%s ends with 78 for a bad configuration: %j %j', async (program, args, env, part) => {
    const { code, stdout, stderr } = await run(program, args, env);
    expect([code, stdout]).toEqual([78, '']);
    expect(stderr.trimEnd().split('\n')).toHaveLength(1);
    expect(stderr).toContain(`${program}: `);
    expect(stderr).toContain(part);
  });

  test.each(['--http', '--grpc'])(
    'farhand-broker ends with 1 when the address of %s is taken',
    async (flag) => {
      const address = await takenAddress();
      const free = [
        '--http',
        '127.0.0.1:0',
        '--grpc',
        '127.0.0.1:0',
        '--data-dir',
        temporaryFolder('broker'),
      ];
      const { code, stderr } = await run('farhand-broker', [...free, '--log-level', 'warn', flag, address]);
      expect([code, stderr]).toEqual([1, expect.stringContaining(`${flag} ${address} is already in use`)]);
    },
  );

  test.each<[Program, string[], number, RegExp]>([
    [
      'farhand-broker',
      ['--data-dir', '/etc/passwd/x'],
      1,
      /^\/etc\/passwd\/x: has a parent that is not a directory \(ENOTDIR\); check the path$/,
    ],
    [
      'farhand-agent',
      ['--data-dir', '/etc/passwd/x'],
      1,
      /^\/etc\/passwd\/x: .*\(ENOTDIR\); check the path$/,
    ],
    [
      'farhand-agent',
      ['--config', '/no/such.toml'],
      78,
      /^\/no\/such\.toml: does not exist \(ENOENT\); check/,
    ],
    [
      'farhand-agent',
      ['--join-token-file', '/etc'],
      78,
      /^--join-token-file: \/etc: is a directory \(EISDIR\); use the path of a file$/,
    ],
    [
      'farhand-broker',
      ['--insecure-http', '--http', '192.0.2.1:0'],
      1,
      /^--http 192\.0\.2\.1:0 is not an address of this machine \(EADDRNOTAVAIL\); choose an address that ip addr shows$/,
    ],
  ])(
    '%s names the path or address that the system refuses, and the next step: %j',
    async (program, args, code, text) => {
      const free =
        program === 'farhand-broker'
          ? ['--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0']
          : ['--broker', 'x:1'];
      const folder = temporaryFolder('refused');
      const answer = await run(program, [...free, '--data-dir', folder, '--log-level', 'fatal', ...args]);
      expect([answer.code, answer.stderr.replace(`${program}: `, '').trimEnd()]).toEqual([
        code,
        expect.stringMatching(text),
      ]);
    },
  );

  test.each<[Program, string[]]>([
    ['farhand-broker', ['--http', '--new-history', '--log-level', '--config']],
    ['farhand-agent', ['--broker', '--join-token', '--allow', '--root']],
    ['farhand', ['auth', 'join-tokens']],
  ])('%s prints its help and its version and ends with 0', async (program, parts) => {
    const { version } = JSON.parse(readFileSync(join(root, 'package.json'), 'utf8')) as { version: string };
    const [help, received] = await Promise.all([run(program, ['--help']), run(program, ['--version'])]);
    expect([help.code, help.stderr]).toEqual([0, '']);
    expect(help.stdout).toContain(program);
    for (const part of parts) expect(help.stdout).toContain(part);
    expect(received).toEqual({ code: 0, stdout: `${version}\n`, stderr: '' });
  });
});

// ---- Servers that must not be trusted

const hasIpv6 = Object.values(networkInterfaces())
  .flat()
  .some((address) => address?.address === '::1');

describe('REST in the clear', () => {
  test.each([
    '0.0.0.0:0',
    '[::]:0',
    '192.0.2.1:0',
    'example.org:0',
    '[::ffff:0.0.0.0]:0',
    '127.example.org:0',
  ])('on %s is refused without --insecure-http, before anything is written', async (http) => {
    const dataDir = join(temporaryFolder('broker'), 'new');
    await expect(startFarhand({ dataDir, flags: ['--http', http] })).rejects.toMatchObject({
      name: 'StartError',
      exitCode: 78,
      message: expect.stringContaining('--insecure-http'),
    });
    expect(existsSync(dataDir)).toBe(false);
  });

  test('on every address is served with --insecure-http', async () => {
    const system = await startFarhand({ flags: ['--http', '0.0.0.0:0', '--insecure-http'] });
    expect((await system.call('GET', '/auth/me')).status).toBe(200);
  });

  test.each(['127.0.0.1:0', '127.0.0.2:0', 'localhost:0', ...(hasIpv6 ? ['[::1]:0'] : [])])(
    'on %s is served',
    async (http) => {
      const system = await startFarhand({ flags: ['--http', http] });
      expect((await system.call('GET', '/auth/me')).status).toBe(200);
    },
  );
});

test('an agent that waits to join reports what is wrong with the address, and stores nothing', async () => {
  const [plain, secure] = [await startFarhand(), await startFarhand({ flags: ['--tls'] })];
  const cases: [string, string, RegExp][] = [
    [
      plain.url,
      await plain.joinToken(),
      /is not the broker’s port for agents; use 8421 in --broker, or the port/,
    ],
    [
      secure.url,
      await plain.joinToken(),
      /is not the broker’s port for agents; use 8421 in --broker, or the port/,
    ],
    ['http://127.0.0.1:1', await plain.joinToken(), /check that the broker runs/],
  ];
  for (const [url, joinToken, words] of cases) {
    const dataDir = temporaryFolder('agent');
    const { host } = new URL(url);
    const opening = loadIdentity(dataDir, { broker: host, joinToken, name: undefined, tags: [] });
    await expect(opening).rejects.toMatchObject({ message: expect.stringMatching(words) });
    await expect(opening).rejects.toMatchObject({ message: expect.stringContaining(`${host} `) });
    expect(readdirSync(dataDir)).toEqual([]);
  }
});

interface Impostor {
  address: string;
  /** Bytes received inside TLS. */
  heard: number;
  /** Resolves when a client aborts the TLS handshake. */
  refused: Promise<void>;
  /** Stops listening. Resolves when the last client has disconnected. */
  close(): Promise<void>;
}

/** Starts a TLS server with another certificate authority, at the address where an agent expects its broker. */
async function startImpostor(): Promise<Impostor> {
  const authority = await loadAuthority(temporaryFolder('impostor'), true);
  const server = createTlsServer({ ALPNProtocols: ['h2'], ...(await authority.leaf()) });
  const refused = new Promise<void>((resolve) => server.once('tlsClientError', () => resolve()));
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  onTestFinished(() => void server.close());
  const { port } = server.address() as AddressInfo;
  const close = () => new Promise<void>((resolve) => server.close(() => resolve()));
  const impostor = { address: `127.0.0.1:${port}`, heard: 0, refused, close };
  server.on('secureConnection', (socket) => {
    socket.on('error', () => socket.destroy());
    socket.on('data', (chunk) => {
      impostor.heard += chunk.length;
    });
  });
  return impostor;
}

describe('an agent whose broker does not have the authority that the join token pins', () => {
  test('ends with 78, and has sent nothing and stored nothing', async () => {
    const system = await startFarhand();
    const impostor = await startImpostor();
    const dataDir = temporaryFolder('agent');
    const joinToken = await system.joinToken();
    const args = ['--broker', impostor.address, '--join-token', joinToken, '--data-dir', dataDir];
    const { code, stderr } = await run('farhand-agent', args);
    expect(code).toBe(78);
    expect(stderr).toContain('the join token is not from the broker');
    expect(stderr).not.toContain(joinToken);
    await impostor.close();
    expect(impostor.heard).toBe(0);
    expect(readdirSync(dataDir)).not.toContain('identity.json');
    // The failure has used up neither the token nor the data directory: both can still be used to join the right
    // broker.
    await system.agent({ joinToken, dataDir });
  });

  test('does not join another real broker, which registers no machine', async () => {
    const [mine, other] = [await startFarhand(), await startFarhand()];
    await expect(other.agent({ joinToken: await mine.joinToken() })).rejects.toMatchObject({
      name: 'StartError',
      exitCode: 78,
      message: expect.stringContaining('the join token is not from the broker'),
    });
    expect((await other.client.machines.list()).total).toBe(0);
    expect((await other.client.events.list()).total).toBe(0);
  });

  test('reveals nothing to a server that took over the address after it joined', async () => {
    const system = await startFarhand();
    const { dataDir, close } = await system.agent();
    await close();
    const impostor = await startImpostor();
    void run('farhand-agent', ['--broker', impostor.address, '--data-dir', dataDir]);
    await impostor.refused;
    expect(impostor.heard).toBe(0);
  });
});

describe('help', () => {
  const row = { schema: z.string().optional(), help: 'h' };

  test('mentions variables and files only for settings that may come from them, and lists short forms', () => {
    const output = { ...row, value: 'FORM', short: 'o', flagOnly: true };
    const text = helpText('p', 'does', { output });
    expect(text).toContain('  -o, --output FORM ');
    expect(text).not.toContain('FARHAND_');
    expect(helpText('p', 'does', { output, place: { ...row, value: 'DIR' } })).toContain('FARHAND_PLACE');
  });
});

test('settings of another verb in the file are ignored, and are not accepted as flags', () => {
  const file = fileWith('user = "me"\nallow_sudo = true');
  expect(agent(['--config', file]).broker).toEqual(['127.0.0.1:1']);
  expect(failureOf(() => agent(['--user', 'me']))).toBeInstanceOf(UsageError);
  expect(agent([], { FARHAND_USER: 'me' }).user).toBeUndefined();
});

test('a switch is turned off by its --no- form', () => {
  const file = fileWith('tls = true');
  expect(broker(['--config', file]).tls).toBe(true);
  expect(broker(['--config', file, '--no-tls']).tls).toBe(false);
});
