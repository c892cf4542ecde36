// Packages that a running broker serves: a stalled download keeps no file open, and rebuilt packages are served at
// once.

import { execFileSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import {
  mkdirSync,
  readdirSync,
  readFileSync,
  readlinkSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { dirname, join } from 'node:path';
import { expect, test } from 'vitest';
import { installLineFor } from '../../broker/agent-packages/install-line-and-script.ts';
import { call, startFarhand, temporaryFolder } from '../start-farhand.ts';
import { waitFor } from '../wait-for.ts';
import { execute } from './boot-container.ts';

const name = 'farhand-agent-linux-x64.tar.gz';

function sha256(text: string): string {
  return createHash('sha256').update(text).digest('hex');
}

/** Makes packages with this content, as `npm run package` does. Returns the hash of SHA256SUMS. */
function pack(directory: string, content: string): string {
  const list = `${sha256(content)}  ${name}\n`;
  rmSync(join(directory, 'SHA256SUMS'), { force: true });
  writeFileSync(join(directory, name), content);
  writeFileSync(join(directory, 'SHA256SUMS'), list);
  return sha256(list);
}

/** Returns the files below a directory that this process has open. */
function filesInUseBelow(directory: string): string[] {
  return readdirSync('/proc/self/fd').flatMap((fd) => {
    try {
      const target = readlinkSync(`/proc/self/fd/${fd}`);
      return target.startsWith(directory) ? [target] : [];
    } catch {
      return []; // The file was closed meanwhile.
    }
  });
}

test('HEAD of a package opens no file, also if the package is removed meanwhile', async () => {
  const directory = temporaryFolder('packages');
  pack(directory, 'x'.repeat(100_000));
  const system = await startFarhand({ flags: ['--packages', directory] });
  const url = `${system.url}/packages/${name}`;
  for (let n = 0; n < 20; n += 1) {
    const { status, headers, body } = await call(url, 'HEAD');
    expect([status, headers.get('content-length'), body]).toEqual([200, '100000', '']);
  }
  expect(filesInUseBelow(directory)).toEqual([]);
  rmSync(join(directory, name));
  expect((await call(url, 'GET')).status).toBe(404);
  expect((await call(`${system.url}/healthz`, 'GET')).status).toBe(200);
});

test('a download that is not read has no file open', async () => {
  const directory = temporaryFolder('packages');
  pack(directory, 'x'.repeat(32 * 1024 * 1024));
  const system = await startFarhand({ flags: ['--packages', directory] });
  const download = await fetch(`${system.url}/packages/${name}`);
  expect(download.status).toBe(200);
  await waitFor(() => expect(filesInUseBelow(directory)).toEqual([]));
  expect(sha256(await download.text())).toBe(sha256('x'.repeat(32 * 1024 * 1024)));
});

test('a running broker serves rebuilt packages, and new tokens have their hash', async () => {
  const directory = temporaryFolder('packages');
  const first = pack(directory, 'old');
  const system = await startFarhand({ flags: ['--packages', directory] });
  expect(await system.joinToken()).toContain(`.${first}`);
  const second = pack(directory, 'new and longer');
  const { headers, body } = await call(`${system.url}/packages/${name}`, 'GET');
  expect([headers.get('etag'), body]).toEqual([`"${sha256('new and longer')}"`, 'new and longer']);
  expect(await system.joinToken()).toContain(`.${second}`);
  // During a build the broker has no packages.
  writeFileSync(join(directory, 'SHA256SUMS'), `${sha256('x')}  farhand-agent-other.tar.gz\n`);
  expect((await call(`${system.url}/packages/${name}`, 'GET')).status).toBe(404);
  expect((await system.client.joinTokens.create({})).install_missing).toContain('npm run package');
  writeFileSync(join(directory, 'farhand-agent-other.tar.gz'), 'x');
  expect((await call(`${system.url}/packages/farhand-agent-other.tar.gz`, 'GET')).body).toBe('x');
});

test('the install line accepts only https if the broker uses https', () => {
  const line = (url: string) =>
    installLineFor('TOKEN', undefined, { url, grpc: '', publicGrpc: '', pin: '' }).install;
  expect(line('https://broker.example.org')).toContain(
    "curl -fsSL --proto '=https' https://broker.example.org/",
  );
  expect(line('http://127.0.0.1:8420')).toContain('curl -fsSL http://');
});

/** Runs install.sh of a broker with its directories below `root`. */
async function installBelow(root: string, url: string, ...before: string[]) {
  const script = await (await fetch(`${url}/install.sh`)).text();
  const moved = script.replaceAll(/\/(opt|usr\/local|var\/lib)\//g, `${root}$&`);
  return execute('env', [...before, 'sh', '-c', moved, 'install.sh', '--no-service']);
}

/** Makes a package whose program does nothing, and starts a broker that serves it. Returns the URL of the broker. */
async function serveAgent(): Promise<string> {
  const directory = temporaryFolder('packages');
  const folder = `farhand-agent-9.0.0-linux-${process.arch}`;
  const file = `${folder}.tar.gz`;
  mkdirSync(join(directory, folder, 'bin'), { recursive: true });
  writeFileSync(join(directory, folder, 'bin/farhand-agent'), '#!/bin/sh\n', { mode: 0o755 });
  execFileSync('tar', ['-czf', join(directory, file), '-C', directory, folder]);
  const sum = createHash('sha256')
    .update(readFileSync(join(directory, file)))
    .digest('hex');
  writeFileSync(join(directory, 'SHA256SUMS'), `${sum}  ${file}\n`);
  return (await startFarhand({ flags: ['--packages', directory] })).url;
}

test('install.sh keeps the versions of an upgrade that root’s unit has not finished', async () => {
  const [url, root] = [await serveAgent(), temporaryFolder('root')];
  const place = join(root, 'opt/farhand-agent');
  const state = join(root, 'var/lib/farhand-agent-upgrade/state.json');
  for (const one of ['old', 'new']) mkdirSync(join(place, one), { recursive: true });
  symlinkSync('new', join(place, 'current'));
  mkdirSync(dirname(state), { recursive: true });
  writeFileSync(state, '{}');
  const versions = () =>
    readdirSync(place)
      .filter((name) => !name.startsWith('9.0.0-'))
      .sort();
  expect(await installBelow(root, url)).toMatchObject({ code: 0, stderr: '' });
  expect(versions()).toEqual(['current', 'new', 'old']);
  rmSync(state);
  expect(await installBelow(root, url)).toMatchObject({ code: 0 });
  expect(versions()).toEqual(['current']);
});

test('a second install.sh changes nothing while the first one runs', async () => {
  const [url, root] = [await serveAgent(), temporaryFolder('root')];
  const place = join(root, 'opt/farhand-agent');
  mkdirSync(place, { recursive: true });
  const locked = await installBelow(root, url, 'flock', place);
  expect(locked).toMatchObject({ code: 1, stderr: expect.stringContaining('running already') });
  expect(readdirSync(place)).toEqual([]);
  expect(await installBelow(root, url)).toMatchObject({ code: 0 });
});
