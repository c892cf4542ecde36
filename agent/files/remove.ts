// Removes a file, a symlink or a directory; never what a symlink leads to, nor what the machine cannot do without.
import type { AgentMethods } from '../../shared/rpc.ts';
import { failingAs } from './abort.ts';
import type { Beneath, Entry } from './beneath/index.ts';
import { type Bytes, bytes, demandFolder, fault, targetOf } from './beneath/path.ts';
import { mountOf } from './beneath/walk.ts';
import { syncDirectory } from './draft/place.ts';
import { clear, drop } from './tree/clear.ts';

export function openRemover(beneath: Beneath, home: Bytes): AgentMethods['removeFile'] {
  return (request, { signal }) => {
    const target = targetOf(request.path, home);
    const { path } = target;
    return failingAs(path, signal, async () => {
      const entry = await beneath.name(path);
      try {
        const { stats, at } = demandFound(entry, path);
        demandFolder(target, stats);
        await beneath.boundary.demandLoose(stats, home, path);
        const directory = stats.isDirectory();
        if (directory && mountOf(at) !== mountOf(entry.directory))
          throw fault('file_busy', path, 'another file system is mounted here');
        signal.throwIfAborted();
        if (directory && request.recursive) await clear(at, beneath.boundary, { path, signal });
        await drop(entry.at, directory);
        await syncDirectory(entry.directory);
        return { path: bytes(path), size: stats.isFile() ? Number(stats.size) : 0, directory };
      } finally {
        entry.close();
      }
    });
  };
}

/** What has the name, which must be something. */
export function demandFound({ found }: Entry, path: Bytes): NonNullable<Entry['found']> {
  if (!found) throw fault('file_not_found', path, 'no such file');
  return found;
}
