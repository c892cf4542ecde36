// Turns an error of the operating system into a message: the path or address, the fault, and the next step.
import { errnoOf } from './errors.ts';

type Fault = readonly [wrong: string, next: string];

const denied: Fault = [
  'permission denied',
  'say sudo before the same command, or change who may (ls -ld shows that)',
];
const name: Fault = ['is no name that a file can have', 'choose another'];
const files: Fault = ['too many files are open', 'raise the limit (ulimit -n; LimitNOFILE= of a service)'];

const ofPaths: Readonly<Record<string, Fault>> = {
  EACCES: denied,
  EPERM: denied,
  EROFS: ['is on a file system that is read-only', 'choose another place, or mount that one writable'],
  ENOENT: ['does not exist', 'is the path right?'],
  ENOTDIR: ['leads through what is no directory', 'is the path right?'],
  EISDIR: ['is a directory', 'name a file'],
  EEXIST: ['exists already', 'choose another name, or remove it first'],
  ENOTEMPTY: ['is not empty', 'choose another name, or empty it first'],
  ENOSPC: ['the disk is full', 'make room there (df -h shows how much is left)'],
  EDQUOT: ['the disk quota is used up', 'make room there, or ask for more'],
  EFBIG: ['is larger than a file may be here', 'choose another disk, or raise the limit (ulimit -f)'],
  EIO: ['the disk reports an error', 'see dmesg'],
  ELOOP: ['its links lead in a circle', 'is the path right?'],
  ENAMETOOLONG: name,
  EILSEQ: name,
  EMFILE: files,
  ENFILE: files,
};

const ofAddresses: Readonly<Record<string, Fault>> = {
  EADDRINUSE: [
    'is taken: another program listens there',
    'ss -ltnp shows which; stop it, or choose another address',
  ],
  EADDRNOTAVAIL: ['is no address of this machine', 'choose one that ip addr shows'],
  EACCES: [
    'may not be used: ports below 1024 are root’s',
    'choose another port, or give CAP_NET_BIND_SERVICE',
  ],
  ECONNREFUSED: ['refuses: nothing listens there', 'is the address right, does the program run there?'],
  ENOTFOUND: ['is unknown: there is no such host', 'is the name right?'],
};

/**
 * The message of any error. An error of the system names the path or address, and the next step. `of`: the
 * address that the program tried to use.
 */
export function reasonOf(error: unknown, of?: string): string {
  if (!(error instanceof Error)) return String(error);
  const [path, host, port] = ['path', 'address', 'port'].map((key): unknown => Reflect.get(error, key));
  const address = of ?? (port === undefined ? undefined : [host, port].join(':'));
  const errno = errnoOf(error) ?? '';
  const [wrong, next] = (address === undefined ? ofPaths : ofAddresses)[errno] ?? [];
  if (wrong === undefined) return of === undefined ? error.message : `${of} cannot be had (${error.message})`;
  const where = address === undefined ? (typeof path === 'string' ? `${path}: ` : '') : `${address} `;
  return `${where}${wrong} (${errno}); ${next}`;
}

/** The same error with `path` added: errors from reads and writes of an open file name no path. */
export function atPath(error: unknown, path: string): unknown {
  return error instanceof Error && errnoOf(error) ? Object.assign(error, { path }) : error;
}
