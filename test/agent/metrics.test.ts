// The agent's metrics: correct values on this machine, and no failure on machines with broken files or disks.
import { readFileSync } from 'node:fs';
import os from 'node:os';
import { afterEach, expect, test } from 'vitest';
import { MetricsReader, type Sources } from '../../agent/metrics.ts';
import type { Metrics } from '../../proto/types/farhand/agent/v1/Metrics.ts';
import type { Space } from '../../proto/types/farhand/agent/v1/Space.ts';
import { methods, smallMessageBytes } from '../../shared/agent-rpcs.ts';
import { setClock } from '../../shared/clock.ts';

afterEach(() => setClock());

const sound = { frsize: 4096, bsize: 1, blocks: 1000, bfree: 500, bavail: 400 };
const soundSpace = { total: 4_096_000, used: 2_048_000, free: 2_048_000, available: 1_638_400 };

interface Machine {
  proc?: Record<string, string>;
  statfs?: Sources['statfs'];
}

/** A machine with only these files. */
function machine({ proc = {}, statfs = async () => sound }: Machine): Sources {
  return {
    statfs,
    read: async (path) => {
      const text = proc[path];
      if (text === undefined) throw new Error(`${path} is missing`);
      return text;
    },
  };
}

/** A clock that only `pass` moves. It then fires the timers that are due. */
function stoppedClock(): { pass(ms: number): void; now: number } {
  const timers = new Set<{ at: number; run: () => void }>();
  const clock = {
    now: 1_000,
    pass(ms: number) {
      clock.now += ms;
      for (const timer of [...timers]) {
        if (timer.at <= clock.now && timers.delete(timer)) timer.run();
      }
    },
  };
  setClock({
    now: () => 1_700_000_000_000 + clock.now,
    monotonic: () => clock.now,
    after(ms, run) {
      const timer = { at: clock.now + ms, run };
      timers.add(timer);
      return () => timers.delete(timer);
    },
  });
  return clock;
}

const mountsOf = (metrics: Metrics): string[] => metrics.disks!.map(({ mount }) => mount!);
/** Resolves after all callbacks that are already due. */
const settle = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));

const mountinfo = (
  ...mounts: [path: string, type: string, source: string, device: string, root?: string][]
): string =>
  mounts
    .map(([path, type, source, device, root = '/'], id) =>
      [id + 1, 0, device, root, path, 'rw', 'shared:1', '-', type, source, 'rw'].join(' '),
    )
    .join('\n');

test('a machine without /proc still reports memory and the disk of /', async () => {
  const metrics = await new MetricsReader(machine({})).report();
  expect(metrics).toMatchObject({
    cpu_usage: 0,
    memory: { total: os.totalmem() },
    disk: soundSpace,
    network: [],
  });
  expect(mountsOf(metrics)).toEqual(['/']);
});

test('a disk that fails is left out, even that of /', async () => {
  const failing = machine({ statfs: () => Promise.reject(new Error('EIO')) });
  const metrics = await new MetricsReader(failing).report();
  expect(metrics.disks).toEqual([]);
  expect(metrics).not.toHaveProperty('disk');
});

test('a file system that hangs is left out after a second, and is not queried again before it answers', async () => {
  const clock = stoppedClock();
  const asked: string[] = [];
  let answer = (): void => undefined;
  const hangs = new Promise<typeof sound>((resolve) => {
    answer = () => resolve(sound);
  });
  const proc = {
    '/proc/self/mountinfo': mountinfo(
      ['/', 'ext4', '/dev/sda1', '8:1'],
      ['/mnt/a', 'nfs4', 'dead:/a', '0:50'],
      ['/mnt/b', 'nfs4', 'dead:/b', '0:51'],
      ['/srv', 'xfs', '/dev/sdb1', '8:17'],
    ),
  };
  const statfs: Sources['statfs'] = (mount) => {
    asked.push(mount);
    return mount === '/mnt/a' ? hangs : Promise.resolve(sound);
  };
  const metrics = new MetricsReader(machine({ proc, statfs }));
  const first = metrics.report();
  // A second report at the same time waits for the first query of the hung disk, and starts no other.
  const second = metrics.report();
  await settle();
  clock.pass(999);
  await settle();
  expect(asked.filter((mount) => mount === '/mnt/a')).toEqual(['/mnt/a']);
  clock.pass(1);
  expect(mountsOf(await first)).toEqual(['/', '/mnt/b', '/srv']);
  expect(mountsOf(await second)).toEqual(['/', '/mnt/b', '/srv']);
  expect(mountsOf(await metrics.report())).toEqual(['/', '/mnt/b', '/srv']);
  expect(asked.filter((mount) => mount === '/mnt/a')).toEqual(['/mnt/a']);
  answer();
  await settle();
  expect(mountsOf(await metrics.report())).toEqual(['/', '/mnt/a', '/mnt/b', '/srv']);
});

test('disks that hang block at most two threads', async () => {
  const clock = stoppedClock();
  const asked: string[] = [];
  const letters = ['a', 'b', 'c', 'd'];
  const disks = letters.map((name, n) => [`/${name}`, 'ext4', `/dev/${name}`, `8:${n}`] as const);
  const proc = { '/proc/self/mountinfo': mountinfo(...disks.map((disk): [...typeof disk] => [...disk])) };
  const statfs: Sources['statfs'] = (mount) => {
    asked.push(mount);
    return new Promise(() => undefined);
  };
  const report = new MetricsReader(machine({ proc, statfs })).report();
  for (let second = 0; second < 5; second += 1) {
    await settle();
    clock.pass(1_000);
  }
  expect((await report).disks).toEqual([]);
  expect(asked).toEqual(['/', '/a']);
});

test('the file system of / is measured while two others hang', async () => {
  const clock = stoppedClock();
  const proc = {
    '/proc/self/mountinfo': mountinfo(
      ['/', 'ext4', '/dev/sda1', '8:1'],
      ['/mnt/a', 'nfs4', 'dead:/a', '0:50'],
      ['/mnt/b', 'nfs4', 'dead:/b', '0:51'],
    ),
  };
  const statfs: Sources['statfs'] = (mount) =>
    mount === '/' ? Promise.resolve(sound) : new Promise(() => undefined);
  const metrics = new MetricsReader(machine({ proc, statfs }));
  const first = metrics.report();
  for (let second = 0; second < 3; second += 1) {
    await settle();
    clock.pass(1_000);
  }
  expect(mountsOf(await first)).toEqual(['/']);
  const { disk, disks } = await metrics.report();
  expect([disk?.total, disks?.map(({ mount }) => mount)]).toEqual([expect.any(Number), ['/']]);
});

test('a disk that hangs delays one report only', async () => {
  const clock = stoppedClock();
  const proc = {
    '/proc/self/mountinfo': mountinfo(['/', 'ext4', '/dev/a', '8:1'], ['/dead', 'ext4', '/dev/b', '8:2']),
  };
  const statfs: Sources['statfs'] = (mount) =>
    mount === '/dead' ? new Promise(() => undefined) : Promise.resolve(sound);
  const metrics = new MetricsReader(machine({ proc, statfs }));
  const first = metrics.report();
  await settle();
  clock.pass(1_000);
  expect(mountsOf(await first)).toEqual(['/']);
  // The clock stands still, so a report that waited for a timer would never end.
  expect(mountsOf(await metrics.report())).toEqual(['/']);
});

test('slow file servers are left out before the report takes too long for the hello, and local disks are not', async () => {
  const clock = stoppedClock();
  const begun = clock.now;
  const servers = Array.from(
    { length: 20 },
    (_, n) => [`/mnt/${n}`, 'nfs4', `slow:/${n}`, `0:${n}`] as const,
  );
  const proc = {
    '/proc/self/mountinfo': mountinfo(
      ['/', 'ext4', '/dev/sda1', '8:1'],
      ...servers.map((one): [...typeof one] => [...one]),
      ['/srv', 'xfs', '/dev/sdb1', '8:17'],
    ),
  };
  const statfs: Sources['statfs'] = async (mount) => {
    if (mount.startsWith('/mnt')) clock.pass(800);
    return sound;
  };
  const report = await new MetricsReader(machine({ proc, statfs })).report();
  expect(mountsOf(report)).toEqual(['/', '/mnt/0', '/mnt/1', '/mnt/10', '/mnt/11', '/srv']);
  expect(clock.now - begun).toBe(3_200);
});

test('a machine with thousands of mounts and interfaces still fits one small message', async () => {
  const many = Array.from({ length: 3_000 }, (_, n) => n);
  const mounts = many.map((n): [string, string, string, string] => [
    `/mnt/${String(n).padEnd(240, 'x')}`,
    'ext4',
    '/dev/x',
    `9:${n}`,
  ]);
  const proc = {
    '/proc/self/mountinfo': `${mountinfo(...mounts)}\n${mountinfo([`/${'a'.repeat(300)}`, 'ext4', '/dev/y', '8:1'])}`,
    '/proc/net/dev': many.map((n) => `  tap${n}: 1 0 0 0 0 0 0 0 2 0`).join('\n'),
  };
  const metrics = await new MetricsReader(machine({ proc })).report();
  expect(mountsOf(metrics).every((mount) => mount.length < 256)).toBe(true);
  const size = methods.get('GetMetrics')!.encodeResponse({ metrics }).length;
  expect(size).toBeGreaterThan(10_000);
  expect(size).toBeLessThan(smallMessageBytes / 2);
});

test('every real file system is listed once, without pseudo file systems, images, bind mounts and aliases', async () => {
  const proc = {
    '/proc/self/mountinfo': mountinfo(
      ['/proc', 'proc', 'proc', '0:1'],
      ['/', 'overlay', 'overlay', '0:40'],
      ['/dev/shm', 'tmpfs', 'tmpfs', '0:2'],
      ['/data/bind', 'ext4', '/dev/sda1', '8:1', '/some/part'],
      ['/mnt/whole\\040disk', 'ext4', '/dev/sda1', '8:1'],
      ['/snap/core', 'squashfs', '/dev/loop0', '7:0'],
      ['/tank/x', 'zfs', 'tank/x', '0:60'],
      ['/run/user/0/gvfs', 'fuse.gvfsd-fuse', 'gvfsd', '0:61'],
      ['/ssh', 'fuse.sshfs', 'host:', '0:62'],
      ['/again', 'zfs', 'tank/x', '0:60', '/'],
      ['/hidden', 'xfs', '/dev/sdc', '8:3'],
      ['/hidden', 'tmpfs', 'tmpfs', '0:63'],
    ),
  };
  const metrics = await new MetricsReader(machine({ proc })).report();
  expect(metrics.disks!.map(({ mount, filesystem }) => [mount, filesystem])).toEqual([
    ['/', 'overlay'],
    ['/again', 'zfs'],
    ['/mnt/whole disk', 'ext4'],
    ['/ssh', 'fuse.sshfs'],
  ]);
});

test('CPU is the share of all cores since the last report; waiting for disks is idle, guests count once', async () => {
  const clock = stoppedClock();
  const proc: Record<string, string> = {};
  // Columns: user nice system idle iowait irq softirq steal guest
  const times = (...ticks: number[]): void => {
    proc['/proc/stat'] = `cpu  ${ticks.join(' ')} 0\ncpu0 1 2\ncpu1 1 2\nintr 5`;
  };
  times(1_000, 0, 1_000, 8_000, 0, 0, 0, 0, 500);
  const metrics = new MetricsReader(machine({ proc }));
  await settle();
  // Too little time has passed since the last report for a percentage.
  times(1_010, 0, 1_000, 8_000, 0, 0, 0, 0, 500);
  clock.pass(50);
  expect(await metrics.report()).toMatchObject({ cpu_usage: 0, cpu_cores: 2 });
  times(1_020, 0, 1_010, 8_050, 10, 0, 5, 5, 520);
  clock.pass(50);
  expect(await metrics.report()).toMatchObject({ cpu_usage: 40 });
  clock.pass(99);
  expect(await metrics.report()).toMatchObject({ cpu_usage: 40 });
  times(1_020, 0, 1_010, 8_150, 10, 0, 5, 5, 520);
  clock.pass(1);
  expect(await metrics.report()).toMatchObject({ cpu_usage: 0 });
  // The counters decrease when a core goes offline.
  times(500, 0, 500, 4_000, 10, 0, 5, 5, 520);
  clock.pass(1_000);
  expect(await metrics.report()).toMatchObject({ cpu_usage: 0 });
});

test('reclaimable memory counts as free, not only unused memory', async () => {
  const { memory } = await new MetricsReader().report();
  const available = /^MemAvailable: +(\d+) kB$/m.exec(readFileSync('/proc/meminfo', 'utf8'))?.[1];
  expect(memory!.total).toBe(os.totalmem());
  // Tolerates a difference, because other programs allocate and free memory between the two reads.
  expect(Math.abs(Number(memory!.free) - 1024 * Number(available))).toBeLessThan(0.05 * os.totalmem());
});

test('network counters leave out the loopback and the interfaces of containers', async () => {
  const proc = {
    '/proc/net/dev': readFileSync('/proc/net/dev', 'utf8')
      .split('\n')
      .slice(0, 2)
      .join('\n')
      .concat(`
    lo: 9 9 0 0 0 0 0 0 9 9 0 0 0 0 0 0
  eth0:5000000000 7 0 0 0 0 0 0 300 4 0 0 0 0 0 0
vethab1: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0
 wg0:     20 1 0 0 0 0 0 0 30 1 0 0 0 0 0 0
`),
  };
  const { network } = await new MetricsReader(machine({ proc })).report();
  expect(network).toEqual([
    { name: 'eth0', received_bytes: 5_000_000_000, sent_bytes: 300 },
    { name: 'wg0', received_bytes: 20, sent_bytes: 30 },
  ]);
});

test('the time is the system’s, and the uptime of the agent counts from its start', async () => {
  const clock = stoppedClock();
  const metrics = new MetricsReader(machine({}));
  clock.pass(2_500);
  expect(await metrics.report()).toMatchObject({ recorded_at_ms: 1_700_000_003_500, agent_uptime_s: 2.5 });
});

test('this machine reports right numbers, and used + free is always the total', async () => {
  const metrics = await new MetricsReader().report();
  const spaces = [
    metrics.memory,
    metrics.disk,
    ...metrics.disks!.map(({ space }) => space),
  ] as Required<Space>[];
  expect(spaces.length).toBeGreaterThanOrEqual(3);
  for (const { total, used, free } of spaces) {
    expect(Number(used) + Number(free)).toBe(total);
    expect([used, free].every((part) => Number(part) >= 0 && Number(part) <= Number(total))).toBe(true);
  }
  expect(metrics.memory!.total).toBe(os.totalmem());
  expect(metrics.cpu_cores).toBe(os.cpus().length);
  expect(metrics.load_average).toHaveLength(3);
  expect(metrics.agent_rss).toBeGreaterThan(10_000_000);
  expect(metrics.uptime_s).toBeGreaterThan(1);
  expect(mountsOf(metrics)[0]).toBe('/');
});

test('CPU percent is above zero while this process is busy', async () => {
  const metrics = new MetricsReader();
  await metrics.report();
  for (const end = performance.now() + 300; performance.now() < end; ) JSON.stringify({ busy: true });
  const { cpu_usage } = await metrics.report();
  expect(cpu_usage).toBeGreaterThan(0);
  expect(cpu_usage).toBeLessThanOrEqual(100);
});
