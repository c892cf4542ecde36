// Reads the reports that vitest wrote in JSON.
//
//   node scripts/test-report.ts failed REPORT     prints the files with a failed test, a line each
//   node scripts/test-report.ts passed REPORT     prints the files in which every test passed and none was skipped
//   node scripts/test-report.ts tests REPORT      prints the tests that passed, a line each: the file, a space and the name
//   node scripts/test-report.ts REPORT TITLE REPORT TITLE …
//                                                 prints failed and skipped tests by name and errors outside of tests,
//                                                 then the sums of all reports
//
// REPORT is a path without ".json". REPORT-again.json, if it exists, is the report of a second run of the failed files.
// REPORT.log and REPORT-again.log, if they exist, are what vitest printed.
import { existsSync, readFileSync } from 'node:fs';
import { basename } from 'node:path';
import { stripVTControlCharacters } from 'node:util';
import { z } from 'zod';

const reportSchema = z.object({
  testResults: z.array(
    z.object({
      name: z.string(),
      status: z.string(),
      message: z.string().optional(),
      assertionResults: z.array(z.object({ fullName: z.string(), status: z.string() })),
    }),
  ),
});
type TestFile = z.output<typeof reportSchema>['testResults'][number];

/** The tests that passed in the reports so far, each as its file, a space and its name. */
const passedBefore = new Set<string>();

const [first = '', ...rest] = process.argv.slice(2);
if (first === 'tests') {
  for (const line of passedIn(rest[0] ?? '')) console.log(line);
} else if (first === 'failed' || first === 'passed') {
  const isListed = first === 'failed' ? hasFailed : hasPassed;
  for (const { name } of readReport(rest[0] ?? '').filter(isListed)) {
    console.log(inCheckout(name));
  }
} else {
  const totals = { passed: 0, failed: 0, skipped: 0 };
  const [reports, titles] = [0, 1].map((odd) => [first, ...rest].filter((_, index) => index % 2 === odd));
  for (const [index, report] of (reports ?? []).entries()) {
    const counts = summarize(report);
    if (existsSync(`${report}.json`)) for (const test of passedIn(report)) passedBefore.add(test);
    const line = `${counts.passed} tests passed, ${counts.failed} failed, ${counts.skipped} skipped`;
    console.log(`${titles?.[index] ?? report}: ${line}`);
    for (const name of ['passed', 'failed', 'skipped'] as const) totals[name] += counts[name];
  }
  if (totals.failed > 0) process.exitCode = 1;
  console.log(`${totals.passed} passed, ${totals.failed} failed, ${totals.skipped} skipped`);
}

/** Cuts off the path before `test/`, because the tests may have run in another copy of the checkout. */
function inCheckout(path: string): string {
  return path.replace(/^.*\/(?=test\/)/, '');
}

function passedIn(report: string): string[] {
  return readReport(report).flatMap(({ name, assertionResults }) =>
    assertionResults.flatMap(({ fullName, status }) =>
      status === 'passed' ? `${inCheckout(name)} ${fullName}` : [],
    ),
  );
}

function readReport(report: string): TestFile[] {
  return reportSchema.parse(JSON.parse(readFileSync(`${report}.json`, 'utf8'))).testResults;
}

function hasFailed(file: TestFile): boolean {
  return file.status === 'failed' || file.assertionResults.some((test) => test.status === 'failed');
}

function hasPassed(file: TestFile): boolean {
  return file.status === 'passed' && file.assertionResults.every((test) => test.status === 'passed');
}

/** Prints the names of failed and skipped tests. A test that passed when it was run again counts as passed. */
function summarize(report: string): { passed: number; failed: number; skipped: number } {
  const run = basename(report);
  const counts = { passed: 0, failed: 0, skipped: 0 };
  for (const log of [`${report}.log`, `${report}-again.log`]) {
    const lines = errorsOutsideTests(log);
    if (lines.length === 0) continue;
    counts.failed += 1;
    console.log(`FAILED (${run}): an error outside of the tests:\n  ${lines.join('\n  ')}`);
  }
  let files: TestFile[] = [];
  let again: TestFile[] = [];
  try {
    files = readReport(report);
    if (existsSync(`${report}-again.json`)) again = readReport(`${report}-again`);
  } catch (error) {
    console.log(`vitest left no report: ${String(error)}`);
  }
  for (const file of files) {
    const second = again.find((other) => other.name === file.name);
    // A file that could not be loaded has no tests, so the tests of its second run count.
    const tests = file.assertionResults.length > 0 ? file.assertionResults : (second?.assertionResults ?? []);
    if (tests.length === 0 && hasFailed(second ?? file)) {
      counts.failed += 1;
      console.log(`FAILED (${run}): ${file.name}: ${file.message ?? ''}`);
    }
    for (const { fullName, status } of tests) {
      const passedLater = second?.assertionResults.some(
        (other) => other.fullName === fullName && other.status === 'passed',
      );
      if (status === 'passed') counts.passed += 1;
      else if (status !== 'failed') {
        // A test that passed in an earlier report is not counted as skipped.
        if (passedBefore.has(`${inCheckout(file.name)} ${fullName}`)) continue;
        counts.skipped += 1;
        console.log(`skipped (${run}): ${fullName}`);
      } else {
        counts[passedLater ? 'passed' : 'failed'] += 1;
        console.log(`${passedLater ? 'failed once, passed when run again' : 'FAILED'} (${run}): ${fullName}`);
      }
    }
  }
  // A report without a passed test counts as a failure.
  if (counts.passed === 0) counts.failed += 1;
  return counts;
}

/** The first lines about errors that belong to no test. They fail a run in which every test passed. */
function errorsOutsideTests(log: string): string[] {
  if (!existsSync(log)) return [];
  const lines = stripVTControlCharacters(readFileSync(log, 'utf8')).split('\n');
  const start = lines.findIndex((line) => line.includes('Unhandled Error'));
  return start < 0 ? [] : lines.slice(start, start + 40);
}
