// Checks the names and symlinks of an archive, which must not lead outside the target directory.
import type { Bytes } from './byte-names.ts';
import { entryFault } from './reader.ts';

/** Linux's limits on the bytes of a path and of a name. `mostComponents` is a limit of our own on the depth. */
const longestPath = 4095;
const longestName = 255;
const mostComponents = 255;

/**
 * Returns an entry's path in the target directory, without "." and empty parts. Throws for a path that is not allowed,
 * such as an absolute one.
 */
export function pathOfEntry(name: Bytes): Bytes {
  const refuse = (reason: string) => entryFault('invalid_path', name.slice(0, longestPath), reason);
  if (name === '') throw refuse('has no name');
  if (name.includes('\0')) throw refuse('has a NUL byte in its name');
  if (name.length > longestPath) throw refuse(`has a path of more than ${longestPath} bytes`);
  if (name.startsWith('/')) throw refuse('has an absolute path');
  const parts = name.split('/').filter((part) => part !== '' && part !== '.');
  if (parts.includes('..')) throw refuse('has ".." in its path, which leads outside the directory');
  if (parts.length > mostComponents) throw refuse(`has a path of more than ${mostComponents} names`);
  if (parts.some((part) => part.length > longestName)) throw refuse(`has a name over ${longestName} bytes`);
  return parts.join('/');
}

/** Throws if the target of a symlink is empty, too long or has a NUL byte. */
export function assertTarget(path: Bytes, target: Bytes): void {
  if (target === '' || target.includes('\0') || target.length > longestPath)
    throw entryFault(
      'invalid_path',
      path,
      'is a symlink whose target is empty, too long or contains a NUL byte',
    );
}

/**
 * Throws if a symlink could lead outside the directory. Its target may have ".." only at the start. In "a/..", the name
 * "a" may itself be a symlink, so ".." could lead anywhere.
 */
export function assertInside(path: Bytes, target: Bytes): void {
  const refuse = (reason: string) => entryFault('invalid_path', path, `is a symlink ${reason}`);
  assertTarget(path, target);
  if (target.startsWith('/')) throw refuse('to an absolute path');
  const parts = target.split('/').filter((part) => part !== '' && part !== '.');
  const down = parts.findIndex((part) => part !== '..');
  const up = down === -1 ? parts.length : down;
  if (up > path.split('/').length - 1) throw refuse('that leads outside the directory');
  if (parts.includes('..', up)) throw refuse('whose target has ".." after another part of the path');
}
