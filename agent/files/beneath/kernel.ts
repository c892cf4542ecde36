// Which file systems hold files: those that the kernel makes up have no end, lie about their sizes, or show memory.
import { statfs } from 'node:fs/promises';
import { type Bytes, bytes } from './path.ts';

/** f_type of proc, sysfs, devpts, debugfs, tracefs, securityfs, bpf, pstore, cgroup and cgroup2, configfs, selinux. */
const madeUp = new Set([
  0x9fa0, 0x62656572, 0x1cd1, 0x64626720, 0x74726163, 0x73636673, 0xcafe4a11, 0x6165676c, 0x27e0eb,
  0x63677270, 0x62656570, 0xf97cff8c,
]);

/** Whether an open directory (/proc/self/fd/N) is part of a file system with files of a disk or of memory. */
export async function holdsFiles(at: Bytes): Promise<boolean> {
  // Where that cannot be told, reading it tells why.
  const told = await statfs(bytes(at)).catch(() => undefined);
  return told === undefined || !madeUp.has(told.type);
}
