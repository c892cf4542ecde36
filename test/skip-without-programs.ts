// Skips tests whose programs are not installed. The names of these tests say which programs they need.
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { type TestFunction, test } from 'vitest';

const directories = [...(process.env.PATH ?? '').split(':'), '/usr/sbin', '/sbin'];

/** True if a program is installed. */
export const has = (program: string): boolean =>
  directories.some((directory) => existsSync(join(directory, program)));

/** True if one of these programs is not installed. Use: `test.skipIf(lacks('curl'))('a name (needs curl)', …)`. */
export const lacks = (...programs: string[]): boolean => !programs.every(has);

/** Declares a test that is skipped unless all programs are installed: `needs('curl')('a name', …)`. */
export function needs(...programs: string[]): (name: string, work: TestFunction, ms?: number) => void {
  const why = ` (needs ${programs.join(', ')})`;
  return (name, work, ms) => test.skipIf(lacks(...programs))(name + why, work, ms);
}
