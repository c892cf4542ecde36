// Before the tests: generated types, which some of them compile against. After them: how to run less than everything.
import { execFileSync } from 'node:child_process';
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { removeShipped } from './shipped.ts';

const root = join(import.meta.dirname, '..');

export default function setup(): () => void {
  if (!existsSync(join(root, 'proto/types')))
    execFileSync(process.execPath, [join(root, 'scripts/generate.ts')]);
  return () => {
    removeShipped();
    console.log(
      'one tier: npm test -- --project default (cli, agent, faults, attack, box); one file: npm test -- test/files.test.ts',
    );
  };
}
