// The page docs/cli.md: its commands run unchanged in one shell, and its tables name only verbs and flags that exist.
import { execFile } from 'node:child_process';
import { chmodSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { promisify } from 'node:util';
import type { Command } from 'commander';
import { expect, test } from 'vitest';
import { loadPtyMaker } from '../../agent/processes/terminals/pty.ts';
import { createProgram } from '../../broker/cli/verb-tree.ts';
import { createLine, severalProgramsMs } from '../cli-fixture.ts';
import { startFarhand } from '../start-farhand.ts';

const page = readFileSync(join(import.meta.dirname, '../../docs/cli.md'), 'utf8');
const blocks = [...page.matchAll(/```sh\n(.*?)```/gs)].map(([, code = '']) => code);

test.skipIf(!loadPtyMaker())(
  'the commands of docs/cli.md succeed and print the expected output (needs the pty library)',
  { timeout: severalProgramsMs },
  async () => {
    const system = await startFarhand();
    for (const name of ['web-1', 'web-2']) await system.agent({ name, tags: 'web' });
    const { home, program } = createLine();
    const bin = join(home, 'bin');
    for (const folder of [bin, join(home, 'site')]) mkdirSync(folder);
    writeFileSync(join(bin, 'farhand'), `#!/bin/sh\nexec ${process.execPath} ${program.file} "$@"\n`);
    chmodSync(join(bin, 'farhand'), 0o755);
    writeFileSync(join(home, 'site/index.html'), 'Hello\n');
    writeFileSync(join(home, 'key'), `${system.key}\n`);
    const script = blocks.join('').replace('https://farhand.example.org', system.url);
    const env = { ...program.env, PATH: `${bin}:${program.env.PATH}` };
    const { stdout } = await promisify(execFile)('sh', ['-ec', script], { cwd: home, env });
    for (const line of [
      /^Logged in to /m,
      /^two words$/m,
      /^hello$/m,
      /^web-2 \| .*Linux/m,
      /^done$/m,
      /index\.html:1:Hello$/m,
      /^42\r?$/m,
      /Monday through Friday/,
    ]) {
      expect(stdout).toMatch(line);
    }
    expect(readFileSync(join(home, 'copy.html'), 'utf8')).toBe('Hello\n');
  },
);

test('the tables of docs/cli.md name verbs and flags that exist', async () => {
  const program = await createProgram();
  const flags = new Set<string | undefined>();
  const note = (command: Command): void => {
    for (const { long } of command.options) flags.add(long);
    for (const one of command.commands) note(one);
  };
  note(program);
  const rows = page.split('\n').filter((line) => line.startsWith('|'));
  const code = rows.flatMap((row) => [...row.matchAll(/`([^`]+)`/g)].map(([, text = '']) => text));
  const calls = code.filter((text) => text.startsWith('farhand '));
  expect(calls.length).toBeGreaterThan(7);
  const nouns = program.commands.map((one) => one.name());
  for (const call of calls) expect(nouns).toContain(call.split(' ')[1]);
  const named = code.flatMap((text) => text.match(/--[a-z][a-z-]+/g) ?? []);
  expect(named.filter((flag) => !flags.has(flag))).toEqual([]);
});
