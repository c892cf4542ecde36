// Turns an error of the operating system into a message with the path or address, what is wrong, and the next step.
import { errnoOf } from './errors.ts';

type Fault = readonly [wrong: string, next: string];

const denied: Fault = [
  'permission denied',
  'run the same command with sudo, or change the permissions (ls -ld shows them)',
];
const name: Fault = ['is not a valid file name', 'choose another name'];
const files: Fault = ['too many files are open', 'raise the limit (ulimit -n; LimitNOFILE= of a service)'];

const ofPaths: Readonly<Record<string, Fault>> = {
  EACCES: denied,
  EPERM: denied,
  EROFS: ['is on a file system that is read-only', 'choose another path, or mount the file system writable'],
  ENOENT: ['does not exist', 'check the path'],
  ENOTDIR: ['has a parent that is not a directory', 'check the path'],
  EISDIR: ['is a directory', 'use the path of a file'],
  EEXIST: ['already exists', 'choose another name, or remove the existing file or directory first'],
  ENOTEMPTY: ['is not empty', 'choose another name, or empty it first'],
  ENOSPC: ['the disk is full', 'delete files (df -h shows the free space)'],
  EDQUOT: ['the disk quota is used up', 'delete files, or have the quota raised'],
  EFBIG: [
    'is too large for the file system, or above the file size limit of this user',
    'choose another disk, or raise the limit (ulimit -f)',
  ],
  EIO: ['the disk reports an error', 'see dmesg'],
  ELOOP: ['has symlinks that form a loop', 'check the path'],
  ENAMETOOLONG: name,
  EILSEQ: name,
  EMFILE: files,
  ENFILE: files,
};

const ofAddresses: Readonly<Record<string, Fault>> = {
  EADDRINUSE: [
    'is already in use by another program',
    'stop that program (ss -ltnp shows it), or choose another address',
  ],
  EADDRNOTAVAIL: ['is not an address of this machine', 'choose an address that ip addr shows'],
  EACCES: [
    'is not allowed: ports below 1024 need root',
    'choose another port, or grant CAP_NET_BIND_SERVICE',
  ],
  ECONNREFUSED: ['refused the connection', 'check the address, and that the program runs there'],
  ENOTFOUND: ['is not a known host', 'check the name'],
};

/**
 * Returns an error's message. For a system error, the message names the path or address, what is wrong and the next
 * step. `of`: the address that was tried; by default it is read from the error.
 */
export function reasonOf(error: unknown, of?: string): string {
  if (!(error instanceof Error)) return String(error);
  const [path, host, port] = ['path', 'address', 'port'].map((key): unknown => Reflect.get(error, key));
  const address = of ?? (port === undefined ? undefined : [host, port].join(':'));
  const errno = errnoOf(error) ?? '';
  const [wrong, next] = (address === undefined ? ofPaths : ofAddresses)[errno] ?? [];
  if (wrong === undefined)
    return of === undefined ? error.message : `${of} cannot be used (${error.message})`;
  const where = address === undefined ? (typeof path === 'string' ? `${path}: ` : '') : `${address} `;
  return `${where}${wrong} (${errno}); ${next}`;
}

/** Adds `path` to a system error and returns it. Errors of reads and writes of an open file have no path. */
export function atPath(error: unknown, path: string): unknown {
  return error instanceof Error && errnoOf(error) ? Object.assign(error, { path }) : error;
}
