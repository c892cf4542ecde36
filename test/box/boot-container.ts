// Boots a Debian in a container, for tests that need a real systemd. Its base system is stored beside the checkout.
import { type ChildProcess, execFile, spawn } from 'node:child_process';
import {
  chmodSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readFileSync,
  renameSync,
  rmdirSync,
  rmSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { afterAll, beforeAll, beforeEach } from 'vitest';

const checkout = join(import.meta.dirname, '../..');
const base = join(process.env.FARHAND_TEST_DISK ?? tmpdir(), 'farhand-test-base-bookworm');
const packages = 'systemd,systemd-sysv,dbus,curl,ca-certificates';
const bootMs = 60_000;
/** The compile cache lets programs start from their sources in a third of the time. */
const environment = [
  'PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin',
  'LC_ALL=C.UTF-8',
  'NODE_COMPILE_CACHE=/var/tmp/node',
];

export interface Ran {
  code: number;
  stdout: string;
  stderr: string;
}

export interface Container {
  /** Path of the container's file system on this machine. */
  root: string;
  /** Runs a program in the container as root. */
  run(...command: string[]): Promise<Ran>;
  /** Reboots. Resolves when the container has booted again. */
  reboot(): Promise<void>;
  close(): Promise<void>;
}

/** Runs a program to its end. Never rejects. */
export function execute(file: string, args: string[], timeout = 120_000): Promise<Ran> {
  return new Promise((resolve) => {
    execFile(file, args, { timeout, maxBuffer: 64 * 1024 * 1024 }, (error, stdout, stderr) => {
      const code = typeof error?.code === 'number' ? error.code : error ? -1 : 0;
      resolve({ code, stdout, stderr: stderr || (error?.message ?? '') });
    });
  });
}

/** Returns one container for all tests of a file. If it cannot boot, the tests are skipped with the reason. */
export function containerOfFile(): Omit<Container, 'close'> {
  let found: Container | string = 'is not booted yet';
  const box = (): Container => {
    if (typeof found === 'string') throw new Error(found);
    return found;
  };
  beforeAll(async () => {
    found = await bootContainer();
    if (typeof found === 'string') console.log(`skipped: ${found}`);
  }, 400_000);
  beforeEach((context) => {
    if (typeof found === 'string') context.skip(found);
  });
  afterAll(async () => {
    if (typeof found !== 'string') await found.close();
  });
  return {
    get root() {
      return box().root;
    },
    run: (...command) => box().run(...command),
    reboot: () => box().reboot(),
  };
}

/**
 * Boots a container with this checkout at /opt/farhand, read-only, on the network of this machine. Returns
 * the reason if that fails.
 */
async function bootContainer(): Promise<Container | string> {
  if (process.getuid?.() !== 0) return 'needs root';
  const cgroup = cgroupMount();
  if (!cgroup) return 'needs cgroup v2';
  for (const name of ['systemd-nspawn', 'debootstrap', 'nsenter']) {
    if ((await execute('which', [name])).code !== 0) return `needs ${name}`;
  }
  const missing = await makeBase();
  if (missing) return missing;
  const home = mkdtempSync(join(tmpdir(), 'farhand-container-'));
  const box = new Box(home, join(cgroup, home.slice(tmpdir().length + 1)));
  const failed = await box.start();
  if (failed === undefined) return box;
  await box.close();
  return failed;
}

function cgroupMount(): string | undefined {
  const lines = readFileSync('/proc/self/mountinfo', 'utf8').split('\n');
  return lines.find((line) => line.includes(' - cgroup2 '))?.split(' ')[4];
}

/** Makes the base system, once per machine. That takes forty seconds. Returns the reason if it fails. */
async function makeBase(): Promise<string | undefined> {
  if (existsSync(base)) return undefined;
  const fresh = mkdtempSync(`${base}-`);
  const { code, stderr, stdout } = await execute(
    'debootstrap',
    ['--variant=minbase', `--include=${packages}`, 'bookworm', fresh],
    300_000,
  );
  chmodSync(fresh, 0o755);
  try {
    if (code === 0) renameSync(fresh, base);
  } catch {
    // Another run has made the base system in the meantime.
  }
  rmSync(fresh, { recursive: true, force: true });
  return existsSync(base) ? undefined : `debootstrap failed: ${(stderr || stdout).trim().slice(-200)}`;
}

class Box implements Container {
  readonly root: string;
  readonly #home: string;
  readonly #cgroup: string;
  #nspawn: ChildProcess | undefined;

  constructor(home: string, cgroup: string) {
    this.#home = home;
    this.#cgroup = cgroup;
    this.root = join(home, 'root');
  }

  async start(): Promise<string | undefined> {
    const [upper, work] = [join(this.#home, 'upper'), join(this.#home, 'work')];
    for (const directory of [upper, work, this.root]) mkdirSync(directory);
    const layers = `lowerdir=${base},upperdir=${upper},workdir=${work}`;
    const mounted = await execute('mount', ['-t', 'overlay', 'overlay', '-o', layers, this.root]);
    // An overlay cannot be mounted on another overlay, which many containers have as their file system. The base system
    // is then copied.
    if (mounted.code !== 0) await execute('cp', ['-a', `${base}/.`, this.root]);
    mkdirSync(this.#cgroup);
    return await this.#boot();
  }

  run(...command: string[]): Promise<Ran> {
    const init = String(this.#init() ?? 0);
    return execute('nsenter', ['--all', `--target=${init}`, 'env', '-i', ...environment, ...command]);
  }

  async reboot(): Promise<void> {
    const ended = new Promise((resolve) => this.#nspawn?.once('exit', resolve));
    await this.run('systemctl', 'reboot');
    // For a reboot nspawn exits, so the test starts the container again.
    await ended;
    const failed = await this.#boot();
    if (failed) throw new Error(failed);
  }

  async close(): Promise<void> {
    const [nspawn, init] = [this.#nspawn, this.#init()];
    const ended = new Promise((resolve) => nspawn?.once('exit', resolve));
    // When the first process of a PID namespace is killed, the kernel kills all its other processes.
    if (init) process.kill(init, 'SIGKILL');
    if (nspawn && nspawn.exitCode === null && nspawn.signalCode === null) {
      await Promise.race([ended, sleep(5_000, undefined, { ref: false })]);
      nspawn.kill('SIGKILL');
    }
    await execute('umount', ['--recursive', this.root]);
    await execute('find', [this.#cgroup, '-depth', '-type', 'd', '-exec', 'rmdir', '{}', ';']);
    rmSync(this.#home, { recursive: true, force: true, maxRetries: 5 });
    try {
      rmdirSync(`/run/systemd/nspawn/propagate/box${process.pid}`);
    } catch {
      // The process has already ended.
    }
  }

  /** Returns the first process of the container, which is the only child of nspawn. */
  #init(): number | undefined {
    try {
      const text = readFileSync(`/proc/${this.#nspawn?.pid}/task/${this.#nspawn?.pid}/children`, 'utf8');
      return Number(text.trim().split(' ')[0]) || undefined;
    } catch {
      return undefined;
    }
  }

  async #boot(): Promise<string | undefined> {
    const options = [
      '--quiet',
      '--boot',
      '--register=no',
      '--keep-unit',
      '--console=pipe',
      '--link-journal=no',
    ];
    const own = [
      `--directory=${this.root}`,
      `--machine=box${process.pid}`,
      `--bind-ro=${checkout}:/opt/farhand`,
    ];
    // Moves nspawn to a separate cgroup first, because it creates cgroups with fixed names below its own.
    const script = 'echo $$ > "$0/cgroup.procs" && exec systemd-nspawn "$@"';
    this.#nspawn = spawn('/bin/sh', ['-c', script, this.#cgroup, ...options, ...own], {
      env: { ...process.env, SYSTEMD_NSPAWN_UNIFIED_HIERARCHY: '1' },
      stdio: ['ignore', 'pipe', 'pipe'],
    });
    let output = '';
    for (const stream of [this.#nspawn.stdout, this.#nspawn.stderr]) {
      stream?.on('data', (chunk: Buffer) => {
        output = (output + chunk.toString()).slice(-300);
      });
    }
    for (const until = Date.now() + bootMs; Date.now() < until; await sleep(100)) {
      if (this.#nspawn.exitCode !== null) break;
      if (this.#init() === undefined) continue;
      const { stdout } = await this.run('systemctl', 'is-system-running');
      if (/^(running|degraded)/.test(stdout)) return undefined;
    }
    return `no container boots here: ${output.trim()}`;
  }
}
