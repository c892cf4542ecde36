// What `npm run package` prints if it cannot write its files, or if one of its programs fails.
import { spawnSync } from 'node:child_process';
import { chmodSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { temporaryFolder } from '../start-farhand.ts';

const root = join(import.meta.dirname, '../..');

function makePackages(args: string[], path = ''): { status: number | null; stderr: string } {
  return spawnSync(process.execPath, ['scripts/package.ts', ...args], {
    cwd: root,
    encoding: 'utf8',
    env: { ...process.env, PATH: `${path}:${process.env.PATH}` },
  });
}

test('npm run package exits with 1 and prints one line if its directory is a file', () => {
  const { status, stderr } = makePackages(['--to', join(root, 'package.json')]);
  expect([status, stderr]).toEqual([
    1,
    expect.stringMatching(/^npm run package: .*package\.json: .*(EEXIST|ENOTDIR).*\n$/),
  ]);
});

test('npm run package prints the command and its last lines if npm fails', { timeout: 120_000 }, () => {
  const [bin, to] = [temporaryFolder('bin'), temporaryFolder('dist')];
  writeFileSync(join(bin, 'npm'), '#!/bin/sh\nseq 1 1000 >&2\nexit 7\n');
  chmodSync(join(bin, 'npm'), 0o755);
  const { status, stderr } = makePackages(['--only', 'npm', '--to', to], bin);
  const [first, ...lines] = stderr.split('\n');
  expect([status, first]).toEqual([
    1,
    expect.stringMatching(/^npm run package: Command failed with exit code 7: npm pack /),
  ]);
  expect(lines).toEqual([...Array.from({ length: 20 }, (_, at) => String(981 + at)), '']);
});
