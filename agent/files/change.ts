// Changes mode, owner or group of what a path leads to: of the very thing that was found, whatever has its name by now.
import type { ChangeFileRequest__Output } from '../../proto/types/farhand/agent/v1/ChangeFileRequest.ts';
import type { ChangeFileResponse } from '../../proto/types/farhand/agent/v1/ChangeFileResponse.ts';
import { AppError } from '../../shared/errors.ts';
import { chmod, chown, stat } from './confine/fs.ts';
import { assertFolder, assertMode, type Target } from './confine/path.ts';
import { describe } from './describe.ts';
import type { Disk } from './operation.ts';
import type { Users } from './users-groups.ts';

/** What chown leaves as it is. */
const unchanged = -1;

export async function changeFile(
  disk: Disk,
  request: ChangeFileRequest__Output,
  target: Target,
  signal: AbortSignal,
): Promise<ChangeFileResponse> {
  assertMode(request.mode);
  assertChange(request);
  const users = await disk.users();
  const { uid, gid } = ownerOf(request, users);
  await using entry = await disk.writing.entry(target.path);
  const { at, stats } = entry.present;
  assertFolder(target, stats);
  signal.throwIfAborted();
  // A change of owner clears setuid and setgid, so the mode comes second.
  if (uid !== unchanged || gid !== unchanged) await chown(at, uid, gid);
  if (request.mode !== undefined) await chmod(at, request.mode);
  return { entry: describe(target.path, await stat(at), users, entry.link) };
}

/** Without one it would be a look at the file, which is another right. */
function assertChange({ mode, owner, group }: ChangeFileRequest__Output): void {
  if ([mode, owner, group].every((one) => one === undefined))
    throw new AppError('invalid_request', 'say what to change: mode, owner or group');
}

function ownerOf({ owner, group }: ChangeFileRequest__Output, users: Users): { uid: number; gid: number } {
  const uid = owner === undefined ? unchanged : users.uid(owner);
  const gid = group === undefined ? unchanged : users.gid(group);
  if (uid !== undefined && gid !== undefined) return { uid, gid };
  const issues = [
    ...(uid === undefined ? [{ path: 'owner', message: `no user "${owner}" on this machine` }] : []),
    ...(gid === undefined ? [{ path: 'group', message: `no group "${group}" on this machine` }] : []),
  ];
  throw new AppError('validation_failed', issues.map(({ message }) => message).join('; '), { issues });
}
