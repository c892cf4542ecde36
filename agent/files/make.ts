// Makes a directory: a new one or none, with exactly the mode asked for.
import { chmod, mkdir, rmdir } from 'node:fs/promises';
import type { MakeDirectoryRequest__Output } from '../../proto/types/farhand/agent/v1/MakeDirectoryRequest.ts';
import type { AgentMethods } from '../../shared/rpc.ts';
import { failingAs } from './abort.ts';
import { letGo, pathOf, pin } from './beneath/descent.ts';
import type { Beneath, Entry } from './beneath/index.ts';
import { type Bytes, bytes, fault, targetOf } from './beneath/path.ts';
import { syncDirectory } from './draft/place.ts';
import type { AskPeople } from './people.ts';
import { entryOf } from './stat.ts';
import { demandMode } from './write.ts';

export function openMaker(beneath: Beneath, people: AskPeople, home: Bytes): AgentMethods['makeDirectory'] {
  return (request, { signal }) => {
    const { path } = targetOf(request.path, home);
    return failingAs(path, signal, async () => {
      demandMode(request.mode);
      const entry = await beneath.name(path, request.parents);
      try {
        if (entry.found) throw fault('already_exists', path, 'exists');
        signal.throwIfAborted();
        const stats = await make(entry, request);
        return { entry: await entryOf(beneath, entry, { path, stats, people: await people() }) };
      } catch (error) {
        await entry.undo();
        throw error;
      } finally {
        entry.close();
      }
    });
  };
}

async function make(entry: Entry, { mode = 0o755 }: MakeDirectoryRequest__Output) {
  await mkdir(bytes(entry.at), mode & 0o777);
  try {
    const handle = await pin(entry.at);
    try {
      // Against the umask; a setgid bit inherited from above stays, as everywhere.
      const inherited = (await handle.stat()).mode & 0o2000;
      await chmod(pathOf(handle), mode | inherited);
      for (const at of [entry.directory, ...entry.madeIn]) await syncDirectory(at);
      return await handle.stat({ bigint: true });
    } finally {
      letGo(handle);
    }
  } catch (error) {
    await rmdir(bytes(entry.at)).catch(() => undefined);
    throw error;
  }
}
