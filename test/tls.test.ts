// TLS of the REST API: certificates from files and from the broker's own authority, pins, renewal, and refused
// connections.
import { execFile } from 'node:child_process';
import { KeyObject, webcrypto, type X509Certificate } from 'node:crypto';
import { once } from 'node:events';
import { chmodSync, readFileSync, renameSync, statSync, writeFileSync } from 'node:fs';
import { request } from 'node:https';
import { connect as connectPlain } from 'node:net';
import { join } from 'node:path';
import { text } from 'node:stream/consumers';
import { connect, type TLSSocket } from 'node:tls';
import { promisify } from 'node:util';
import 'reflect-metadata';
import { SubjectAlternativeNameExtension, X509CertificateGenerator } from '@peculiar/x509';
import { expect, onTestFinished, test } from 'vitest';
import { WebSocket } from 'ws';
import { brokerSettings } from '../broker/settings-schema.ts';
import { startBroker } from '../broker/start/index.ts';
import { type Clock, setClock } from '../shared/clock.ts';
import { readSettings } from '../shared/read-settings.ts';
import { joinScripted, linkScripted } from './scripted-agent.ts';
import { needs } from './skip-without-programs.ts';
import { quiet, startFarhand, temporaryFolder } from './start-farhand.ts';
import { program } from './start-processes.ts';
import { waitFor } from './wait-for.ts';

const day = 86_400_000;

/** Writes a self-signed certificate for localhost and its key. */
async function pair(folder: string, name: string): Promise<{ cert: string; key: string }> {
  const [cert, key] = [join(folder, `${name}.crt`), join(folder, `${name}.key`)];
  const algorithm = { name: 'ECDSA', namedCurve: 'P-256', hash: 'SHA-256' };
  const keys = await webcrypto.subtle.generateKey(algorithm, true, ['sign', 'verify']);
  const made = await X509CertificateGenerator.createSelfSigned({
    name: `CN=${name}`,
    keys,
    signingAlgorithm: algorithm,
    notAfter: new Date(Date.now() + 2 * day),
    extensions: [
      new SubjectAlternativeNameExtension([
        { type: 'ip', value: '127.0.0.1' },
        { type: 'dns', value: 'localhost' },
      ]),
    ],
  });
  const privateKey = KeyObject.from(keys.privateKey);
  writeFileSync(cert, made.toString('pem'));
  writeFileSync(key, privateKey.export({ format: 'pem', type: 'pkcs8' }), { mode: 0o600 });
  return { cert, key };
}

/** Starts a system with TLS for REST. Its `client` cannot be used, because it does not trust the certificate. */
const startSecure = (flags: string[], tuning = {}, dataDir?: string) =>
  startFarhand({ flags, tuning, ...(dataDir && { dataDir }) });

async function securely(url: string, options: Parameters<typeof connect>[1] = {}): Promise<TLSSocket> {
  const { hostname: host, port } = new URL(url);
  const socket = connect({ host, port: Number(port), rejectUnauthorized: false, ...options });
  onTestFinished(() => void socket.destroy());
  socket.on('error', () => undefined);
  await Promise.race([
    once(socket, 'secureConnect'),
    once(socket, 'close').then(() => Promise.reject(new Error('no TLS was agreed on'))),
  ]);
  return socket;
}

const certificateOf = async (url: string): Promise<X509Certificate> => {
  const socket = await securely(url);
  const certificate = socket.getPeerX509Certificate();
  socket.destroy();
  if (!certificate) throw new Error('no certificate was sent');
  return certificate;
};

async function get(url: string, ca: string | undefined, headers = {}) {
  const asked = request(url, { ca, headers, agent: false }).end();
  const [response] = await once(asked, 'response');
  return { status: response.statusCode, headers: response.headers, body: await text(response) };
}

const run = promisify(execFile);

async function curl(...args: string[]): Promise<string> {
  return (await run('curl', ['-sS', '--max-time', '10', ...args])).stdout;
}

/** The real clock plus an offset. Timers of a minute or longer fire only by tick(). */
function movedClock(): { move(ms: number): void; tick(): void } {
  let shift = 0;
  const waiting = new Set<() => void>();
  const clock: Clock = {
    now: () => Date.now() + shift,
    monotonic: () => performance.now(),
    after(ms, run) {
      if (ms >= 60_000) {
        waiting.add(run);
        return () => void waiting.delete(run);
      }
      const timer = setTimeout(run, ms);
      return () => clearTimeout(timer);
    },
  };
  setClock(clock);
  onTestFinished(() => setClock());
  return {
    move: (ms) => {
      shift += ms;
    },
    tick() {
      const due = [...waiting];
      waiting.clear();
      for (const run of due) run();
    },
  };
}

// ---- Failed starts

test('an address other than loopback needs TLS or --insecure-http', async () => {
  const start = (...flags: string[]) =>
    startBroker(
      readSettings(brokerSettings, {
        argv: [
          '--data-dir',
          temporaryFolder('broker'),
          '--http',
          '0.0.0.0:0',
          '--grpc',
          '127.0.0.1:0',
          ...flags,
        ],
        env: {},
      }),
      quiet,
    );
  await expect(start()).rejects.toMatchObject({ name: 'StartError', exitCode: 78, message: /unencrypted/ });
  for (const flags of [['--tls'], ['--insecure-http']]) await (await start(...flags)).close();
});

test('a missing key, a wrong key, and a file that is empty, missing or without PEM end with code 78 and a message that says which', async () => {
  const folder = temporaryFolder('pair');
  const [one, two] = [await pair(folder, 'one'), await pair(folder, 'two')];
  const [nonsense, empty] = [join(folder, 'nonsense'), join(folder, 'empty.pem')];
  writeFileSync(nonsense, 'nonsense');
  writeFileSync(empty, '');
  const received: [flags: string[], text: RegExp][] = [
    [['--tls-cert', one.cert], /--tls-cert also needs --tls-key/],
    [['--tls-key', one.key], /--tls-key also needs --tls-cert/],
    [['--tls', '--tls-cert', one.cert, '--tls-key', one.key], /choose one/],
    [['--tls-cert', one.cert, '--tls-key', two.key], /does not belong/],
    [['--tls-cert', nonsense, '--tls-key', one.key], /not a PEM file/],
    [['--tls-cert', one.cert, '--tls-key', nonsense], /nonsense has no private key in PEM; set --tls-key/],
    [['--tls-cert', one.cert, '--tls-key', one.cert], /one\.crt has no private key in PEM/],
    [['--tls-cert', one.cert, '--tls-key', empty], /: \S+empty\.pem is empty$/],
    [['--tls-cert', empty, '--tls-key', one.key], /: \S+empty\.pem is empty$/],
    [['--tls-cert', join(folder, 'nothing.pem'), '--tls-key', one.key], /: ENOENT.*nothing/],
  ];
  for (const [flags, message] of received) {
    const error = await startSecure(flags).catch((thrown: unknown) => thrown);
    expect([flags, error]).toMatchObject([flags, { name: 'StartError', exitCode: 78 }]);
    expect(String(error)).toMatch(message);
  }
});

test('a damaged key of the REST API stops the start, and the error names its file', async () => {
  const dataDir = temporaryFolder('broker');
  const system = await startSecure(['--tls'], {}, dataDir);
  await system.broker.close();
  writeFileSync(join(dataDir, 'rest-key.json'), '{"private_key": 5}');
  await expect(startSecure(['--tls'], {}, dataDir)).rejects.toThrow(/rest-key\.json is damaged/);
});

// ---- Refused connections

test('TLS before 1.2 and other protocols than HTTP/1.1 are refused', async () => {
  const { url } = await startSecure(['--tls']);
  await expect(
    securely(url, { maxVersion: 'TLSv1.1', minVersion: 'TLSv1', ciphers: 'ALL:@SECLEVEL=0' }),
  ).rejects.toThrow();
  await expect(securely(url, { ALPNProtocols: ['h2'] })).rejects.toThrow();
  expect((await securely(url, { ALPNProtocols: ['h2', 'http/1.1'] })).alpnProtocol).toBe('http/1.1');
  expect((await securely(url, { maxVersion: 'TLSv1.2' })).getProtocol()).toBe('TLSv1.2');
});

test('plain HTTP on the TLS port gets an error in the envelope; other bytes and silent connections are cut', async () => {
  const { url } = await startSecure(['--tls'], { silentMs: 300 });
  const { hostname, port } = new URL(url);
  const say = async (bytes: string): Promise<string> => {
    const socket = connectPlain(Number(port), hostname);
    socket.on('error', () => undefined);
    socket.write(bytes);
    return text(socket).catch(() => '');
  };
  const answer = await say('GET /healthz HTTP/1.1\r\nHost: b\r\n\r\n');
  expect(answer).toMatch(/^HTTP\/1\.1 400 [\s\S]*"invalid_request"[\s\S]*https:\/\//);
  for (const bytes of ['\x16\x03\x01\x00\x05hello', '\x16\x03\x01', ''])
    expect(await say(bytes)).not.toMatch(/HTTP/);
});

// ---- The broker's own authority

needs('curl')(
  'curl connects with the pin that the broker prints, without trust in any certificate; another pin fails',
  async () => {
    const system = await startSecure(['--tls']);
    const bearer = `Authorization: Bearer ${system.key}`;
    await expect(curl(`${system.url}/healthz`)).rejects.toThrow(/certificate/);
    const { tls_pin: pin } = JSON.parse(await curl('-k', '-H', bearer, `${system.url}/api/v1/info`)).data;
    expect(pin).toMatch(/^sha256\/\/[+/0-9A-Za-z]{43}=$/);
    expect(await curl('-k', '--pinnedpubkey', pin, `${system.url}/healthz`)).toBe('ok\n');
    const other = `sha256//${Buffer.alloc(32).toString('base64')}`;
    await expect(curl('-k', '--pinnedpubkey', other, `${system.url}/healthz`)).rejects.toThrow(/pinned/);
    expect((await startFarhand().then(({ client }) => client.service.info())).tls_pin).toBe(null);
  },
);

test('the leaf has every name and address of this broker, and is issued by the authority that agents trust', async () => {
  const system = await startSecure(['--tls', '--public-url', 'https://farhand.example.org:8443']);
  const leaf = await certificateOf(system.url);
  for (const name of ['farhand.example.org', 'localhost']) expect(leaf.checkHost(name)).toBe(name);
  for (const address of ['127.0.0.1', '::1']) expect(leaf.checkIP(address)).toBe(address);
  expect(leaf.checkHost('elsewhere.example.org')).toBe(undefined);
  const { certificate: ca } = JSON.parse(readFileSync(join(system.dataDir, 'authority.json'), 'utf8'));
  expect((await get(`${system.url}/healthz`, ca)).body).toBe('ok\n');
  await expect(get(`${system.url}/healthz`, undefined)).rejects.toThrow();
});

test('the key is private and survives restarts and renewal, so the pin stays the same with a new leaf', async () => {
  const clock = movedClock();
  clock.move(-35 * day);
  const dataDir = temporaryFolder('broker');
  const first = await startSecure(['--tls'], {}, dataDir);
  expect(statSync(join(dataDir, 'rest-key.json')).mode & 0o777).toBe(0o600);
  const old = await certificateOf(first.url);
  const kept = await securely(first.url);
  clock.move(35 * day);
  clock.tick();
  await waitFor(async () => expect((await certificateOf(first.url)).serialNumber).not.toBe(old.serialNumber));
  const renewed = await certificateOf(first.url);
  expect(renewed.validToDate.getTime() - Date.now()).toBeLessThanOrEqual(90 * day);
  // A connection that was opened before the renewal still works.
  kept.write('GET /healthz HTTP/1.1\r\nHost: b\r\nConnection: close\r\n\r\n');
  expect(await text(kept)).toMatch(/^HTTP\/1\.1 200/);
  await first.broker.close();
  const again = await certificateOf((await startSecure(['--tls'], {}, dataDir)).url);
  const keyOf = (one: X509Certificate) => one.publicKey.export({ format: 'pem', type: 'spki' });
  expect([renewed, again].map(keyOf)).toEqual([keyOf(old), keyOf(old)]);
});

// ---- Files

test('a replaced certificate is used without a restart; one that does not match its key is ignored', async () => {
  const folder = temporaryFolder('pair');
  const [one, two] = [await pair(folder, 'one'), await pair(folder, 'two')];
  const { url, key, log } = await startSecure(['--tls-cert', one.cert, '--tls-key', one.key], {
    certificateMs: 20,
  });
  const ca = readFileSync(one.cert, 'utf8');
  const before = await get(`${url}/api/v1/info`, ca, { Authorization: `Bearer ${key}` });
  expect(before.headers['strict-transport-security']).toMatch(/^max-age=\d{7,}/);
  expect(JSON.parse(before.body).data.tls_pin).toBe(null);
  const kept = await securely(url);
  renameSync(two.cert, one.cert);
  await waitFor(() => expect(log.join('')).toContain('the old one stays'));
  expect((await certificateOf(url)).subject).toBe('CN=one');
  // A certificate that could not be read is read again after a change of its permissions alone.
  const refused = (): number => log.join('').split('the old one stays').length - 1;
  expect(refused()).toBe(1);
  chmodSync(one.key, 0o640);
  await waitFor(() => expect(refused()).toBe(2));
  renameSync(two.key, one.key);
  await waitFor(async () => expect((await certificateOf(url)).subject).toBe('CN=two'));
  kept.write('GET /healthz HTTP/1.1\r\nHost: b\r\nConnection: close\r\n\r\n');
  expect(await text(kept)).toMatch(/^HTTP\/1\.1 200/);
});

test('only with a certificate from files answers have HSTS', async () => {
  const { url, dataDir } = await startSecure(['--tls']);
  const { certificate: ca } = JSON.parse(readFileSync(join(dataDir, 'authority.json'), 'utf8'));
  expect((await get(`${url}/healthz`, ca)).headers).not.toHaveProperty('strict-transport-security');
});

test('a terminal works over TLS, and only pages over TLS may open it', async () => {
  const system = await startSecure(['--tls']);
  const headers = { Authorization: `Bearer ${system.key}`, 'Content-Type': 'application/json' };
  const post = async (path: string, body: object) => {
    const options = { method: 'POST', headers, rejectUnauthorized: false, agent: false };
    const asked = request(`${system.url}/api/v1${path}`, options).end(JSON.stringify(body));
    const [response] = await once(asked, 'response');
    return JSON.parse(await text(response)).data;
  };
  const { token: joinToken } = await post('/join-tokens', {});
  const { machineId: machine_id } = await system.agent({ joinToken });
  const { session_id } = await post('/sessions', { machine_id, shell: '/bin/sh' });
  const attach = async (): Promise<string> => (await post(`/sessions/${session_id}/attach`, {})).stream_url;
  const origin = `http://${new URL(system.url).host}`;
  const foreign = new WebSocket(await attach(), { rejectUnauthorized: false, origin });
  const [error] = await once(foreign, 'error');
  expect(String(error)).toMatch(/403/);
  const address = await attach();
  expect(address).toMatch(/^wss:/);
  const own = new WebSocket(address, { rejectUnauthorized: false, origin: system.url });
  onTestFinished(() => own.terminate());
  await once(own, 'open');
});

// ---- The certificate of the link

test('a leaf of the link is renewed by wall time while agents stay linked, and agents that dial later link with the new one', async () => {
  const clock = movedClock();
  clock.move(-35 * day);
  const system = await startFarhand();
  // Wall time moves by 35 days and no timer fires, as after a long suspend of the machine.
  clock.move(35 * day);
  const identity = await joinScripted(system);
  await linkScripted(system.grpc, identity);
  const url = `https://${system.grpc}`;
  const leaf = async () => {
    const socket = await securely(url, { ALPNProtocols: ['h2'] });
    const certificate = socket.getPeerX509Certificate();
    socket.destroy();
    return certificate;
  };
  const old = await leaf();
  clock.tick();
  await waitFor(async () => expect((await leaf())?.serialNumber).not.toBe(old?.serialNumber));
  const left = ((await leaf())?.validToDate.getTime() ?? 0) - Date.now();
  expect(left).toBeGreaterThan(89 * day);
  expect(left).toBeLessThanOrEqual(90 * day);
  // The new leaf has its full validity left, so it is not renewed again.
  const fresh = await leaf();
  clock.tick();
  await new Promise((resolve) => setImmediate(resolve));
  expect((await leaf())?.serialNumber).toBe(fresh?.serialNumber);
  const { machine_id } = { machine_id: identity.machineId };
  expect((await system.client.machines.get({ machine_id })).status).toBe('online');
  await linkScripted(system.grpc, await joinScripted(system, 'late'));
});

test('a clock that is set back also causes a new leaf, because a leaf from the future is not valid yet', async () => {
  const clock = movedClock();
  const system = await startSecure(['--tls']);
  clock.move(-2 * day);
  const old = await certificateOf(system.url);
  clock.tick();
  await waitFor(async () =>
    expect((await certificateOf(system.url)).serialNumber).not.toBe(old.serialNumber),
  );
});

test('a broker that is started as a program logs its https address', async () => {
  const flags = ['--data-dir', temporaryFolder('broker'), '--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0'];
  const broker = program('broker/main.ts', [...flags, '--tls']);
  expect((await broker.line('broker is up')).http).toMatch(/^https:\/\/127\.0\.0\.1:\d+$/);
  broker.kill('SIGTERM');
  expect(await once(broker, 'exit')).toEqual([0, null]);
});
