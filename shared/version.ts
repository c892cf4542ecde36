// The version of Farhand, the same for agent, broker and command line.
import manifest from '../package.json' with { type: 'json' };

export const { version } = manifest;

/**
 * True if version `some` is older than `other`. Compares the three numbers of versions such as 1.2.3 or 1.2.3-rc.1. A
 * release is newer than its candidates. A text without three numbers is not older.
 */
export function isOlder(some: string, other: string): boolean {
  const [a, b] = [some, other].map((text) => /^(\d+)\.(\d+)\.(\d+)(-.+)?/.exec(text));
  if (!a || !b) return false;
  for (const at of [1, 2, 3]) {
    const difference = Number(a[at]) - Number(b[at]);
    if (difference !== 0) return difference < 0;
  }
  return a[4] !== undefined && b[4] === undefined;
}
