// Generates the types of the protos, then runs all static checks at the same time. Prints their results, the counts of
// words to avoid, and the output of failed checks.
import { join } from 'node:path';
import { execa } from 'execa';

const root = join(import.meta.dirname, '..');

type Check = [name: string, command: string, args: string[]];

// Must run before the checks, because they read the types that it generates.
const first: Check = ['generated types', process.execPath, ['scripts/generate-proto-types.ts']];
const checks: Check[] = [
  ['types', 'tsc', ['--noEmit']],
  ['types of the console', 'tsc', ['--noEmit', '--project', 'broker/console']],
  ['format and lint', 'biome', ['ci', '--error-on-warnings', '--colors=off', '.']],
  ['lint with types', 'oxlint', ['--type-aware', '--deny-warnings', '--report-unused-disable-directives']],
  ['unused code', 'knip', []],
  ['protos', 'buf', ['lint']],
  ['words', process.execPath, ['scripts/check-words.ts']],
  ['architecture', 'vitest', ['run', '--reporter=dot', 'test/architecture.test.ts']],
];

interface Result {
  name: string;
  ok: boolean;
  output: string;
}

/** Runs one check to its end. A command that cannot be started counts as failed. */
async function run([name, command, args]: Check): Promise<Result> {
  const { failed, durationMs, all, originalMessage } = await execa(command, args, {
    cwd: root,
    preferLocal: true,
    env: { NO_COLOR: '1' },
    all: true,
    reject: false,
  });
  console.log(`${failed ? 'failed' : 'ok    '}  ${name} (${(durationMs / 1000).toFixed(1)} s)`);
  return { name, ok: !failed, output: all || `${command}: ${originalMessage}` };
}

const results = [await run(first), ...(await Promise.all(checks.map(run)))];
const failed = results.filter((result) => !result.ok);
const printed = results.filter(({ name, ok }) => !ok || name === 'words');
for (const { name, output } of printed) console.log(`\n--- ${name} ---\n${output.trim()}`);
console.log(
  failed.length === 0 ? '\nall checks passed' : `\n${failed.length} of ${results.length} checks failed`,
);
process.exitCode = failed.length === 0 ? 0 : 1;
