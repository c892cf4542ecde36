// The log of a program on standard error: JSON, or text with levels if standard error goes to systemd's journal.
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { closeSync, fstatSync, openSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { text } from 'node:stream/consumers';
import { describe, expect, test } from 'vitest';
import { temporaryFolder } from '../start-farhand.ts';

const checkout = join(import.meta.dirname, '../..');

describe('the log of a program', () => {
  /**
   * Runs a program with this source, and returns what it writes to standard error, which is a file. `stream` is the
   * value of JOURNAL_STREAM. In it, `<FILE>` stands for the device and inode of the file.
   */
  async function logged(source: string, stream: string | undefined): Promise<string> {
    const file = join(temporaryFolder('log'), 'stderr');
    const fd = openSync(file, 'w');
    const { dev, ino } = fstatSync(fd);
    const env = { PATH: process.env.PATH, JOURNAL_STREAM: stream?.replace('<FILE>', `${dev}:${ino}`) };
    const args = ['--input-type=module', '--eval', source];
    const child = spawn(process.execPath, args, { env, cwd: checkout, stdio: ['ignore', 'ignore', fd] });
    closeSync(fd);
    await once(child, 'exit');
    return readFileSync(file, 'utf8');
  }

  const source = `import { createLogger, isJournal } from './shared/logger.ts';
    const log = createLogger('x', 'debug', isJournal(process.env));
    log.debug('one');
    log.info({ path: '/a b', count: 2, name_of: 'web-1' }, 'two');
    log.warn({ text: 'new\\nline \\u001b[2J\\u009b' }, 'three');
    log.error({ err: new TypeError('bad') }, 'four');`;

  test.each([undefined, '1:2'])('is JSON where standard error is not the journal (%s)', async (stream) => {
    const lines = (await logged(source, stream)).trim().split('\n');
    expect(lines.map((line) => [JSON.parse(line).level, JSON.parse(line).msg])).toEqual([
      [20, 'one'],
      [30, 'two'],
      [40, 'three'],
      [50, 'four'],
    ]);
  });

  test('is text with a priority on every line in the journal, without control characters', async () => {
    const lines = (await logged(source, '<FILE>')).trimEnd().split('\n');
    expect(lines.slice(0, 5)).toEqual([
      '<7>one',
      '<6>two path="/a b" count=2 name_of=web-1',
      '<4>three text="new\\nline \\u001b[2J\ufffd"',
      '<3>four type=TypeError message=bad',
      expect.stringMatching(/^<3> {4}at .*eval/),
    ]);
    expect(lines.filter((line) => !/^<\d>/.test(line))).toEqual([]);
  });

  test('has the stack of an unexpected error, but not of an expected one', async () => {
    const source = `import { createLogger } from './shared/logger.ts';
      import { AppError } from './shared/errors.ts';
      const log = createLogger('x', 'info');
      for (const code of ['unavailable', 'internal_error']) log.error({ err: new AppError(code, 'no') }, code);`;
    const [expected = '', unexpected = ''] = (await logged(source, undefined)).trim().split('\n');
    expect(JSON.parse(expected).err).toEqual({
      ...{ type: 'AppError', name: 'AppError', message: 'no', code: 'unavailable', details: {} },
    });
    expect(JSON.parse(unexpected).err.stack).toContain('AppError');
  });

  test('delays no other work while its reader is slow, and loses no line', async () => {
    const source = `import { createLogger } from './shared/logger.ts';
      const log = createLogger('x', 'info');
      // Creating process.stderr makes the pipe non-blocking: a write to the full pipe then fails instead of waiting.
      process.stderr;
      for (let n = 0; n < 5_000; n += 1) log.info({ n, text: 'x'.repeat(100) }, 'line');
      console.log('done');`;
    const args = ['--input-type=module', '--eval', source];
    const child = spawn(process.execPath, args, { cwd: checkout, stdio: ['ignore', 'pipe', 'pipe'] });
    // The program prints `done` after its last log line. Until then the test reads nothing of the log. So a logger that
    // waits for its reader would block, and `done` would never arrive.
    await once(child.stdout, 'data');
    const lines = (await text(child.stderr)).trim().split('\n');
    expect(lines.map((line) => JSON.parse(line).n)).toEqual(Array.from({ length: 5_000 }, (_, n) => n));
  });

  test.each(['agent', 'broker'])(
    'of the %s ends with an error of priority 3 in the journal',
    async (name) => {
      const main = `process.argv.push('--http', 'none', '--broker', 'none'); await import('./${name}/main.ts');`;
      expect(await logged(main, '<FILE>')).toMatch(new RegExp(`^<3>farhand-${name}: .*\n(<3>.*\n)*$`));
    },
  );
});
