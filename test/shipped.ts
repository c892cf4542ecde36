// The three programs bundled as they are shipped: made once for all files of a run, removed at its end (tiers.ts).
import { execFileSync } from 'node:child_process';
import { existsSync, mkdirSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

/** Of the run with this process id. */
const folderOf = (pid: number): string => join(tmpdir(), `farhand-shipped-${pid}`);

/** Each file of tests is a process of its own, started by that of the run. */
export const shipped = folderOf(process.ppid);

/** The file of a program. */
export function shippedProgram(name: 'farhand' | 'farhand-agent' | 'farhand-broker'): string {
  const made = join(shipped, 'made');
  try {
    mkdirSync(shipped);
    const bundler = join(import.meta.dirname, '../scripts/bundle-cli.ts');
    execFileSync(process.execPath, [bundler, shipped, 'farhand', 'farhand-agent', 'farhand-broker']);
    writeFileSync(made, '');
  } catch (error) {
    if (!(error instanceof Error && 'code' in error && error.code === 'EEXIST')) throw error;
    // Another file is making it.
    const sleeper = new Int32Array(new SharedArrayBuffer(4));
    for (let waited = 0; !existsSync(made) && waited < 60_000; waited += 50) Atomics.wait(sleeper, 0, 0, 50);
  }
  return join(shipped, 'lib', `${name}.js`);
}

/** Called by the process of the run. */
export function removeShipped(): void {
  rmSync(folderOf(process.pid), { recursive: true, force: true });
}
