// Reads vitest's reports.
//
//   node .ci/summary.mjs failed REPORT.json   prints the files with a failed test, a line each
//   node .ci/summary.mjs REPORT TITLE …       prints failed and skipped tests by name (which says why they are skipped), then totals
import { existsSync, readFileSync } from 'node:fs';
import { basename, relative } from 'node:path';

const read = (path) => JSON.parse(readFileSync(path, 'utf8')).testResults;
const hasFailed = (file) => file.status === 'failed' || file.assertionResults.some((test) => test.status === 'failed');

if (process.argv[2] === 'failed') {
  for (const file of read(process.argv[3]).filter(hasFailed)) console.log(relative(process.cwd(), file.name));
} else {
  const totals = { passed: 0, failed: 0, skipped: 0 };
  for (let index = 2; index < process.argv.length; index += 2) summarize(process.argv[index], process.argv[index + 1], totals);
  if (totals.failed > 0) process.exitCode = 1;
  console.log(`${totals.passed} passed, ${totals.failed} failed, ${totals.skipped} skipped`);
}

/** Prints one run of tests and its second run, if there was one, and adds it to the totals. */
function summarize(report, title, totals) {
  const run = basename(report);
  let files = [];
  let again = [];
  try {
    files = read(`${report}.json`);
    if (existsSync(`${report}-again.json`)) again = read(`${report}-again.json`);
  } catch (error) {
    console.log(`vitest left no report: ${error.message}`);
  }
  const counts = { passed: 0, failed: 0, skipped: 0 };
  for (const file of files) {
    const second = again.find((other) => other.name === file.name);
    // A file that could not be loaded has no test at all: its second run counts in its place.
    const tests = file.assertionResults.length > 0 ? file.assertionResults : (second?.assertionResults ?? []);
    if (hasFailed(file) && !tests.some((test) => test.status === 'failed') && (!second || hasFailed(second))) {
      counts.failed += 1;
      console.log(`FAILED (${run}): ${file.name}: ${file.message}`);
    }
    for (const test of tests) {
      const status = test.status === 'passed' || test.status === 'failed' ? test.status : 'skipped';
      const passedLater = second?.assertionResults.some(
        (other) => other.fullName === test.fullName && other.status === 'passed',
      );
      counts[status === 'failed' && passedLater ? 'passed' : status] += 1;
      if (status === 'skipped') console.log(`skipped (${run}): ${test.fullName}`);
      if (status === 'failed')
        console.log(`${passedLater ? 'failed once, passed by itself' : 'FAILED'} (${run}): ${test.fullName}`);
    }
  }
  if (counts.passed === 0) counts.failed += 1;
  console.log(`${title}: ${counts.passed} tests passed, ${counts.failed} failed, ${counts.skipped} skipped`);
  for (const name of Object.keys(totals)) totals[name] += counts[name];
}
