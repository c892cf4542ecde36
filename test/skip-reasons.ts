// Finds the reason why a test cannot run with a database server or with several brokers.

/** For each test file: reasons to skip tests, each with a pattern for the names of these tests. */
export type SkipReasons = Readonly<Record<string, readonly [reason: string, name: RegExp][]>>;

/** Returns the reason why a test cannot run; undefined if it can. */
export function reasonIn(reasons: SkipReasons, file: string, name: string): string | undefined {
  return reasons[file]?.find(([, names]) => names.test(name))?.[0];
}
