// Recognizes file systems of the kernel, such as /proc and /sys. Their files may be endless, report wrong
// sizes, or contain the memory of processes.
import { type BigIntStats, readlinkSync } from 'node:fs';
import { readFile, statfs } from 'node:fs/promises';
import type { Confined } from './confined-fs.ts';
import { type Bytes, bytes, fault } from './parse-request-path.ts';

/** The type that statfs(2) reports for procfs. */
const procfs = 0x9fa0;

/**
 * The types that statfs(2) reports for proc, sysfs, devpts, debugfs, tracefs, securityfs, bpf, pstore, cgroup
 * and cgroup2, configfs, selinux.
 */
const madeUp: ReadonlySet<number> = new Set([
  0x9fa0, 0x62656572, 0x1cd1, 0x64626720, 0x74726163, 0x73636673, 0xcafe4a11, 0x6165676c, 0x27e0eb,
  0x63677270, 0x62656570, 0xf97cff8c,
]);

/** True if an open file or directory (/proc/self/fd/N) lies on an ordinary file system, on a disk or in memory. */
export async function isOnOrdinaryFileSystem(at: Confined): Promise<boolean> {
  // If statfs fails, the result is true. The caller then reads the directory, and that read fails with the reason.
  const found = await statfs(bytes(at)).catch(() => undefined);
  return found === undefined || !madeUp.has(found.type);
}

/** Throws unsupported_file if an open directory lies on a file system of the kernel. */
export async function assertOnOrdinaryFileSystem(at: Confined, path: Bytes): Promise<void> {
  if (!(await isOnOrdinaryFileSystem(at)))
    throw fault(
      'unsupported_file',
      path,
      'lies on a file system of the kernel, such as /proc, and cannot be copied or archived',
    );
}

/**
 * True if a file of /proc gives access to the memory of a process, which may contain secrets such as the agent's keys.
 */
export async function isProcessMemory(name: Bytes, at: Confined, { blocks }: BigIntStats): Promise<boolean> {
  if (blocks !== 0n || (name !== 'mem' && name !== 'kcore')) return false;
  return (await statfs(bytes(at))).type === procfs;
}

/**
 * True if a file is the /proc directory of one of `processes`, or lies in such a directory. The file is `name` in the
 * open directory `at`, or `at` itself if `name` is undefined.
 */
export async function showsProcess(
  at: Confined,
  name: Bytes | undefined,
  processes: readonly number[],
): Promise<boolean> {
  // A synchronous call is safe here: the kernel reads the link from memory and waits for no disk.
  const path = readlinkSync(at, 'latin1').split('/');
  const steps = name === undefined ? path : [...path, name];
  const numbered = steps.flatMap((step, index) => (/^\d+$/.test(step) ? [index] : []));
  if (numbered.length === 0 || (await statfs(bytes(at))).type !== procfs) return false;
  const places = numbered.map(
    (index) => at + (index < path.length ? '/..'.repeat(path.length - 1 - index) : `/${name}`),
  );
  const pids = await Promise.all(places.map(processAt));
  return pids.some((pid) => pid !== undefined && processes.includes(pid));
}

/**
 * Returns the pid of the process to which a directory in /proc belongs; undefined if it belongs to none. It may also be
 * the directory of a thread.
 */
async function processAt(directory: Bytes): Promise<number | undefined> {
  const status = await readFile(bytes(`${directory}/status`), 'latin1').catch(() => '');
  const numbers = /^NStgid:\s*(.*)$/m.exec(status)?.[1]?.split('\t');
  // A process has a pid in each PID namespace around it. The last number is the pid that the process itself sees, like
  // process.pid of the agent.
  return numbers && Number(numbers.at(-1));
}
