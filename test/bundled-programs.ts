// Bundles the three programs as they are shipped, once for all test files of a run, into the run's temporary
// folder.
import { execFileSync } from 'node:child_process';
import { existsSync, mkdirSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

export const shipped = join(tmpdir(), 'shipped');

/** Returns the path of a bundled program. */
export function shippedProgram(name: 'farhand' | 'farhand-agent' | 'farhand-broker'): string {
  const made = join(shipped, 'made');
  try {
    mkdirSync(shipped);
    const bundler = join(import.meta.dirname, '../scripts/bundle-programs.ts');
    execFileSync(process.execPath, [bundler, shipped, 'farhand', 'farhand-agent', 'farhand-broker']);
    writeFileSync(made, '');
  } catch (error) {
    if (!(error instanceof Error && 'code' in error && error.code === 'EEXIST')) throw error;
    // Another test file is bundling the programs now.
    const sleeper = new Int32Array(new SharedArrayBuffer(4));
    for (let waited = 0; !existsSync(made) && waited < 60_000; waited += 50) Atomics.wait(sleeper, 0, 0, 50);
  }
  return join(shipped, 'lib', `${name}.js`);
}
