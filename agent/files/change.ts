// Changes mode, owner or group of what a path leads to: of the very thing that was found, whatever has its name by now.
import { chmod, chown, stat } from 'node:fs/promises';
import { posix } from 'node:path';
import type { ChangeFileRequest__Output } from '../../proto/types/farhand/agent/v1/ChangeFileRequest.ts';
import { AppError } from '../../shared/errors.ts';
import type { AgentMethods } from '../../shared/rpc.ts';
import { failingAs } from './abort.ts';
import type { Beneath } from './beneath/index.ts';
import { type Bytes, demandFolder, targetOf } from './beneath/path.ts';
import { describe } from './describe.ts';
import type { AskPeople, People } from './people.ts';
import { demandFound } from './remove.ts';
import { demandMode } from './write.ts';

/** What chown leaves as it is. */
const unchanged = -1;

export function openChanger(beneath: Beneath, people: AskPeople, home: Bytes): AgentMethods['changeFile'] {
  return (request, { signal }) => {
    const target = targetOf(request.path, home);
    const { path } = target;
    return failingAs(path, signal, async () => {
      demandMode(request.mode);
      demandChange(request);
      const known = await people();
      const { uid, gid } = ownerOf(request, known);
      const entry = await beneath.entry(path);
      try {
        const { at, stats } = demandFound(entry, path);
        demandFolder(target, stats);
        signal.throwIfAborted();
        // A change of owner clears setuid and setgid, so the mode comes second.
        if (uid !== unchanged || gid !== unchanged) await chown(at, uid, gid);
        if (request.mode !== undefined) await chmod(at, request.mode);
        const described = { path, name: posix.basename(path) || '/', link: entry.link };
        return { entry: describe(described, await stat(at, { bigint: true }), known) };
      } finally {
        entry.close();
      }
    });
  };
}

/** Without one it would be a look at the file, which is another right. */
function demandChange({ mode, owner, group }: ChangeFileRequest__Output): void {
  if ([mode, owner, group].every((one) => one === undefined))
    throw new AppError('invalid_request', 'say what to change: mode, owner or group');
}

function ownerOf({ owner, group }: ChangeFileRequest__Output, people: People): { uid: number; gid: number } {
  const uid = owner === undefined ? unchanged : people.uid(owner);
  const gid = group === undefined ? unchanged : people.gid(group);
  if (uid !== undefined && gid !== undefined) return { uid, gid };
  const issues = [
    ...(uid === undefined ? [{ path: 'owner', message: `no user "${owner}" on this machine` }] : []),
    ...(gid === undefined ? [{ path: 'group', message: `no group "${group}" on this machine` }] : []),
  ];
  throw new AppError('validation_failed', issues.map(({ message }) => message).join('; '), { issues });
}
