// Packages as users get them: unpacked on a system without Node and node_modules, installed by the install line, and
// from npm.
import { type ChildProcess, execFile, execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import {
  appendFileSync,
  copyFileSync,
  cpSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { Farhand } from '../../shared/sdk/index.ts';
import { version } from '../../shared/version.ts';
import { atEnd, shared } from '../close-after-tests.ts';
import { mayMount } from '../file-operations-fixture.ts';
import { has, lacks, needs } from '../skip-without-programs.ts';
import { call, temporaryFolder } from '../start-farhand.ts';
import { buildPackages, built } from './build-packages.ts';

const root = join(import.meta.dirname, '../..');
const execute = promisify(execFile);
const arch = process.arch;
/** Contains the unpacked tar.gz of agent and broker. */
const unpacked = mkdtempSync(join(tmpdir(), 'farhand-unpacked-'));
const agentName = `farhand-agent-${version}-linux-${arch}`;
const brokerName = `farhand-broker-${version}-linux-${arch}`;
const agentHome = join(unpacked, agentName);
const brokerHome = join(unpacked, brokerName);
/** An environment whose PATH does not contain the checkout's Node. */
const plain = { PATH: '/usr/sbin:/usr/bin:/sbin:/bin', HOME: unpacked };

beforeAll(() => {
  buildPackages();
  for (const name of [agentName, brokerName])
    execFileSync('tar', ['-xzf', join(built, `${name}.tar.gz`)], { cwd: unpacked });
}, 180_000);
afterAll(() => rmSync(unpacked, { recursive: true, force: true }));

interface Box {
  dataDir: string;
  url: string;
  grpc: string;
  client: Farhand;
  /** Runs a verb. Resolves with standard output and standard error. */
  farhand(...args: string[]): Promise<string>;
}

/** Starts a broker from its package. */
async function startBox(...flags: string[]): Promise<Box> {
  const dataDir = temporaryFolder('packaged-broker');
  const where = ['--data-dir', dataDir, '--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0'];
  const broker = run(join(brokerHome, 'bin/farhand-broker'), [...where, ...flags]);
  const { http, grpc } = await received(broker, 'broker is up');
  const farhand = async (...args: string[]): Promise<string> => {
    const { stdout, stderr } = await execute(join(brokerHome, 'bin/farhand'), args, { env: plain });
    return args.includes('json') ? stdout : stdout + stderr;
  };
  const made = JSON.parse(
    await farhand('auth', 'create-key', '--data-dir', dataDir, '--name', 'test', '-o', 'json'),
  );
  const url = String(http);
  return {
    dataDir,
    url,
    grpc: String(grpc),
    client: new Farhand({ baseUrl: url, apiKey: made.key }),
    farhand,
  };
}

/** One broker for all tests that change nothing visible to other tests. */
const anyBox = shared(() => startBox());

function run(file: string, args: string[]): ChildProcess {
  const child = spawn(file, args, { env: plain, stdio: ['ignore', 'ignore', 'pipe'] });
  atEnd(() => child.kill('SIGKILL'));
  return child;
}

/** Resolves with the first line of a program's log that has this message. */
async function received(child: ChildProcess, message: string): Promise<Record<string, unknown>> {
  let text = '';
  for await (const chunk of child.stderr ?? []) {
    text += String(chunk);
    for (const line of text.split('\n').slice(0, -1)) {
      const found: Record<string, unknown> = line.startsWith('{') ? JSON.parse(line) : {};
      if (found.msg === message) return found;
    }
  }
  throw new Error(`the program ended before it logged "${message}": ${text}`);
}

describe('a broker from its package', () => {
  test('refuses file names that it does not serve, in every spelling', async () => {
    const { url } = await anyBox();
    for (const name of [
      'nothing.tar.gz',
      '..%2fpackage.json',
      '%2fetc%2fpasswd',
      '__proto__',
      'sha256sums',
      '.',
    ]) {
      const answer = await call(`${url}/packages/${name}`, 'GET');
      expect([name, answer.status >= 400 && answer.status < 500]).toEqual([name, true]);
    }
  });

  test('serves agent packages without a key, with the hashes of SHA256SUMS, and 304 if unchanged', async () => {
    const { url } = await anyBox();
    const sums = await (await fetch(`${url}/packages/SHA256SUMS`)).text();
    const [hash, name] = sums.trim().split(/\s+/);
    expect(name).toBe(`${agentName}.tar.gz`);
    const answer = await fetch(`${url}/packages/${name}`);
    expect(Number(answer.headers.get('content-length'))).toBe(statSync(join(built, `${name}`)).size);
    const digest = await crypto.subtle.digest('SHA-256', await answer.arrayBuffer());
    expect(Buffer.from(digest).toString('hex')).toBe(hash);
    const again = await fetch(`${url}/packages/${name}`, {
      headers: { 'If-None-Match': answer.headers.get('etag') ?? '' },
    });
    expect(again.status).toBe(304);
  });

  test('serves its reference page and its OpenAPI document', async () => {
    const { url } = await anyBox();
    for (const path of ['/docs', '/docs/page.js', '/docs/redoc.standalone.js', '/api/v1/openapi.json']) {
      expect([path, (await fetch(`${url}${path}`)).status]).toEqual([path, 200]);
    }
  });

  test('and an agent from its package link, run a command and open a terminal', async () => {
    const { client, grpc } = await anyBox();
    const { token } = await client.joinTokens.create({});
    const dataDir = temporaryFolder('packaged-agent');
    const where = ['--broker', grpc, '--join-token', token, '--data-dir', dataDir];
    const agent = run(join(agentHome, 'bin/farhand-agent'), where);
    await received(agent, 'linked');
    expect(readFileSync(`/proc/${agent.pid}/comm`, 'utf8')).toBe('farhand-agent\n');
    const machine_id = (await client.machines.list({ status: 'online' })).items[0]!.id;
    const command = await client.commands.create({ machine_id, command: 'echo "$0 $PATH $FARHAND_PROGRAM"' });
    expect(command.stdout).not.toContain(unpacked);
    expect(command.exit_code).toBe(0);
    const command_line = 'cat /proc/$PPID/comm; readlink /proc/$PPID/exe';
    const spawner = await client.commands.create({ machine_id, command: command_line });
    expect(spawner.stdout).toBe(`farhand-spawner\n${agentHome}/node\n`);
    // The spawner, which is the parent of commands, has loaded the addon for fast starts.
    const maps = await client.commands.create({ machine_id, command: 'cat /proc/$PPID/maps' });
    expect(maps.stdout).toContain('/koffi.node\n');
    const session = await client.sessions.create({ machine_id, shell: '/bin/sh' });
    expect(session.reason ?? null).toBeNull();
  });

  test('has a CLI that creates tokens while no broker runs, without an install line if the broker is not reachable', async () => {
    const box = await anyBox();
    const dataDir = temporaryFolder('quiet-broker');
    const token = JSON.parse(await box.farhand('join-tokens', 'create', '--data-dir', dataDir, '-o', 'json'));
    expect(token.token).toMatch(/^farhand_join_\w{43}\.[0-9a-f]{64}\.[0-9a-f]{64}$/);
    expect(token.install).toBeNull();
  });

  test.each([
    ['output', '--version >&-', 'standard output: EBADF: bad file descriptor, write'],
    ['input', 'login "$1" --key-stdin <&-', 'EBADF: bad file descriptor, read'],
  ])('has a CLI whose exit code is 1 if its standard %s is closed', async (_, line, message) => {
    const { url } = await anyBox();
    const program = join(brokerHome, 'bin/farhand');
    const closed = execute('sh', ['-c', `"$0" ${line}`, program, url], { env: plain });
    await expect(closed).rejects.toMatchObject({ code: 1, stderr: `farhand: ${message}\n` });
  });

  test('makes no install line for an unencrypted address', async () => {
    const { client } = await startBox('--public-url', 'http://farhand.example.org');
    const { install, install_missing } = await client.joinTokens.create({});
    expect(install).toBeNull();
    expect(install_missing).toContain('--tls');
  });

  test.each([
    ['http://127.0.0.1:0', 'Run this on this machine'],
    ['https://farhand.example.org', 'Run this on the new machine'],
  ])('with %s prints a line, and says on which machine to run it: %s', async (url, heading) => {
    const { farhand, dataDir } = await startBox(...(url.startsWith('https') ? ['--public-url', url] : []));
    const said = await farhand('join-tokens', 'create', '--data-dir', dataDir);
    expect(said).toContain(`\n${heading}`);
    expect(said.includes(`curl -fsSL --proto '=https' ${url}/install.sh`)).toBe(url.startsWith('https'));
  });

  test('makes no install line without a public address', async () => {
    const { farhand, dataDir } = await startBox('--http', '0.0.0.0:0', '--tls');
    const made = await farhand('join-tokens', 'create', '--data-dir', dataDir, '-o', 'json');
    const { install, install_missing } = JSON.parse(made);
    expect([install, install_missing]).toEqual([null, expect.stringContaining('--public-url')]);
  });

  test('puts the name of the machine into the line of a token for one machine, whatever the name', async () => {
    const { client } = await anyBox();
    const name = "it's $(one) --broker";
    const many = await client.joinTokens.create({ name: 'web', uses: 2 });
    expect(many.install).toMatch(/ \| sudo sh$/);
    const { install } = await client.joinTokens.create({ name });
    const echoed = install?.replace(/^.* \| sudo sh -s --/, "printf '%s\\n'");
    expect((await execute('sh', ['-c', echoed ?? ''])).stdout).toBe(`--name=${name}\n`);
  });

  needs('curl')('gives a line that fails where the script cannot be fetched', async () => {
    const { client } = await anyBox();
    const { install } = await client.joinTokens.create({});
    const line = install?.replace('/install.sh', '/nothing.sh').replace('sudo sh', 'sh') ?? '';
    await expect(execute('sh', ['-c', line])).rejects.toMatchObject({
      code: 1,
      stderr: expect.stringContaining('URL returned error'),
    });
  });

  test('does not start on a directory without packages', async () => {
    const broker = run(join(brokerHome, 'bin/farhand-broker'), [
      '--data-dir',
      temporaryFolder('none'),
      '--packages',
      '/tmp',
    ]);
    const [code] = await once(broker, 'exit');
    expect(code).toBe(78);
  });
});

/** Runs shell lines in a mount namespace where /opt, /usr/local/bin and /run are empty and private, as if without systemd. */
async function elsewhere(lines: string): Promise<{ code: number; text: string }> {
  const mounts = ['/opt', '/usr/local/bin', '/run'].map((at) => `mount -t tmpfs none ${at}`).join('; ');
  const child = spawn('unshare', ['--mount', 'sh', '-c', `${mounts}; exec 2>&1; ${lines}`], { env: plain });
  let text = '';
  child.stdout.setEncoding('utf8').on('data', (chunk: string) => {
    text += chunk;
  });
  const [code] = await once(child, 'close');
  return { code: Number(code), text };
}

describe.skipIf(!mayMount || lacks('unshare'))('the install line (needs root that may mount)', () => {
  const asRoot = (line: string, options: string): string =>
    line.replace(/ \| sudo sh$/, ` | sh -s -- ${options}`);

  test('refuses a token for other packages, a token without a hash of packages, and a changed agent', async () => {
    const packages = join(temporaryFolder('changed'), 'packages');
    cpSync(join(built, 'packages'), packages, { recursive: true });
    const { client, url } = await startBox('--packages', packages);
    const { token } = await client.joinTokens.create({});
    const attempt = async (given: string) =>
      elsewhere(
        `{ echo FARHAND_JOIN_TOKEN=${given}; curl -fsS ${url}/install.sh; } | sh -s -- --no-service; ls /opt/farhand-agent`,
      );
    expect((await attempt(token.replace(/.{64}$/, '0'.repeat(64)))).text).toMatch(
      /have changed since this join token was created/,
    );
    expect((await attempt(token.replace(/\..{64}$/, ''))).text).toMatch(/while the broker had no packages/);
    appendFileSync(join(packages, `${agentName}.tar.gz`), 'more');
    const { text } = await attempt(token);
    expect(text).toMatch(/is damaged: its SHA-256/);
    // The error is the only line of output: `ls` has listed no installed file.
    expect(text.trim().split('\n')).toHaveLength(1);
  });

  test('updates a machine that has joined with a token from before the broker’s upgrade, and no other machine', async () => {
    const packages = join(temporaryFolder('upgraded'), 'packages');
    cpSync(join(built, 'packages'), packages, { recursive: true });
    const { client } = await startBox('--packages', packages);
    const { token, install } = await client.joinTokens.create({});
    // A changed list of packages, as after an upgrade of the broker.
    const sums = readFileSync(join(packages, 'SHA256SUMS'), 'utf8');
    const [sum] = sums.split(' ');
    copyFileSync(join(packages, `${agentName}.tar.gz`), join(packages, 'farhand-agent-other.tar.gz'));
    rmSync(join(packages, 'SHA256SUMS'));
    writeFileSync(join(packages, 'SHA256SUMS'), `${sums}${sum}  farhand-agent-other.tar.gz\n`);
    const [, fingerprint] = token.split('.');
    const attempt = async (identity: string) => {
      const file = '/var/lib/farhand-agent/identity.json';
      const there = `mount -t tmpfs none /var/lib; mkdir /var/lib/farhand-agent; ${identity.replace('FILE', file)}`;
      return (await elsewhere(`${there}; ${asRoot(install ?? '', '--no-service')}`)).text;
    };
    const identityOf = (one: object): string => `echo '${JSON.stringify(one)}' > FILE`;
    for (const other of [
      'true',
      identityOf({ machine_id: 'mach_1', fingerprint: '0'.repeat(64) }),
      identityOf({ machine_id: null, fingerprint }),
      'mkfifo FILE',
      'ln -s /dev/zero FILE',
    ]) {
      expect([other, await attempt(other)]).toEqual([
        other,
        expect.stringContaining('have changed since this join token was created; create a new one'),
      ]);
    }
    const text = await attempt(identityOf({ machine_id: 'mach_1', fingerprint }));
    expect(text).toContain('updating it without the join token');
    expect(text).toContain(`farhand-agent ${version} is installed`);
  });

  test('runs nothing of an incomplete script, wherever it was cut off', async () => {
    const { url } = await anyBox();
    const script = await (await fetch(`${url}/install.sh`)).text();
    const file = join(temporaryFolder('cut'), 'install.sh');
    // Cuts the script at 12 places up to the end of its last function, and at every byte after that. Only the last
    // brace makes the script complete.
    const end = script.lastIndexOf('}');
    const last = script.lastIndexOf('\n}\n');
    const cuts = Array.from({ length: 12 }, (_, n) => Math.floor((last * (n + 1)) / 12));
    for (let cut = last; cut <= end; cut++) cuts.push(cut);
    for (const cut of cuts) {
      writeFileSync(file, script.slice(0, cut));
      const { text } = await elsewhere(`sh ${file} --no-service >/dev/null 2>&1; ls -A /opt`);
      expect([cut, text.trim()]).toEqual([cut, '']);
    }
  });

  test('installs the agent, and installs it again over itself', async () => {
    const { client } = await anyBox();
    const { install } = await client.joinTokens.create({});
    expect(install).toMatch(/^\{ echo FARHAND_JOIN_TOKEN=/);
    const line = asRoot(install ?? '', '--no-service');
    const left = 'mkdir /opt/farhand-agent/.new-killed';
    const look = 'farhand-agent --version; ls -A /opt/farhand-agent; readlink /usr/local/bin/farhand-agent';
    const { text } = await elsewhere(`${line} && ${left} && ${line} && PATH=/usr/local/bin:$PATH; ${look}`);
    const said = [
      `farhand-agent ${version} is installed: /usr/local/bin/farhand-agent`,
      expect.stringMatching(
        /^To start it, .*: farhand-agent --broker 127\.0\.0\.1:\d+ --join-token-file FILE$/,
      ),
      'FILE must contain the join token; it is needed at the first start only.',
    ];
    expect(text.trim().split('\n')).toEqual([
      ...said,
      ...said,
      version,
      expect.stringMatching(/^[\d.]+-\w+$/),
      'current',
      '/opt/farhand-agent/current/bin/farhand-agent',
    ]);
  });

  test('restores the old version if the new one cannot become a service', async () => {
    const { client } = await anyBox();
    const { install } = await client.joinTokens.create({});
    const good = asRoot(install ?? '', '--no-service');
    const bad = asRoot(install ?? '', '--no-such-flag');
    const look = 'ls -A /opt/farhand-agent; readlink /opt/farhand-agent/current';
    // The directory makes the script believe that systemd runs.
    const { code, text } = await elsewhere(
      `mkdir -p /run/systemd/system; ${good} > /dev/null; ${look}; ${bad} || { ${look}; exit 5; }`,
    );
    const lines = text.trim().split('\n');
    expect([code, text]).toEqual([5, expect.stringContaining('the previous version was restored')]);
    expect(lines.slice(-3)).toEqual(lines.slice(0, 3));
    expect(lines.at(-1)).toBe(lines.at(-3));
  });
});

describe('the Debian packages', () => {
  const debArch = arch === 'x64' ? 'amd64' : 'arm64';

  test.each(['farhand-agent', 'farhand-broker'])(
    '%s contains its programs, belongs to root and runs where it is installed',
    async (name) => {
      const deb = join(built, `${name}_${version}_${debArch}.deb`);
      const { stdout: fields } = await execute('dpkg-deb', [
        '--field',
        deb,
        'Package',
        'Version',
        'Architecture',
      ]);
      expect(fields).toBe(`Package: ${name}\nVersion: ${version}\nArchitecture: ${debArch}\n`);
      const { stdout: files } = await execute('dpkg-deb', ['--contents', deb]);
      expect(files.split('\n').filter((line) => line && !line.includes(' root/root '))).toEqual([]);
      const folder = temporaryFolder('deb');
      await execute('dpkg-deb', ['--extract', deb, folder]);
      const units = [join(folder, 'usr/lib', name), name === 'farhand-agent' ? agentHome : brokerHome];
      for (const home of units)
        expect(readFileSync(join(home, `${name}.service`), 'utf8')).toContain('@USER@');
      const { stdout } = await execute(join(folder, 'usr/bin', name), ['--version'], { env: plain });
      expect(stdout).toBe(`${version}\n`);
      const share = readdirSync(join(folder, 'usr/share'), { recursive: true, encoding: 'utf8' });
      const cli = [
        'bash-completion/completions/farhand',
        'man/man1/farhand.1.gz',
        'man/man1/farhand-exec.1.gz',
      ];
      const wanted = [`man/man8/${name}.8.gz`, ...(name === 'farhand-broker' ? cli : [])];
      expect(share).toEqual(expect.arrayContaining(wanted));
      expect(existsSync(join(folder, 'usr/lib', name, 'share'))).toBe(false);
      const { stdout: received } = await execute('dpkg-deb', ['--field', deb, 'Installed-Size']);
      const { stdout: used } = await execute('du', ['-sk', '--apparent-size', folder]);
      expect(Math.abs(Number(received) / Number.parseInt(used, 10) - 1)).toBeLessThan(0.02);
    },
  );
});

describe('the npm tarball', () => {
  const isCheckout = has('git') && existsSync(join(root, '.git'));

  /** Returns a copy of the files in git, without generated files. */
  async function freshClone(): Promise<string> {
    const clone = temporaryFolder('clone');
    const { stdout } = await execute('git', ['ls-files', '-z'], { cwd: root });
    const files = stdout.split('\0').filter((name) => name && existsSync(join(root, name)));
    for (const name of files) cpSync(join(root, name), join(clone, name));
    symlinkSync(join(root, 'node_modules'), join(clone, 'node_modules'));
    return clone;
  }

  /** The path of the tarball, as scripts/package.ts prints it. */
  const tarball = shared(async () => {
    const cwd = isCheckout ? await freshClone() : root;
    const folder = temporaryFolder('tarball');
    const make = ['scripts/package.ts', '--only', 'npm', '--to', folder];
    const { stdout } = await execute(process.execPath, make, { cwd });
    expect(stdout).toBe(`${join(folder, `farhand-${version}.tgz`)}\n`);
    return stdout.trim();
  });

  test.skipIf(!isCheckout)(
    'is built in a fresh clone without generated files (needs git)',
    async () => {
      expect(statSync(await tarball()).size).toBeGreaterThan(0);
    },
    180_000,
  );

  test('installs without a network, runs, and has types', async () => {
    const folder = temporaryFolder('npm');
    writeFileSync(join(folder, 'package.json'), '{"name": "consumer", "private": true, "type": "module"}');
    const env = { ...process.env, npm_config_cache: join(folder, 'cache') };
    const npm = ['install', '--offline', '--omit=optional', '--no-audit', '--no-fund', await tarball()];
    await execute('npm', npm, { cwd: folder, env });
    const { stdout: received } = await execute('npm', ['exec', '--offline', '--', 'farhand', '--version'], {
      cwd: folder,
      env,
    });
    expect(received.trim()).toBe(version);
    const home = join(folder, 'node_modules/farhand');
    const { man } = JSON.parse(readFileSync(join(home, 'package.json'), 'utf8'));
    expect(man).toEqual(
      expect.arrayContaining(['./share/man/man1/farhand.1', './share/man/man8/farhand-agent.8']),
    );
    for (const page of man) expect(readFileSync(join(home, page), 'utf8')).toMatch(/^\.TH FARHAND/);
    for (const name of ['farhand-agent', 'farhand-broker']) {
      const { stdout } = await execute(join(folder, 'node_modules/.bin', name), ['--version'], { env });
      expect([name, stdout.trim()]).toEqual([name, version]);
    }
    // Simulates an older Node, which lacks modules that the programs load.
    const old = ['--no-experimental-sqlite', '--import', `data:text/javascript,${olderNode}`];
    for (const name of ['farhand', 'farhand-agent', 'farhand-broker']) {
      const bin = join(folder, 'node_modules/.bin', name);
      await expect(execute(process.execPath, [...old, bin, '--version'])).rejects.toMatchObject({
        code: 1,
        stderr: expect.stringMatching(
          new RegExp(`^${name}: Node v20.20.2 is not supported; install Node 22.*\\n$`),
        ),
      });
      // An older Node must be able to parse these files, and to report its version. So they must not contain newer
      // syntax.
      expect(readFileSync(bin, 'utf8')).not.toMatch(/\bawait\b|\?\?|^import /m);
    }
    mkdirSync(join(folder, 'node_modules/@types'), { recursive: true });
    cpSync(join(root, 'node_modules/@types/node'), join(folder, 'node_modules/@types/node'), {
      recursive: true,
    });
    cpSync(join(root, 'node_modules/undici-types'), join(folder, 'node_modules/undici-types'), {
      recursive: true,
    });
    writeFileSync(join(folder, 'consumer.ts'), consumer);
    const strict = {
      strict: true,
      module: 'nodenext',
      target: 'es2024',
      lib: ['es2024'],
      types: ['node'],
      noEmit: true,
    };
    writeFileSync(
      join(folder, 'tsconfig.json'),
      JSON.stringify({ compilerOptions: strict, files: ['consumer.ts'] }),
    );
    await execute(join(root, 'node_modules/.bin/tsc'), ['-p', folder]).catch((error: { stdout: string }) => {
      throw new Error(error.stdout);
    });
    const { stdout } = await execute(process.execPath, ['consumer.ts'], { cwd: folder, env });
    expect(stdout).toBe('true\n');
  });

  test('contains no test, no source and no path of this machine', async () => {
    const { stdout } = await execute('tar', ['-tzf', await tarball()]);
    const names = stdout
      .trim()
      .split('\n')
      .map((name) => name.split('/')[1]);
    expect(new Set(names)).toEqual(
      new Set([
        'CHANGELOG.md',
        'LICENSE',
        'README.md',
        'SECURITY.md',
        'THIRD-PARTY.txt',
        'bin',
        'console',
        'docs',
        'farhand-agent-upgrade.path',
        'farhand-agent-upgrade.service',
        'farhand-agent.service',
        'farhand-broker.service',
        'install.sh',
        'lib',
        'package.json',
        'proto',
        'share',
        'types',
      ]),
    );
    const lib = join(agentHome, 'lib');
    const code = readdirSync(lib).map((file) => readFileSync(join(lib, file), 'utf8'));
    for (const text of code) expect(text).not.toContain(root);
    // The protos are in the bundle in parsed form, so no program reads a .proto file of ours at its start.
    expect(code.filter((text) => text.includes('link/v1/link'))).toEqual([]);
  });
});

const olderNode = "Object.defineProperty(process,'version',{value:'v20.20.2'})";

/** A TypeScript program that uses the package. The line with @ts-expect-error proves that the types are checked. */
const consumer = `import { Farhand, FarhandError } from 'farhand';
import { connect, FarhandError as Same } from 'farhand/grpc';

const client = new Farhand({ baseUrl: 'http://127.0.0.1:1', apiKey: 'none' });
export async function names(): Promise<string[]> {
  const { items } = await client.machines.list({ tags: 'web' });
  return items.map((machine) => machine.name);
}
// @ts-expect-error: machines have no colour
export const colour = async () => (await client.machines.list({})).items[0]?.colour;
export async function follow(): Promise<void> {
  const streams = connect({ address: '127.0.0.1:1', ca: '', apiKey: 'none' });
  for await (const { output } of streams.followCommand({ command_id: 'cmd_1' })) console.log(output?.data?.length);
}
console.log(FarhandError === Same);
`;
