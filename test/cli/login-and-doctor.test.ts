// farhand login, whoami, logout and doctor: which broker they use, how they verify it, and which problems doctor finds.
import { execFileSync } from 'node:child_process';
import { createHash, generateKeyPairSync, X509Certificate } from 'node:crypto';
import { once } from 'node:events';
import {
  chmodSync,
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  statSync,
  writeFileSync,
} from 'node:fs';
import { createServer as createHttpServer } from 'node:http';
import { type AddressInfo, connect } from 'node:net';
import { join } from 'node:path';
import { createServer } from 'node:tls';
import { describe, expect, onTestFinished, test } from 'vitest';
import { loadPtyMaker } from '../../agent/processes/terminals/pty.ts';
import { loadAuthority } from '../../broker/ca-and-broker-certificates.ts';
import { doctor as brokerDoctor } from '../../broker/doctor.ts';
import { startAdvice } from '../../shared/doctor/broker-service-checks.ts';
import { fail } from '../../shared/doctor/check-result.ts';
import { version } from '../../shared/version.ts';
import { createLine, open } from '../cli-fixture.ts';
import { listenOnLoopback } from '../listen-on-loopback.ts';
import { scriptedMachine } from '../scripted-agent.ts';
import { startFarhand, type TestSystem, temporaryFolder } from '../start-farhand.ts';

/**
 * Starts an https proxy in front of a broker, with its own certificate authority. It counts the requests that it
 * forwards.
 */
async function startTlsProxy(system: TestSystem) {
  const authority = await loadAuthority(temporaryFolder('authority'), true);
  const context = await (await authority.rest(['127.0.0.1'])).leaf();
  const { hostname, port } = new URL(system.url);
  let through = 0;
  const server = createServer(context, (socket) => {
    const behind = connect(Number(port), hostname);
    socket.on('data', (bytes: Buffer) => {
      through += bytes.length;
    });
    for (const one of [socket, behind]) one.on('error', () => {});
    socket.on('close', () => behind.destroy());
    socket.pipe(behind).pipe(socket);
  }).listen(0, '127.0.0.1');
  await once(server, 'listening');
  onTestFinished(() => void server.close());
  const key = new X509Certificate(String(context.cert)).publicKey.export({ type: 'spki', format: 'der' });
  return {
    url: `https://127.0.0.1:${(server.address() as AddressInfo).port}`,
    ca: authority.certificate,
    pin: `sha256//${createHash('sha256').update(key).digest('base64')}`,
    through: () => through,
  };
}

const wrongPin = `sha256//${Buffer.alloc(32, 1).toString('base64')}`;

describe('farhand login', () => {
  test('stores nothing if the key is wrong, no broker answers, or the key would cross a network unencrypted', async () => {
    const system = await startFarhand();
    const farhand = createLine();
    const answers = await Promise.all([
      farhand('login', [system.url, '--key-stdin'], { input: 'service_apikey_wrong\n' }),
      farhand('login', ['http://127.0.0.1:2', '--key-stdin'], { input: 'k\n' }),
      farhand('login', ['http://192.0.2.1:8420', '--key-stdin'], { input: 'k\n' }),
      farhand('login', [system.url, '--key-stdin'], { input: '\n' }),
      farhand('login', [system.url, '--key-stdin', '--pin', 'md5//x'], { input: 'k\n' }),
    ]);
    expect(answers.map(({ code }) => code)).toEqual([1, 1, 78, 2, 78]);
    expect(answers[2]?.err).toContain('others on the network could read the API key');
    expect(existsSync(join(farhand.home, '.config'))).toBe(false);
  });

  test('stores broker and key with mode 0600; whoami prints them, the environment takes precedence, logout removes them', async () => {
    const system = await startFarhand();
    const limited = await system.keyed(['machines:read']);
    const farhand = createLine();
    const { code, out, err } = await farhand('login', [`${system.url}/`, '--key-stdin'], {
      input: `${system.key}\n`,
    });
    expect([code, err, out]).toEqual([
      0,
      '',
      expect.stringContaining(`Logged in to ${system.url} as test (admin)`),
    ]);
    const folder = join(farhand.home, '.config/farhand');
    expect([statSync(folder).mode & 0o777, statSync(join(folder, 'config.json')).mode & 0o777]).toEqual([
      0o700, 0o600,
    ]);
    expect(readdirSync(folder)).toEqual(['config.json']);
    expect(await farhand.json('whoami')).toMatchObject({
      broker: system.url,
      name: 'test',
      scopes: ['admin'],
    });
    const other = await farhand('whoami', [], { env: { FARHAND_API_KEY: limited.key } });
    expect(other.out).toMatch(/^scopes +machines:read$/m);
    // The command warns if other users may read the key, for example because a restored backup has another mode.
    chmodSync(join(folder, 'config.json'), 0o640);
    expect((await farhand('whoami')).err).toBe(
      `farhand: other users may read the API key: run chmod 600 ${folder}/config.json\n`,
    );
    chmodSync(join(folder, 'config.json'), 0o600);
    // If FARHAND_API_KEY is empty, the command must fail. It must not use the stored key, which may have more rights.
    const empty = await farhand('whoami', [], { env: { FARHAND_API_KEY: '' } });
    expect([empty.code, empty.out, empty.err]).toEqual([78, '', expect.stringContaining('is empty')]);
    // A key that is stored for one broker is never sent to another.
    const elsewhere = await farhand('whoami', [], { env: { FARHAND_URL: 'http://127.0.0.1:2' } });
    expect([elsewhere.code, elsewhere.err]).toEqual([78, expect.stringContaining('there is no API key for')]);
    expect((await farhand('logout')).code).toBe(0);
    expect([readdirSync(folder), (await farhand('whoami')).code]).toEqual([[], 78]);
    writeFileSync(join(folder, 'config.json'), 'no JSON');
    expect((await farhand('whoami')).err).toContain('config.json is damaged');
  });

  test('verifies a broker with its own certificate by the pinned key, and sends nothing to any other', async () => {
    const system = await startFarhand();
    const agent = await system.agent({ name: 'web-1' });
    const tls = await startTlsProxy(system);
    const farhand = createLine();
    const input = `${system.key}\n`;
    const [unknown, wrong] = await Promise.all([
      farhand('login', [tls.url, '--key-stdin'], { input }),
      farhand('login', [tls.url, '--key-stdin', '--pin', wrongPin], { input }),
    ]);
    expect([unknown.code, wrong.code]).toEqual([1, 1]);
    expect(unknown.err).toContain('add --pin sha256//…; farhand whoami --data-dir DIR');
    const env = { FARHAND_URL: tls.url, FARHAND_API_KEY: system.key };
    const unpinned = await farhand('machines list', [], { env });
    expect([unpinned.code, unpinned.err]).toEqual([
      1,
      expect.stringMatching(
        /CERT.*; if the broker made its own certificate, set FARHAND_PIN=sha256\/\/…; farhand whoami --data-dir DIR/,
      ),
    ]);
    expect(wrong.err).toContain(`public key (${tls.pin}) is not the pinned one`);
    expect(tls.through()).toBe(0);
    expect(
      (await farhand('login', [tls.url, '--key-stdin', '--pin', `${wrongPin};${tls.pin}`], { input })).code,
    ).toBe(0);
    expect((await farhand('exec', ['web-1', '--', 'echo there'])).out).toBe('there\n');
    // Ctrl-C cancels the remote command. Its end arrives before the answer to the request that cancels it. `farhand
    // exec` must then print no error.
    const running = farhand.start('exec', ['web-1', '--', 'echo on; sleep 300']);
    await running.says(/on/);
    running.child.kill('SIGINT');
    expect(await running.ended).toMatchObject({ code: 130, err: '' });
    // The URLs below are other forms of the stored URL, so the stored pin is used. The key in the variable does not
    // matter for this.
    for (const FARHAND_URL of [`${tls.url}/`, `${tls.url}/api/v1`])
      expect((await farhand('machines list', [], { env: { ...env, FARHAND_URL } })).code).toBe(0);
    // The WebSocket of a terminal checks the pin as well.
    const shell = await farhand('shell', [agent.machineId], { input: 'exit 4\n' });
    expect([shell.code, shell.err]).toEqual([4, '']);
    const session = await system.client.sessions.create({ machine_id: agent.machineId, shell: '/bin/cat' });
    const before = tls.through();
    const spoofed = await farhand('sessions attach', [session.session_id], {
      env: { FARHAND_PIN: wrongPin },
    });
    expect([spoofed.code, tls.through()]).toEqual([1, before]);
  });
});

test('farhand login refuses a text from standard input that cannot be a key', async () => {
  const system = await startFarhand();
  const farhand = createLine();
  const { code, err } = await farhand('login', [system.url, '--key-stdin'], { input: 'my secret key\n' });
  expect([code, err]).toEqual([2, expect.stringContaining('first line of standard input is not an API key')]);
  expect(err).not.toContain('secret');
});

test.skipIf(!loadPtyMaker())(
  'the prompt of farhand login draws no more if its terminal loses its width (needs the pty library)',
  async () => {
    const system = await startFarhand();
    const { machineId: machine_id } = await system.agent();
    const { program } = createLine();
    const login = [process.execPath, program.file, 'login', system.url];
    const { session_id } = await system.client.sessions.create({
      ...{ machine_id, shell: '/bin/sh', args: ['-c', 'tty; exec "$@"', 'sh', ...login], env: program.env },
    });
    const terminal = await system.client.sessions.terminal(
      await system.client.sessions.attach({ session_id }),
    );
    let text = '';
    const drawn = (async () => {
      for await (const bytes of terminal.output) text += Buffer.from(bytes).toString();
    })();
    const shows = (pattern: RegExp) => expect.poll(() => text, { timeout: 20_000 }).toMatch(pattern);
    await shows(/API key[\s\S]*└/);
    execFileSync('stty', ['-F', /^\/dev\/\S+/.exec(text)?.[0] ?? '', 'cols', '0']);
    const before = text.length;
    await terminal.write('a key');
    await shows(/(▪[^▪]*){5}/);
    await terminal.write('\r');
    await drawn;
    expect(text).toContain('what was typed is not an API key');
    expect(text.length - before).toBeLessThan(1500);
  },
);

test('farhand login --key-stdin without a URL prints no key', async () => {
  const system = await startFarhand();
  const line = createLine();
  const { code, out, err } = await line('login', ['--key-stdin'], { input: `${system.key}\n` });
  expect([code, out, err]).toEqual([2, '', expect.stringContaining('needs the URL of the broker')]);
  const keyless = await line('machines list', [], { env: { FARHAND_URL: system.url } });
  expect([keyless.code, keyless.err]).toEqual([
    78,
    expect.stringContaining(`there is no API key for ${system.url}: set FARHAND_API_KEY`),
  ]);
});

test('farhand login reads the environment, stores absolute paths, and connects to the broker before it asks for a key', async () => {
  const system = await startFarhand();
  const tls = await startTlsProxy(system);
  const farhand = createLine();
  const input = `${system.key}\n`;
  const saved = () => JSON.parse(readFileSync(join(farhand.home, '.config/farhand/config.json'), 'utf8'));
  const pinned = await farhand('login', [`${tls.url}/`, '--key-stdin'], {
    input,
    env: { FARHAND_PIN: tls.pin },
  });
  expect([pinned.code, saved()]).toEqual([0, { url: tls.url, api_key: system.key, pin: tls.pin }]);
  writeFileSync(join(farhand.home, 'ca.pem'), tls.ca);
  expect((await farhand('login', [tls.url, '--key-stdin', '--ca', 'ca.pem'], { input })).code).toBe(0);
  expect(saved().ca).toBe(join(farhand.home, 'ca.pem'));
  expect((await farhand('whoami', [], { cwd: '/' })).code).toBe(0);
  const { privateKey } = generateKeyPairSync('ed25519');
  writeFileSync(join(farhand.home, 'key.pem'), privateKey.export({ format: 'pem', type: 'pkcs8' }));
  const env = { FARHAND_URL: tls.url, FARHAND_API_KEY: system.key, FARHAND_CA: 'key.pem' };
  const wrongFiles = await Promise.all([
    farhand('login', [tls.url, '--key-stdin', '--ca', 'key.pem'], { input }),
    farhand('machines list', [], { env }),
  ]);
  for (const { code, err } of wrongFiles)
    expect([code, err]).toEqual([
      78,
      expect.stringContaining('key.pem holds no certificate; give a PEM file'),
    ]);
  // Neither of these servers may receive the key.
  const [agents, clear] = await Promise.all([
    farhand('login', ['https://127.0.0.1:8421', '--key-stdin'], { input: open }),
    farhand('login', ['http://192.0.2.1:8420', '--key-stdin'], { input: open }),
  ]);
  expect([agents.code, agents.err]).toEqual([1, expect.stringContaining('use 8420 for the REST API')]);
  expect([clear.code, clear.err]).toEqual([78, expect.stringContaining('could read the API key')]);
});

describe('farhand doctor', () => {
  test('prints what is wrong and the next step, and exits with 1', async () => {
    const system = await startFarhand();
    const tls = await startTlsProxy(system);
    const farhand = createLine(system);
    const alone = createLine();
    const open = temporaryFolder('open');
    chmodSync(open, 0o755);
    const answers = await Promise.all([
      farhand('doctor', [], { env: { FARHAND_API_KEY: 'a b' } }),
      alone('doctor'),
      farhand('doctor', [], { env: { FARHAND_URL: 'http://127.0.0.1:2' } }),
      farhand('doctor', [], { env: { FARHAND_API_KEY: 'wrong' } }),
      farhand('doctor', [], { env: { FARHAND_URL: tls.url } }),
      alone('doctor', ['--data-dir', open]),
    ]);
    const says = [
      /^fail +key +apiKey must be visible ASCII/m,
      /^fail +broker +no broker is configured.*farhand login URL/ms,
      /^fail +broker +http:\/\/127.0.0.1:2 does not answer.*check host, port and firewalls/ms,
      /^fail +key .*unauthorized.*store another key/ms,
      /^fail +broker .*FARHAND_PIN/ms,
      /^fail +directory +other users can use .*chmod/ms,
    ];
    for (const [at, { code, out }] of answers.entries())
      expect([code, out]).toEqual([1, expect.stringMatching(says[at] ?? /x/)]);
  });

  test('sends no key over a network unencrypted', async () => {
    const asked: unknown[] = [];
    const server = createHttpServer(({ headers }, response) => {
      asked.push(headers.authorization);
      response.end('{"data":{}}');
    });
    const port = await listenOnLoopback(server);
    // This form of the address does not count as this machine's own, so no other address is needed.
    const env = { FARHAND_URL: `http://[::ffff:127.0.0.1]:${port}`, FARHAND_API_KEY: 'secret' };
    const { code, out } = await createLine()('doctor', [], { env });
    expect([code, out]).toEqual([1, expect.stringMatching(/^fail +network .*could read the API key/m)]);
    expect(asked).toEqual([undefined]);
  });

  test('warns of a directory without state.json, whose broker may have its state in a database', async () => {
    const [directory, line] = [temporaryFolder('postgres'), createLine()];
    await loadAuthority(directory, true);
    const warning =
      /^warn +database +not checked: --database-url is not set.*PostgreSQL.*FARHAND_DATABASE_URL/ms;
    const { code, out } = await line('doctor', ['--data-dir', directory]);
    expect([code, out]).toEqual([0, expect.stringMatching(warning)]);
    const argv = ['--data-dir', directory];
    const own = await brokerDoctor({ argv, env: {} });
    expect(own).toEqual({ code: 0, text: expect.stringMatching(warning) });
    const { text } = await brokerDoctor({ argv: [...argv, '--output', 'json'], env: {} });
    expect(JSON.parse(text)).toContainEqual(expect.objectContaining({ check: 'database', state: 'warn' }));
    writeFileSync(join(directory, 'state.json'), '{}', { mode: 0o600 });
    expect((await brokerDoctor({ argv, env: {} })).text).not.toContain('database');
  });

  test('names first what a failed service of the broker says, and then the command that starts it', () => {
    expect(startAdvice([])).toMatch(/^start the service with “systemctl start farhand-broker”, or/);
    expect(startAdvice([fail('service', 'farhand-broker is failed', 'see journalctl')])).toMatch(
      /^fix the problem that the check “service” reports, then run systemctl start farhand-broker$/,
    );
  });

  test('advises to look at the broker, not at the key, while the broker’s database does not answer', async () => {
    const server = createHttpServer(({ url }, response) => {
      const error = { code: 'unavailable', message: 'the database does not answer', details: {} };
      if (url === '/readyz') return void response.end();
      response.writeHead(503).end(JSON.stringify({ error }));
    });
    await once(server.listen(0, '127.0.0.1'), 'listening');
    onTestFinished(() => void server.close());
    const { port } = server.address() as AddressInfo;
    const { code, out } = await createLine({ url: `http://127.0.0.1:${port}`, key: 'any' })('doctor');
    expect([code, out]).toEqual([1, expect.stringMatching(/^fail +broker .*\(unavailable\)$/m)]);
    expect(out).toContain('run farhand-broker doctor on the broker’s machine');
    expect(out).not.toContain('farhand login');
  });

  test('finds nothing wrong with a broker that works, and warns of offline machines', async () => {
    const system = await startFarhand();
    const [, other] = [await system.agent({ name: 'web-1' }), await system.agent({ name: 'web-2' })];
    const farhand = createLine(system);
    const all = ['--data-dir', system.dataDir];
    const found: { state: string; check: string; what: string }[] = await farhand.json('doctor', all);
    expect(found.filter(({ state }) => state === 'fail')).toEqual([]);
    expect(found.map(({ check }) => check)).toEqual(
      expect.arrayContaining(['node', 'broker here', 'broker', 'clock', 'key', 'version', 'machines']),
    );
    await other.close();
    const { code, out } = await farhand('doctor');
    expect([code, out]).toEqual([
      0,
      expect.stringMatching(/^warn +machines +these machines are offline: web-2$/m),
    ]);
    expect(readFileSync(join(system.dataDir, 'state.json'), 'utf8')).not.toContain(system.key);
  });

  test('warns of a signing key on the broker’s machine, and of agents that trust no signing key', async () => {
    const system = await startFarhand();
    const farhand = createLine(system);
    const installation = { kind: 'PACKAGE_KIND_DEB' as const, upgrade_unit: true, trusted_key: '' };
    await scriptedMachine(system, { installation });
    const all = ['--data-dir', system.dataDir];
    const before = await farhand('doctor', all);
    expect(before.out).toMatch(/^ok +signing key +/m);
    expect(before.out).toMatch(/^warn +upgrades +these agents trust no signing key.*: scripted$/m);
    const { privateKey, publicKey } = generateKeyPairSync('ed25519');
    const pem = { format: 'pem', type: 'pkcs8' } as const;
    const key = join(system.dataDir, 'release-key');
    const secret = privateKey.export({ ...pem, cipher: 'aes-256-cbc', passphrase: 'long enough' });
    writeFileSync(key, secret, { mode: 0o600 });
    writeFileSync(`${key}.pub`, publicKey.export({ format: 'pem', type: 'spki' }));
    mkdirSync(join(farhand.home, 'build'));
    writeFileSync(join(farhand.home, 'build/plain.pem'), privateKey.export(pem));
    const { out, code } = await farhand('doctor', all);
    expect([code, out]).toEqual([0, expect.stringMatching(/^warn +signing key +.*release-key/m)]);
    expect(out).toContain(join(farhand.home, 'build/plain.pem'));
  });

  test('names agents older than the broker, and machines whose clock differs', async () => {
    const system = await startFarhand();
    await system.agent({ name: 'web-1' });
    const farhand = createLine(system);
    const metrics = { recorded_at_ms: Date.now() - 86_400_000, cpu_cores: 1, memory: {}, disk: {} };
    const candidate = `${version}-rc.1`;
    await scriptedMachine(system, { metrics, agent_version: candidate });
    const { code, out } = await farhand('doctor');
    expect(code).toBe(0);
    expect(out).toContain(`these agents are older than the broker (${version}): scripted (${candidate})\n`);
    expect(out).toMatch(
      /^warn +clocks +these clocks differ from the broker’s: scripted \((1d|23h 59m) behind\)$/m,
    );
    const list = await farhand('machines list');
    expect(list.out).toMatch(/^NAME +ID +STATUS +OS +VERSION /);
    expect(list.out).toContain(` ${candidate} `);
    expect((await farhand('machines status', ['scripted'])).out).toMatch(
      /^clock +(1d|23h 59m)\S* behind the broker’s$/m,
    );
  });
});
