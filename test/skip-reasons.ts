// Finds the reason why a test cannot run with some kind of broker.

/** By test file: the reason, and the names of its tests. */
export type SkipReasons = Readonly<Record<string, readonly [reason: string, name: RegExp][]>>;

/** Returns the reason why a test cannot run; undefined if it can run. */
export function reasonIn(reasons: SkipReasons, file: string, name: string): string | undefined {
  return reasons[file]?.find(([, names]) => names.test(name))?.[0];
}
