// Builds the tar.gz and Debian packages of agent and broker, once for all test files of a run.
import { execFileSync } from 'node:child_process';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { madeOnce } from '../make-once-per-run.ts';

const root = join(import.meta.dirname, '../..');

/** The folder that has the packages for this architecture after the build. */
export const built = join(tmpdir(), 'packages');

export function buildPackages(): void {
  madeOnce('packages', (folder) => {
    const make = ['scripts/package.ts', '--fast', '--arch', process.arch, '--only', 'tar,deb'];
    execFileSync(process.execPath, [...make, '--to', folder], { cwd: root, stdio: 'pipe' });
  });
}
