// Parses paths in the way that scp does: machine:path is remote, and any other path is local. The verbs put, get and cp
// take the local path "-" as standard input or output. A remote path that is not UTF-8 is written as base64:…
import { isUtf8 } from 'node:buffer';
import { readFileSync } from 'node:fs';
import { posix } from 'node:path';
import { definedFields } from '../../../shared/defined-fields.ts';
import { UsageError } from '../../../shared/errors.ts';
import { type Farhand, FarhandError } from '../../../shared/sdk/index.ts';
import { type Bytes, bytes, toText } from '../../../shared/tar/index.ts';
import { findMachine } from '../find-by-name.ts';

/** A colon after a slash is part of a file name: ./a:b is local. */
const remote = /^([^/:]+):(.*)$/s;
export const isRemote = (text: string): boolean => remote.test(text);

/** A path as the API takes it. */
interface Path {
  path: string;
  path_encoding?: 'base64' | undefined;
}

export interface RemotePath extends Path {
  machine_id: string;
}

const base64 = 'base64:';
const pathBytes = ({ path, path_encoding }: Path): Bytes =>
  Buffer.from(path, path_encoding).toString('latin1');

function pathOf(name: Bytes): Path {
  const buffer = bytes(name);
  return isUtf8(buffer)
    ? { path: buffer.toString() }
    : { path: buffer.toString('base64'), path_encoding: 'base64' };
}

/** Returns a path in the form that resolve() parses. */
export function pathText(given: Path): string {
  // If the name, path or link target of an entry is not UTF-8, the broker encodes all three in base64. A path in base64
  // may therefore be UTF-8.
  const { path, path_encoding } = pathOf(pathBytes(given));
  return path_encoding ? base64 + path : path;
}

export async function resolve(client: Farhand, text: string): Promise<RemotePath> {
  const [, machine, path] = remote.exec(text) ?? [];
  if (!machine)
    throw new UsageError(`${text} is not a remote path; use MACHINE:PATH, such as web-1:/etc/hosts`);
  if (text.includes('\uFFFD') && hasOtherBytes())
    throw new UsageError(
      `${text} is not UTF-8; write the path as ${machine}:base64:…, as farhand files ls prints it`,
    );
  const machine_id = await findMachine(client, machine);
  return path?.startsWith(base64)
    ? { machine_id, path: path.slice(base64.length), path_encoding: 'base64' }
    : { machine_id, path: path || '~' };
}

/** True if the command line has bytes that are not UTF-8. Node replaces these bytes in process.argv by U+FFFD. */
function hasOtherBytes(): boolean {
  try {
    return !isUtf8(readFileSync('/proc/self/cmdline'));
  } catch {
    // Only Linux has this file.
    return false;
  }
}

/**
 * Returns the request fields of a copy or move. If `to` is a directory, the destination is the source's name in that
 * directory. Otherwise it is `to`.
 */
export async function fromTo(client: Farhand, source: RemotePath, to: RemotePath) {
  const target = (await isDirectory(client, to)) ? below(to, source) : to;
  const encodings = { source_encoding: source.path_encoding, destination_encoding: target.path_encoding };
  return { source: source.path, destination: target.path, ...definedFields(encodings) };
}

export const below = (directory: RemotePath, source: Path): RemotePath => ({
  machine_id: directory.machine_id,
  ...pathOf(posix.join(pathBytes(directory), nameOf(source))),
});

export async function isDirectory(client: Farhand, path: RemotePath): Promise<boolean> {
  try {
    return (await client.files.stat(path)).type === 'directory';
  } catch (error) {
    if (error instanceof FarhandError && error.code === 'file_not_found') return false;
    throw error;
  }
}

/**
 * Checks a transfer of several sources. Throws if the target is not a directory, or if two sources have the
 * same name.
 */
export function assertDistinct(sources: Path[], to: string, toDirectory: boolean): void {
  if (sources.length < 2) return;
  if (!toDirectory)
    throw new UsageError(`${to} is not a directory; several sources need a directory as target`);
  const names = sources.map(nameOf);
  const twice = names.find((name, at) => names.indexOf(name) < at);
  if (twice !== undefined)
    throw new UsageError(
      `several sources are named ${toText(twice)}, so one would replace the other; copy each to its own path`,
    );
}

/** Returns the last component of a path. Throws if it is empty, `.`, `..` or `~`. */
function nameOf(path: Path): Bytes {
  const name = posix.basename(pathBytes(path));
  if (name !== '' && name !== '..' && name !== '.' && name !== '~') return name;
  throw new UsageError(
    `the source ${pathText(path)} does not end in a file name; transfer it alone, to a path that ends in its new name`,
  );
}

/** Returns the name for a local copy of a remote path. Throws if it is not UTF-8. */
export function localNameOf(path: Path): string {
  const name = bytes(nameOf(path));
  if (isUtf8(name)) return name.toString();
  throw new UsageError(
    `the name of ${pathText(path)} is not UTF-8; fetch it alone, to a local path that ends in its new name`,
  );
}
