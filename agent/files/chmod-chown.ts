// Changes mode, owner or group of a file or directory. Symlinks are followed.
import { AppError, ignoring } from '../../shared/errors.ts';
import { chmod, chown, identityOf, isStill, pin, readOnly, stat, syncChange } from './confine/confined-fs.ts';
import { assertFolder, assertMode, fault } from './confine/parse-request-path.ts';
import { describe } from './file-description.ts';
import type { Operation, RequestOf } from './handler-adapters.ts';
import type { Users } from './users-groups.ts';

/** chown(2) leaves an id unchanged if it is -1. */
const unchanged = -1;

export const changeFile: Operation<'changeFile'> = async (disk, request, target, signal) => {
  assertMode(request.mode);
  assertChange(request);
  const users = await disk.users();
  const { uid, gid } = ownerOf(request, users);
  await using entry = await disk.writing.entry(target.path);
  // `at` leads to the opened file, even if another file gets its name meanwhile.
  const { at, stats } = entry.present;
  assertFolder(target, stats);
  // Opened before the change, which may take the agent's permission to open it. The change of a file that the agent may
  // not read, or of a device, is durable only when the system next flushes its disk.
  const isPlain = stats.isFile() || stats.isDirectory();
  using file = isPlain ? await pin(at, readOnly).catch(ignoring('EACCES')) : undefined;
  signal.throwIfAborted();
  await entry.inTurn(async () => {
    if (!(await isStill(entry.at, identityOf(stats))))
      throw fault('conflict', target.path, 'was replaced meanwhile; try again');
    // The mode is set second, because a change of owner clears setuid and setgid.
    if (uid !== unchanged || gid !== unchanged) await chown(at, uid, gid);
    if (request.mode !== undefined) await chmod(at, request.mode);
  });
  if (file) await syncChange(file);
  return { entry: describe(target.path, await stat(at), users, entry.link) };
};

/**
 * Throws if the request changes nothing. Such a request would only read a file's stats, even if the machine's owner
 * does not allow the capability files:read.
 */
function assertChange({ mode, owner, group }: RequestOf<'changeFile'>): void {
  if ([mode, owner, group].every((one) => one === undefined))
    throw new AppError('invalid_request', 'nothing to change: set mode, owner or group');
}

function ownerOf({ owner, group }: RequestOf<'changeFile'>, users: Users): { uid: number; gid: number } {
  const uid = owner === undefined ? unchanged : users.users.numberOf(owner);
  const gid = group === undefined ? unchanged : users.groups.numberOf(group);
  if (uid !== undefined && gid !== undefined) return { uid, gid };
  const issues = [
    ...(uid === undefined ? [{ path: 'owner', message: `the machine has no user "${owner}"` }] : []),
    ...(gid === undefined ? [{ path: 'group', message: `the machine has no group "${group}"` }] : []),
  ];
  throw new AppError('validation_failed', issues.map(({ message }) => message).join('; '), { issues });
}
