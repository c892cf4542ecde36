// What a process gives back of Node's own file; each is one of its own, for its memory counts as a whole.
import { execFile } from 'node:child_process';
import { createHash } from 'node:crypto';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { expect, test } from 'vitest';
import { koffi } from '../agent/libc.ts';

const unmap = join(import.meta.dirname, '../agent/unmap.ts');

/** What a process has of files before and after it unmaps Node's own, in MiB, and what it can still do then. */
async function unmapped(addon: string): Promise<{ before: number; after: number; said: string }> {
  const program = `
    import { createHash } from 'node:crypto';
    import { readFileSync } from 'node:fs';
    import { unmapperOf } from ${JSON.stringify(unmap)};
    const resident = () => Number(/RssFile:\\s+(\\d+)/.exec(readFileSync('/proc/self/status', 'utf8'))[1]) / 1024;
    const unmap = unmapperOf(${JSON.stringify(addon)}, ${JSON.stringify(import.meta.url)});
    const before = resident();
    unmap();
    const after = resident();
    const said = createHash('sha256').update(new Intl.NumberFormat('de').format(1234.5)).digest('hex');
    console.log(JSON.stringify({ before, after, said }));
  `;
  const args = ['--input-type=module-typescript', '-e', program];
  return JSON.parse((await promisify(execFile)(process.execPath, args)).stdout);
}

test('a process without the addon keeps what it has', async () => {
  const { before, after } = await unmapped('@koromix/koffi-none');
  expect(after).toBeGreaterThan(before * 0.9);
});

test('a process gives back what it has used of Node’s file, and goes on using it', async () => {
  const seen = await unmapped(koffi());
  expect(seen.after).toBeLessThan(seen.before * 0.7);
  expect(seen.said).toBe(createHash('sha256').update('1.234,5').digest('hex'));
});
