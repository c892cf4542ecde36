// Parses paths in the way that scp does: machine:path is remote, and any other path is local. The verbs put, get and cp
// take the local path "-" as standard input or output.
import { posix } from 'node:path';
import { UsageError } from '../../../shared/errors.ts';
import { type Farhand, FarhandError } from '../../../shared/sdk/index.ts';
import { findMachine } from '../find-by-name.ts';

/** A colon after a slash is part of a file name: ./a:b is local. */
const remote = /^([^/:]+):(.*)$/s;
export const isRemote = (text: string): boolean => remote.test(text);

export interface RemotePath {
  machine_id: string;
  path: string;
}

export async function resolve(client: Farhand, text: string): Promise<RemotePath> {
  const [, machine, path] = remote.exec(text) ?? [];
  if (!machine)
    throw new UsageError(`${text} is not a remote path; use MACHINE:PATH, such as web-1:/etc/hosts`);
  return { machine_id: await findMachine(client, machine), path: path || '~' };
}

/** Returns the target of a copy: `to` itself or, if `to` is a directory, the source's name in that directory. */
export async function inside(client: Farhand, to: RemotePath, source: string): Promise<RemotePath> {
  return (await isDirectory(client, to)) ? below(to, source) : to;
}

export const below = (directory: RemotePath, source: string): RemotePath => ({
  ...directory,
  path: posix.join(directory.path, nameOf(source)),
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
export function assertDistinct(sources: string[], to: string, toDirectory: boolean): void {
  if (sources.length < 2) return;
  if (!toDirectory)
    throw new UsageError(`${to} is not a directory; several sources need a directory as target`);
  const names = sources.map(nameOf);
  const twice = names.find((name, at) => names.indexOf(name) < at);
  if (twice !== undefined)
    throw new UsageError(
      `several sources are named ${twice}, so one would replace the other; copy each to its own path`,
    );
}

/** Returns the last component of a path. Throws if it is empty, `.`, `..` or `~`. */
export function nameOf(path: string): string {
  const name = posix.basename(path);
  if (name !== '' && name !== '..' && name !== '.' && name !== '~') return name;
  throw new UsageError(
    `the source ${path} does not end in a file name; transfer it alone, to a path that ends in its new name`,
  );
}
