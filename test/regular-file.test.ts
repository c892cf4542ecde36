// How root reads files in a directory of another user, who may replace them with links or pipes.
import { execFileSync, spawnSync } from 'node:child_process';
import { symlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, test } from 'vitest';
import { readIdentity } from '../shared/read-agent-identity.ts';
import { readRegularFile } from '../shared/read-regular-file.ts';
import { temporaryFolder } from './start-farhand.ts';

const checkout = join(import.meta.dirname, '..');

describe('in a directory that another user owns, root', () => {
  /** Makes a data directory in which a FIFO, link or device has the name of a file. */
  function directoryWith(name: string, what: 'FIFO' | 'link' | 'device'): string {
    const directory = temporaryFolder('foreign');
    const file = join(directory, name);
    if (what === 'FIFO') execFileSync('mkfifo', ['-m', '600', file]);
    else symlinkSync(what === 'link' ? '/etc/passwd' : '/dev/zero', file);
    return directory;
  }

  test.each(['FIFO', 'link', 'device'] as const)('refuses a file that is a %s', async (what) => {
    const directory = directoryWith('identity.json', what);
    const refused = { exitCode: 78, message: expect.stringContaining('is not a regular file; remove it') };
    await expect(readRegularFile(join(directory, 'identity.json'))).rejects.toMatchObject(refused);
    await expect(readIdentity(directory)).rejects.toMatchObject(refused);
    const doctor = ['broker/cli/main.ts', 'doctor', '--agent-data-dir', directory];
    const { status, stdout } = spawnSync(process.execPath, doctor, {
      cwd: checkout,
      encoding: 'utf8',
      timeout: 20_000,
    });
    expect([status, stdout]).toEqual([1, expect.stringMatching(/is not a regular file|other users can use/)]);
  });

  test('refuses a file that is larger than it should be', async () => {
    const file = join(temporaryFolder('foreign'), 'identity.json');
    writeFileSync(file, Buffer.alloc(64 * 1024 + 1, 'x'));
    await expect(readRegularFile(file)).rejects.toThrow('is larger than 65536 bytes');
    writeFileSync(file, Buffer.alloc(64 * 1024, 'x'));
    expect((await readRegularFile(file))?.text).toHaveLength(64 * 1024);
  });
});
