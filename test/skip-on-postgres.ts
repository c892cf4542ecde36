// Tests that cannot run with FARHAND_TEST_DATABASE=postgres, and the reasons. Each is about files that a
// broker has only without a database server.

const files = 'is about state.json or history.db';
const edits = 'edits state.json or history.db';

/** By test file: the reason, and the names of its tests. */
const reasons: Readonly<Record<string, readonly [reason: string, name: RegExp][]>> = {
  'alerts-channels.test.ts': [[files, /^a broker killed between/]],
  'alerts-survival.test.ts': [[files, /kill/]],
  'audit.test.ts': [[files, /^a declared change and its row are one commit/]],
  'batches.test.ts': [[edits, /^a batch that was stored only in part before a crash/]],
  'commands.test.ts': [
    ['the disk of the broker is not that of the database', /^with a full disk at the broker/],
  ],
  'commands-output.test.ts': [[edits, /^the database stores only the last MiB/]],
  'installs-share-no-secret.test.ts': [[files, /^two fresh installs have no key/]],
  'history.test.ts': [
    [
      files,
      /history\.db|^when one noun|^is refused when |^after a clean end|^from a backup|^of version 0\.1\.0/,
    ],
    [files, /^totals of lists stay exact/],
  ],
  'migrate.test.ts': [['copies the files of a broker', /./]],
  'machines.test.ts': [[edits, /^white space around tags/]],
};

/** Returns the reason why a test cannot run; undefined if it can run. */
export function notOnPostgres(file: string, name: string): string | undefined {
  return reasons[file]?.find(([, names]) => names.test(name))?.[0];
}
