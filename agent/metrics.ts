// Measures CPU, memory, disks and network of the machine, cheaply enough for every heartbeat to the broker.
import type { StatsFs } from 'node:fs';
import { readFile, statfs } from 'node:fs/promises';
import os from 'node:os';
import type { Disk } from '../proto/types/farhand/agent/v1/Disk.ts';
import type { Metrics } from '../proto/types/farhand/agent/v1/Metrics.ts';
import type { NetworkInterface } from '../proto/types/farhand/agent/v1/NetworkInterface.ts';
import type { Space } from '../proto/types/farhand/agent/v1/Space.ts';
import { endsWithin, monotonic, now } from '../shared/clock.ts';
import { remoteFileSystems } from '../shared/network-file-system-types.ts';
import { residentBytes } from '../shared/v8-garbage-collection.ts';

/** The system calls by which metrics are measured. Tests replace them to simulate broken machines. */
export interface Sources {
  /** Returns the text of a file of /proc. */
  read(path: string): Promise<string>;
  statfs(mount: string): Promise<Pick<StatsFs, 'frsize' | 'bsize' | 'blocks' | 'bfree' | 'bavail'>>;
}

/** Maximum number of entries in each list of a report. A report must fit into a message of 64 KiB. */
const longestList = 64;
/**
 * Maximum number of characters in a mount path. Mounts with longer paths are left out, so that a report fits into a
 * message of 64 KiB.
 */
const longestMount = 255;
/** Milliseconds in which a file system must answer. */
const diskLimit = 1_000;
/**
 * Milliseconds after which a report leaves out the remaining file systems, because the hello contains a report, and the
 * broker waits only 5 s for the hello.
 */
const disksLimit = 3_000;
/**
 * Shortest time in milliseconds between two measurements of CPU usage. A shorter one would be inexact, because the
 * kernel counts CPU time in ticks of 10 ms.
 */
const shortestWindow = 100;

const system: Sources = { read: (path) => readFile(path, 'utf8'), statfs: (mount) => statfs(mount) };

export class MetricsReader {
  readonly #read: Sources['read'];
  readonly #disks: Disks;
  readonly #opened = monotonic();
  #usage = 0;
  #usageAt = monotonic();
  #cpuTimes: Promise<CpuTimes>;

  constructor({ read, statfs }: Sources = system) {
    this.#read = (path) => read(path).catch(() => '');
    this.#disks = new Disks(statfs);
    this.#cpuTimes = this.#readCpuTimes();
  }

  async report(): Promise<Metrics> {
    const [cpu_cores, mounts, network] = await Promise.all([
      this.#measureCpu(),
      this.#read('/proc/self/mountinfo'),
      this.#read('/proc/net/dev'),
    ]);
    const disks = await this.#disks.report(mountsOf(mounts));
    const root = disks.find(({ mount }) => mount === '/')?.space;
    return {
      recorded_at_ms: now(),
      uptime_s: os.uptime(),
      cpu_usage: this.#usage,
      cpu_cores,
      // freemem() is MemAvailable of /proc/meminfo, which counts reclaimable memory as free.
      memory: spaceOf(os.totalmem(), os.freemem()),
      ...(root && { disk: root }),
      disks,
      load_average: os.loadavg(),
      network: networkOf(network),
      agent_rss: residentBytes() ?? 0,
      agent_uptime_s: (monotonic() - this.#opened) / 1000,
    };
  }

  /**
   * Measures the CPU usage since the last measurement, or since this MetricsReader was created. Returns the number of
   * cores.
   */
  async #measureCpu(): Promise<number> {
    const before = await this.#cpuTimes;
    // Too little time has passed: the report repeats the last value.
    if (monotonic() - this.#usageAt < shortestWindow) return before.cores;
    this.#usageAt = monotonic();
    this.#cpuTimes = this.#readCpuTimes();
    const after = await this.#cpuTimes;
    const total = after.total - before.total;
    // When a core goes offline, the counters decrease and no usage can be computed. The report then repeats the last
    // value.
    if (total > 0) this.#usage = clamp(100 * (1 - (after.idle - before.idle) / total));
    return after.cores;
  }

  /**
   * Reads /proc/stat, because os.cpus() also asks every core for its clock rate, which takes long on large
   * machines.
   */
  async #readCpuTimes(): Promise<CpuTimes> {
    const text = await this.#read('/proc/stat');
    // Only the first eight fields are used. The later ones are guest times, which the user times contain already.
    const times = /^cpu +(.*)$/m.exec(text)?.[1]?.split(' ').slice(0, 8).map(Number) ?? [];
    const [, , , idle = 0, waiting = 0] = times;
    return { idle: idle + waiting, total: sum(times), cores: text.match(/^cpu\d+ /gm)?.length ?? 1 };
  }
}

interface CpuTimes {
  idle: number;
  total: number;
  cores: number;
}

const clamp = (percent: number): number => Math.min(100, Math.max(0, percent));
const sum = (numbers: number[]): number => numbers.reduce((total, number) => total + number, 0);

// ---- Memory and network

function spaceOf(total: number, free: number): Space {
  return { total, used: total - free, free };
}

/**
 * Lists all network interfaces except the loopback and the interfaces of containers (veth). The traffic of containers
 * also passes other interfaces, which count its bytes.
 */
function networkOf(text: string): NetworkInterface[] {
  const lines = [...text.matchAll(/^ *(?!lo:|veth)([^\s:]+): *(.*)$/gm)].slice(0, longestList);
  return lines.map(([, name = '', counters = '']) => {
    const numbers = counters.split(/ +/).map(Number);
    return { name, received_bytes: numbers[0] ?? 0, sent_bytes: numbers[8] ?? 0 };
  });
}

// ---- Disks

interface Mount {
  path: string;
  type: string;
  /** Major and minor number, which are the same for all mounts of a file system. */
  device: string;
  /** True if the whole file system is mounted, and not only a directory of it. */
  whole: boolean;
}

/** File systems that are on a disk or a server, even if their source is not a path below /dev. */
const deviceless = /^(zfs|btrfs|bcachefs|ubifs|virtiofs|9p|vboxsf)$/;
/** File systems of read-only images. They are always full, so they are left out. */
const image = /^(squashfs|erofs|iso9660|udf|cramfs)$/;
/**
 * If this number of file systems hang, no other file system is measured until one of them answers. Each hanging one
 * blocks one of the four threads in Node's thread pool.
 */
const mostSilent = 2;

/**
 * Measures the space of file systems. A file system may hang, for example if its server is down. Such a file system is
 * left out of the reports until it answers.
 */
class Disks {
  readonly #statfs: Sources['statfs'];
  readonly #asked = new Map<string, Promise<Space | undefined>>();
  readonly #silent = new Set<string>();

  constructor(statfs: Sources['statfs']) {
    this.#statfs = statfs;
  }

  async report(mounts: Mount[]): Promise<(Disk & { space: Space })[]> {
    const until = monotonic() + disksLimit;
    const found = new Map<string, Disk & { space: Space }>();
    // Local file systems come first, so that slow file servers do not delay them.
    const isRemote = ({ path, type }: Mount): number => Number(path !== '/' && remoteFileSystems.test(type));
    for (const { path, type } of mounts.toSorted((a, b) => isRemote(a) - isRemote(b))) {
      if (monotonic() >= until) break;
      const space = await this.#spaceAt(path);
      if (space) found.set(path, { mount: path, filesystem: type, space });
    }
    return mounts.flatMap(({ path }) => found.get(path) ?? []);
  }

  async #spaceAt(path: string): Promise<Space | undefined> {
    // The limit does not apply to "/", so that the machine's own disk is measured while file servers hang.
    if (this.#silent.has(path) || (path !== '/' && this.#silent.size >= mostSilent)) return undefined;
    const answer = this.#asked.get(path) ?? this.#ask(path);
    if (await endsWithin(diskLimit, answer)) return answer;
    if (this.#asked.get(path) === answer) this.#silent.add(path);
    return undefined;
  }

  #ask(path: string): Promise<Space | undefined> {
    const answer = measure(this.#statfs, path).finally(() => {
      this.#asked.delete(path);
      this.#silent.delete(path);
    });
    this.#asked.set(path, answer);
    return answer;
  }
}

/** Measures space as df(1) does: blocks reserved for root count as free, but not as available. */
async function measure(ask: Sources['statfs'], mount: string): Promise<Space | undefined> {
  try {
    const { frsize, bsize, blocks, bfree, bavail } = await ask(mount);
    // Older versions of Node have no frsize.
    const unit = frsize || bsize;
    if (blocks <= 0) return undefined;
    const free = Math.min(bfree, blocks);
    return { ...spaceOf(blocks * unit, free * unit), available: Math.min(bavail, free) * unit };
  } catch {
    return undefined;
  }
}

/** Lists "/" first, whatever its type. Then lists one mount of every other file system on a disk or server. */
function mountsOf(text: string): Mount[] {
  const mounts = new Map<string, Mount>();
  // A later mount at the same path hides the earlier one.
  for (const line of text.split('\n')) addMount(mounts, line);
  const root = mounts.get('/') ?? { path: '/', type: '', device: '', whole: true };
  mounts.delete('/');
  const best = [...mounts.values()].sort((a, b) => +b.whole - +a.whole || a.path.length - b.path.length);
  const seen = new Set([root.device]);
  const others = best.filter(({ device }) => !seen.has(device) && seen.add(device));
  return [root, ...others.sort((a, b) => (a.path < b.path ? -1 : 1))].slice(0, longestList);
}

/**
 * Adds the mount of a line of mountinfo. The fields of a line are: id, parent, device, root, mount, options, optional
 * fields, "-", type, source, options.
 */
function addMount(mounts: Map<string, Mount>, line: string): void {
  const [left = '', right = ''] = line.split(' - ');
  const [, , device = '', root, escaped = ''] = left.split(' ');
  const [type = '', source = ''] = right.split(' ');
  const path = escaped.replace(/\\(\d{3})/g, (_, octal: string) => String.fromCharCode(parseInt(octal, 8)));
  mounts.delete(path);
  const real =
    (source.startsWith('/dev/') || deviceless.test(type) || remoteFileSystems.test(type)) &&
    !image.test(type);
  if (path !== '/' && (!real || path === '' || path.length > longestMount)) return;
  mounts.set(path, { path, type, device, whole: root === '/' });
}
