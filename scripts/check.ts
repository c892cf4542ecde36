// Generates the wire types, then runs every static check at once; prints each one's result, and the output of
// those that failed.
import { spawn } from 'node:child_process';
import { join } from 'node:path';

const root = join(import.meta.dirname, '..');
const env = { ...process.env, PATH: `${join(root, 'node_modules/.bin')}:${process.env.PATH}`, NO_COLOR: '1' };

type Check = [name: string, command: string, args: string[]];

// The others read what this one writes.
const first: Check = ['generated types', process.execPath, ['scripts/generate.ts']];
const checks: Check[] = [
  ['types', 'tsc', ['--noEmit']],
  ['format and lint', 'biome', ['ci', '--error-on-warnings', '--colors=off', '.']],
  ['lint with types', 'oxlint', ['--type-aware', '--deny-warnings', '--report-unused-disable-directives']],
  ['unused code', 'knip', []],
  ['protos', 'buf', ['lint']],
  ['architecture', 'vitest', ['run', '--reporter=dot', 'test/architecture.test.ts']],
];

interface Result {
  name: string;
  ok: boolean;
  output: string;
}

/** Runs one command to its end; a command that cannot even start has failed too. */
function run([name, command, args]: Check): Promise<Result> {
  const started = performance.now();
  const child = spawn(command, args, { cwd: root, env, stdio: ['ignore', 'pipe', 'pipe'] });
  let output = '';
  for (const stream of [child.stdout, child.stderr]) {
    stream.setEncoding('utf8').on('data', (text: string) => {
      output += text;
    });
  }
  return new Promise((resolve) => {
    const end = (ok: boolean) => {
      const seconds = ((performance.now() - started) / 1000).toFixed(1);
      console.log(`${ok ? 'ok    ' : 'failed'}  ${name} (${seconds} s)`);
      resolve({ name, ok, output });
    };
    child.on('close', (code) => end(code === 0));
    child.on('error', (error) => {
      output += `${command}: ${error.message}\n`;
      end(false);
    });
  });
}

const results = [await run(first), ...(await Promise.all(checks.map(run)))];
const failed = results.filter((result) => !result.ok);
for (const { name, output } of failed) console.log(`\n--- ${name} ---\n${output.trim()}`);
console.log(
  failed.length === 0 ? '\nall checks passed' : `\n${failed.length} of ${results.length} checks failed`,
);
process.exitCode = failed.length === 0 ? 0 : 1;
