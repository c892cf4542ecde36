// Runs before each test file. Sets home, shell and environment, so that they do not depend on the user who
// runs the tests.
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { basename, join } from 'node:path';
import { afterAll, beforeEach } from 'vitest';
import { notOnPostgres } from './skip-on-postgres.ts';

/** Variables that the test runner and packaged programs need. All others are removed. */
const stays =
  /^(PATH|TMPDIR|TZ|CI|TEST|TEST_LOG|FARHAND_TEST_(BROKERS|DISK|DATABASE|DATABASE_URL)|MODE|DEV|PROD|SSR|BASE_URL|NODE_(ENV|OPTIONS|EXTRA_CA_CERTS|COMPILE_CACHE)|VITEST.*|npm_.*)$/;

for (const name of Object.keys(process.env)) if (!stays.test(name)) delete process.env[name];

const home = mkdtempSync(join(tmpdir(), 'farhand-home-'));
Object.assign(process.env, { HOME: home, SHELL: '/bin/sh', LANG: 'C.UTF-8' });
afterAll(() => rmSync(home, { recursive: true, force: true }));

if (process.env.FARHAND_TEST_DATABASE_URL) {
  beforeEach(({ task, skip }) => {
    const reason = notOnPostgres(basename(task.file.filepath), task.name);
    if (reason) skip(reason);
  });
}
