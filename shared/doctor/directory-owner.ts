// Checks whether this user may use a data directory: without access, later checks report misleading faults.
import { accessSync, constants, readFileSync, statSync } from 'node:fs';
import { errnoOf, StartError } from '../errors.ts';

export function demandAccess(directory: string): void {
  const why = refusedIn(directory);
  if (why) throw new StartError(why, 1);
}

/**
 * The error message if this user may not use the directory; undefined if access is allowed or it is missing.
 */
export function refusedIn(directory: string): string | undefined {
  try {
    accessSync(directory, constants.R_OK | constants.W_OK | constants.X_OK);
    return undefined;
  } catch (error) {
    if (!['EACCES', 'EPERM'].includes(errnoOf(error) ?? '')) return undefined;
    return `${directory} belongs to ${ownerOf(directory)}: say sudo before the same command`;
  }
}

function ownerOf(directory: string): string {
  try {
    const { uid } = statSync(directory);
    const line = readFileSync('/etc/passwd', 'utf8')
      .split('\n')
      .find((one) => one.split(':')[2] === String(uid));
    return line?.split(':')[0] ?? `user ${uid}`;
  } catch {
    return 'somebody else';
  }
}
