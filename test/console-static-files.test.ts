// The static files of the console as the broker serves them: one page for all paths, compressed assets, and the headers
// of both.
import { mkdirSync, writeFileSync } from 'node:fs';
import { get } from 'node:http';
import { join } from 'node:path';
import { brotliCompressSync, gzipSync } from 'node:zlib';
import { expect, test } from 'vitest';
import { call, startFarhand, type TestSystem, temporaryFolder } from './start-farhand.ts';

const page =
  '<!doctype html><style nonce="__NONCE__"></style><script type="module" src="/console/assets/main-ABCD1234.js"></script>';
const script = 'console.log(1)';

/** Starts a broker whose console directory looks like that of a build. */
async function withConsole(): Promise<TestSystem> {
  const folder = temporaryFolder('console');
  mkdirSync(join(folder, 'assets'));
  writeFileSync(join(folder, 'index.html'), page);
  writeFileSync(join(folder, 'secret-ABCD1234.js'), 'not an asset');
  const file = join(folder, 'assets/main-ABCD1234.js');
  writeFileSync(file, script);
  writeFileSync(`${file}.br`, brotliCompressSync(script));
  writeFileSync(`${file}.gz`, gzipSync(script));
  writeFileSync(join(folder, 'assets/style-ABCD1234.css'), 'body {}');
  return startFarhand({ tuning: { console: folder } });
}

test('paths that lead elsewhere, and assets that do not exist, are not found', async () => {
  const system = await withConsole();
  const paths = ['', 'main.js', 'main-ABCD1234.js.br', 'main-00000000.js', '..%2fsecret-ABCD1234.js'];
  for (const path of paths) {
    const { status, headers } = await call(`${system.url}/console/assets/${path}`, 'GET');
    expect([path, status, headers.get('cache-control')]).toEqual([path, 404, 'no-store']);
  }
  for (const method of ['POST', 'PUT', 'DELETE'])
    expect((await call(`${system.url}/console/machines`, method)).status).toBe(401);
});

test('without a built console / leads to the reference page, and /console says how to build it', async () => {
  const system = await startFarhand({ tuning: { console: join(temporaryFolder('none'), 'console') } });
  const start = await fetch(`${system.url}/`, { headers: { Accept: 'text/html' }, redirect: 'manual' });
  expect([start.status, start.headers.get('location')]).toEqual([302, '/docs']);
  const { status, body } = await call(`${system.url}/console/`, 'GET');
  expect([status, body.error.code, body.error.message]).toEqual([
    503,
    'unavailable',
    expect.stringContaining('scripts/build-console.ts'),
  ]);
});

test('a browser is sent from / to the console, whose page has a new nonce and a strict policy in each answer', async () => {
  const system = await withConsole();
  const start = await fetch(`${system.url}/`, { headers: { Accept: 'text/html' }, redirect: 'manual' });
  expect([start.status, start.headers.get('location')]).toEqual([302, '/console/']);
  expect((await call(`${system.url}/`, 'GET', { headers: { Accept: 'application/json' } })).status).toBe(401);
  const nonces = new Set<string>();
  for (const path of [
    '/console',
    '/console/',
    '/console/machines/mach_1/files',
    '/console/machines?sort=-cpu',
  ]) {
    const { status, headers, body } = await call(`${system.url}${path}`, 'GET');
    const policy = headers.get('content-security-policy') ?? '';
    const nonce = /style-src 'self' 'nonce-([^']{20,})'/.exec(policy)?.[1] ?? '';
    nonces.add(nonce);
    expect(body).toBe(page.replace('__NONCE__', nonce));
    expect([path, status, headers.get('content-type'), headers.get('cache-control')]).toEqual([
      path,
      200,
      'text/html; charset=utf-8',
      'no-store',
    ]);
    expect(policy).not.toMatch(/unsafe|https?:|\*|script-src[^;]*nonce/);
    for (const part of [
      "default-src 'none'",
      "script-src 'self'",
      "connect-src 'self'",
      "frame-ancestors 'none'",
      "base-uri 'none'",
      "form-action 'none'",
      "require-trusted-types-for 'script'",
    ])
      expect(policy.split('; ')).toContain(part);
  }
  expect(nonces.size).toBe(4);
});

test('an asset is sent in a compression that the browser accepts, and may be stored forever', async () => {
  const system = await withConsole();
  const url = `${system.url}/console/assets/main-ABCD1234.js`;
  const cases = [
    ['br, gzip', 'br', brotliCompressSync(script).length],
    ['gzip', 'gzip', gzipSync(script).length],
    ['identity', undefined, script.length],
    ['br;q=0', undefined, script.length],
  ] as const;
  for (const [accepted, coding, length] of cases) {
    const { headers } = await headOf(url, accepted);
    expect([accepted, headers['content-encoding'], Number(headers['content-length'])]).toEqual([
      accepted,
      coding,
      length,
    ]);
    expect(headers).toMatchObject({
      'content-type': 'text/javascript; charset=utf-8',
      'cache-control': 'public, max-age=31536000, immutable',
      vary: 'Accept-Encoding',
    });
  }
  // This asset has no compressed file beside it, so it is sent uncompressed.
  const style = await headOf(`${system.url}/console/assets/style-ABCD1234.css`, 'br, gzip');
  expect([style.headers['content-type'], style.headers['content-encoding']]).toEqual([
    'text/css; charset=utf-8',
    undefined,
  ]);
});

/** Returns the response as it was sent. fetch() would decompress it. */
function headOf(url: string, accepted: string) {
  return new Promise<{ headers: Record<string, unknown> }>((resolve, reject) => {
    get(url, { headers: { 'Accept-Encoding': accepted } }, (response) => {
      response.resume();
      resolve({ headers: response.headers });
    }).on('error', reject);
  });
}
