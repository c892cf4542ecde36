// The version of Farhand, the same for agent, broker and command line.
import manifest from '../package.json' with { type: 'json' };

export const { version } = manifest;

/**
 * True if version `some` is older than `other`, by the three numbers of versions such as 1.2.3. A release candidate,
 * such as 1.2.3-rc.1, is older than its release. False if either text lacks the three numbers.
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
