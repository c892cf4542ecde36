// Bundles the three programs as they are shipped, once for all test files of a run.
import { execFileSync } from 'node:child_process';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { madeOnce } from './make-once-per-run.ts';

export const shipped = join(tmpdir(), 'shipped');

export function shippedProgram(name: 'farhand' | 'farhand-agent' | 'farhand-broker'): string {
  madeOnce('shipped', (folder) => {
    const bundler = join(import.meta.dirname, '../scripts/bundle-programs.ts');
    execFileSync(process.execPath, [bundler, folder, 'farhand', 'farhand-agent', 'farhand-broker']);
  });
  return join(shipped, 'lib', `${name}.js`);
}
