// REST, a terminal and an agent's link through nginx, with the configuration of the docs, unchanged except for its
// addresses.
import { execFileSync, spawn, spawnSync } from 'node:child_process';
import { createHash, randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import { request } from 'node:https';
import { join } from 'node:path';
import { text } from 'node:stream/consumers';
import { expect, onTestFinished, test } from 'vitest';
import { type RawData, WebSocket } from 'ws';
import { freePort } from '../find-free-ports.ts';
import { startFarhand, temporaryFolder } from '../start-farhand.ts';
import { waitFor } from '../wait-for.ts';

const streamModule = '/usr/lib/nginx/modules/ngx_stream_module.so';
const isHere = spawnSync('nginx', ['-v']).status === 0 && existsSync(streamModule);

/**
 * Replaces each `from` by its `to`. Fails unless each `from` occurs exactly once, so that a change of the docs fails
 * the test.
 */
function replaced(config: string, pairs: [from: string, to: string][]): string {
  return pairs.reduce((done, [from, to]) => {
    expect([from, done.split(from).length]).toEqual([from, 2]);
    return done.replace(from, to);
  }, config);
}

function recipes(): [http: string, stream: string] {
  const page = readFileSync(join(import.meta.dirname, '../../docs/broker.md'), 'utf8');
  const [http = '', stream = '', ...more] = [...page.matchAll(/```nginx\n([\s\S]*?)```/g)].map(
    ([, config = '']) => config,
  );
  expect(more).toEqual([]);
  return [http, stream];
}

/** Starts nginx in the foreground as the current user. All of its files are in one folder. */
async function nginx(folder: string, http: string, stream: string): Promise<void> {
  const paths = ['client_body', 'proxy', 'fastcgi', 'uwsgi', 'scgi'].map(
    (name) => `${name}_temp_path ${join(folder, name)};`,
  );
  const config = join(folder, 'nginx.conf');
  writeFileSync(
    config,
    `load_module ${streamModule}; daemon off; master_process off; pid ${join(folder, 'pid')};
     error_log stderr warn; events {} http { access_log off; ${paths.join(' ')}\n${http}\n}\n${stream}`,
  );
  const child = spawn('nginx', ['-p', folder, '-c', config], { stdio: ['ignore', 'ignore', 'pipe'] });
  const gone = once(child, 'exit');
  const said: string[] = [];
  child.stderr.on('data', (bytes) => said.push(String(bytes)));
  onTestFinished(async () => {
    child.kill('SIGKILL');
    await gone;
  });
  await waitFor(() => {
    expect([child.exitCode, said]).toEqual([null, expect.anything()]);
    expect(existsSync(join(folder, 'pid'))).toBe(true);
  });
}

test.skipIf(!isHere)(
  'nginx with the documented configuration forwards REST, streams, a terminal and an agent (Debian: nginx-light, libnginx-mod-stream)',
  async () => {
    const folder = temporaryFolder('nginx');
    const [cert, key] = [join(folder, 'crt'), join(folder, 'key')];
    const made = ['-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:P-256', '-nodes', '-days', '2'];
    const named = ['-subj', '/CN=x', '-addext', 'subjectAltName=IP:127.0.0.1', '-keyout', key, '-out', cert];
    execFileSync('openssl', ['req', '-x509', ...made, ...named], { stdio: 'ignore' });
    const [restPort, linkPort] = [await freePort(), await freePort()];
    const url = `https://127.0.0.1:${restPort}`;
    const system = await startFarhand({ flags: ['--trusted-proxy', '127.0.0.1', '--public-url', url] });
    const [http, stream] = recipes();
    await nginx(
      folder,
      replaced(http, [
        ['listen 443 ssl', `listen 127.0.0.1:${restPort} ssl`],
        ['/etc/ssl/farhand.crt', cert],
        ['/etc/ssl/farhand.key', key],
        ['127.0.0.1:8420', new URL(system.url).host],
      ]),
      replaced(stream, [
        ['listen 8421', `listen 127.0.0.1:${linkPort}`],
        ['127.0.0.1:8431', system.grpc],
      ]),
    );
    const ca = readFileSync(cert);
    const ask = async (method: string, path: string, headers = {}, body?: Buffer | string) => {
      const bearer = { Authorization: `Bearer ${system.key}`, 'Content-Type': 'application/json' };
      // The broker trusts the proxy's address, 127.0.0.1, so the client must have another address.
      const options = { method, ca, localAddress: '127.0.0.2', headers: { ...bearer, ...headers } };
      const asked = request(`${url}/api/v1${path}`, options).end(body);
      const [response] = await once(asked, 'response');
      return response;
    };
    const json = async (...params: Parameters<typeof ask>) =>
      JSON.parse(await text(await ask(...params))).data;

    const { machineId: machine_id } = await system.agent({ through: `127.0.0.1:${linkPort}` });
    expect(await json('GET', `/machines/${machine_id}`)).toMatchObject({ status: 'online' });

    // The broker ignores the address that the client claims: the wrong keys count for the client's own address.
    const lie = { 'X-Forwarded-For': '203.0.113.9', Authorization: 'Bearer service_apikey_wrong' };
    for (let n = 0; n < 31; n += 1) {
      const { statusCode } = (await ask('GET', '/machines', lie)).resume();
      expect(statusCode).toBe(401);
    }

    const content = randomBytes(3 * 1024 * 1024);
    const path = join(temporaryFolder('files'), 'content');
    const files = `/machines/${machine_id}/files`;
    const put = await json(
      'PUT',
      `${files}/raw?path=${path}`,
      { 'Content-Type': 'application/x-any' },
      content,
    );
    expect(put.sha256).toBe(createHash('sha256').update(content).digest('hex'));
    const got = createHash('sha256');
    for await (const bytes of await ask('GET', `${files}/download?path=${path}`)) got.update(bytes);
    expect(got.digest('hex')).toBe(put.sha256);

    const events = await ask('GET', '/events/stream');
    expect(events.statusCode).toBe(200);
    onTestFinished(() => events.destroy());
    const { session_id } = await json(
      'POST',
      '/sessions',
      {},
      JSON.stringify({ machine_id, shell: '/bin/sh' }),
    );
    const heard = (await once(events, 'data')).join('');
    expect(heard).toMatch(/session\./);

    const { stream_url } = await json('POST', `/sessions/${session_id}/attach`);
    expect(stream_url.startsWith(`wss://127.0.0.1:${restPort}/`)).toBe(true);
    const terminal = new WebSocket(stream_url, { ca, origin: url });
    onTestFinished(() => terminal.terminate());
    let output = '';
    // The library `ws` delivers each message as a Buffer by default.
    terminal.on('message', (data: RawData, binary: boolean) => {
      if (binary) output += (data as Buffer).toString();
    });
    await once(terminal, 'open');
    terminal.send(Buffer.from('echo $((6 * 7))-through\n'));
    await waitFor(() => expect(output).toContain('42-through'));
  },
);
