// Runs before each test file. Sets home, shell and environment, so that tests do not depend on the user who runs them.
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import http from 'node:http';
import { tmpdir } from 'node:os';
import { basename, join } from 'node:path';
import { afterAll, beforeEach, type RunnerTestSuite } from 'vitest';
import { closeShared } from './close-after-tests.ts';
import { notOnPostgres } from './skip-on-postgres.ts';
import { reasonIn } from './skip-reasons.ts';
import { notWithSeveralBrokers } from './skip-with-several-brokers.ts';
import { brokerCount } from './start-postgres.ts';

/** Variables that the test runner and the packaged programs need. All others are removed. */
const stays =
  /^(PATH|TMPDIR|TZ|CI|TEST|TEST_LOG|FARHAND_TEST_(BROKERS|DISK|DATABASE|DATABASE_URL|PASSED)|MODE|DEV|PROD|SSR|BASE_URL|NODE_(ENV|OPTIONS|EXTRA_CA_CERTS|COMPILE_CACHE)|VITEST.*|npm_.*)$/;

for (const name of Object.keys(process.env)) if (!stays.test(name)) delete process.env[name];

const home = mkdtempSync(join(tmpdir(), 'farhand-home-'));
Object.assign(process.env, { HOME: home, SHELL: '/bin/sh', LANG: 'C.UTF-8' });
afterAll(() => rmSync(home, { recursive: true, force: true }));
afterAll(closeShared);

// With several brokers, each request of a test gets a connection of its own. The proxy in front of the brokers gives
// each connection to the next broker, so the requests of a test reach all brokers.
if (brokerCount > 1) {
  const { fetch } = globalThis;
  globalThis.fetch = (input, init = {}) => {
    const headers = new Headers(init.headers);
    // A large body is sent without `Connection: close`. If a broker refuses it early, the connection must stay open
    // until the client has read the answer.
    const { body } = init;
    if (!body || (typeof body === 'string' && body.length < 65_536)) headers.set('Connection', 'close');
    return fetch(input, { ...init, headers });
  };
  http.globalAgent = new http.Agent({ keepAlive: false });
}

// Skips tests that have passed in an earlier run. FARHAND_TEST_PASSED is a file with their names, one per line, as
// scripts/test-report.ts prints them.
if (process.env.FARHAND_TEST_PASSED) {
  const passed = new Set(readFileSync(process.env.FARHAND_TEST_PASSED, 'utf8').split('\n'));
  beforeEach(({ task, skip }) => {
    const file = task.file.filepath.replace(/^.*\/(?=test\/)/, '');
    if (passed.has(`${file} ${fullNameOf(task)}`)) skip('has passed in an earlier run');
  });
}

/** Returns the name of a test after the names of its groups, as the reports of vitest have it. */
function fullNameOf({ name, suite }: { name: string; suite?: RunnerTestSuite | undefined }): string {
  return suite ? `${fullNameOf(suite)} ${name}`.trim() : name;
}

if (process.env.FARHAND_TEST_DATABASE_URL) {
  beforeEach(({ task, skip }) => {
    const file = basename(task.file.filepath);
    const reason =
      reasonIn(notOnPostgres, file, task.name) ??
      (brokerCount > 1 ? reasonIn(notWithSeveralBrokers, file, task.name) : undefined);
    if (reason) skip(reason);
  });
}
