// Places as scp has them: machine:path is there, anything else is here; - is standard input or output.
import { posix } from 'node:path';
import { UsageError } from '../../../shared/errors.ts';
import { type Farhand, FarhandError } from '../../../shared/sdk/index.ts';
import { machineNamed } from '../named.ts';

export interface Remote {
  machine: string;
  path: string;
}

/** A colon after a slash belongs to a name: ./a:b is here. */
export function remoteIn(text: string): Remote | undefined {
  const match = /^([^/:]+):(.*)$/s.exec(text);
  return match ? { machine: match[1] ?? '', path: match[2] || '~' } : undefined;
}

function demandRemote(text: string): Remote {
  const place = remoteIn(text);
  if (place) return place;
  throw new UsageError(`${text}: say machine:path, such as web-1:/etc/hosts`);
}

/** A path on a machine that is known by its id. */
export interface Target {
  machine_id: string;
  path: string;
}

export async function resolve(client: Farhand, text: string): Promise<Target> {
  const { machine, path } = demandRemote(text);
  return { machine_id: await machineNamed(client, machine), path };
}

/** Where something goes: into a directory that is there, else under that name. */
export async function inside(client: Farhand, to: Target, source: string): Promise<Target> {
  return (await isDirectory(client, to)) ? under(to, source) : to;
}

export const under = (directory: Target, source: string): Target => ({
  ...directory,
  path: posix.join(directory.path, nameOf(source)),
});

export async function isDirectory(client: Farhand, place: Target): Promise<boolean> {
  try {
    return (await client.files.stat(place)).type === 'directory';
  } catch (error) {
    if (error instanceof FarhandError && error.code === 'file_not_found') return false;
    throw error;
  }
}

/** Several things go into a directory, each under a name of its own. */
export function demandApart(sources: string[], to: string, toDirectory: boolean): void {
  if (sources.length < 2) return;
  if (!toDirectory) throw new UsageError(`${to} is no directory: several things go into one`);
  const names = sources.map(nameOf);
  const twice = names.find((name, at) => names.indexOf(name) < at);
  if (twice !== undefined)
    throw new UsageError(`several of these are called ${twice}: one would replace the other`);
}

/** What something is called in its directory; what leads elsewhere is no name. */
export function nameOf(path: string): string {
  const name = posix.basename(path);
  if (name !== '' && name !== '..' && name !== '.' && name !== '~') return name;
  throw new UsageError(`${path} has no name of its own: say what it shall be called`);
}
