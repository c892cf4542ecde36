// Tests that cannot run with FARHAND_TEST_DATABASE=postgres, with the reasons. Most of them test state.json or
// history.db, which a broker with a PostgreSQL database does not have.
import type { SkipReasons } from './skip-reasons.ts';

const files = 'is about state.json or history.db';
const edits = 'edits state.json or history.db';
const locks = 'locks or breaks history.db to make its writes fail';
const backups = 'farhand broker backup copies files, and is refused with a database';
const fakeTime = 'the test clock does not wait for a database, so a key is revoked before a run has begun';

export const notOnPostgres: SkipReasons = {
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
      /history\.db|^when the tables of one|^is refused when |^after a clean end|^from a backup|^of version 0\.1\.0/,
    ],
    [files, /^totals of lists stay exact/],
  ],
  'migrate.test.ts': [['copies the files of a broker', /./]],
  'backup.test.ts': [
    [backups, /^a backup can be made without a running broker|^one of two simultaneous backups/],
  ],
  'schedules-clock-changes.test.ts': [
    ['leaps its clock on while rows of missed times are written', /^a clock set two hours forward/],
  ],
  'schedules-catch-up.test.ts': [
    [backups, /^with a history that was/],
    [fakeTime, /^schedules of a revoked key fail/],
  ],
  'schedules-survive-kills.test.ts': [[edits, /^many missed times delay|^10,000 schedules of/]],
  'sessions-over-lost-links.test.ts': [
    [locks, /^a client whose terminal died with its agent|^a session whose end could not be written/],
  ],
  'state-disk-failures.test.ts': [
    [locks, /^an enrolment is acknowledged|^a machine that goes offline while|^a change of history while/],
    [files, /is answered 5xx, and has no effect at the next start$/],
  ],
  'state-file.test.ts': [
    [files, /^when a broker has lost its state\.json|^a broker makes its folder private/],
    [
      files,
      /^of a broker that died (before|after) history had it|^brings back no event that history deleted/,
    ],
  ],
  'webhooks-delivery.test.ts': [
    [edits, /^no event of a scope that its key has lost|^an event that only the outbox has/],
    ['reads history.db within a turn of the event loop', /^an event and its deliveries are committed/],
  ],
  'machines.test.ts': [[edits, /^white space around tags/]],
};
