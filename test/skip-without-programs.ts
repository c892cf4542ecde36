// Skips tests that need a program which is not installed. Their names say which program they need.
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { type TestFunction, test } from 'vitest';

const directories = [...(process.env.PATH ?? '').split(':'), '/usr/sbin', '/sbin'];

/** True if a program is installed. */
export const has = (program: string): boolean =>
  directories.some((directory) => existsSync(join(directory, program)));

/** `test.skipIf(lacks('curl'))('a name (needs curl)', …)`. */
export const lacks = (...programs: string[]): boolean => !programs.every(has);

/** `needs('curl')('a name', …)` is a test that is skipped where curl is missing. */
export function needs(...programs: string[]): (name: string, work: TestFunction, ms?: number) => void {
  const why = ` (needs ${programs.join(', ')})`;
  return (name, work, ms) => test.skipIf(lacks(...programs))(name + why, work, ms);
}
