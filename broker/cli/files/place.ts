// Places as scp has them: machine:path is there, anything else is here; - is standard input or output.
import { posix } from 'node:path';
import { UsageError } from '../../../shared/errors.ts';
import type { Farhand } from '../../../shared/sdk/index.ts';
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

export async function resolve(client: Farhand, text: string): Promise<{ machine_id: string; path: string }> {
  const { machine, path } = demandRemote(text);
  return { machine_id: await machineNamed(client, machine), path };
}

/** What something is called in its directory; what leads elsewhere is no name. */
export function nameOf(path: string): string {
  const name = posix.basename(path);
  if (name !== '' && name !== '..' && name !== '.' && name !== '~') return name;
  throw new UsageError(`${path} has no name of its own: say what it shall be called`);
}
