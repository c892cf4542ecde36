// What V8 gives back when a process rests; each process is one of its own, for its memory counts as a whole.
import { execFile } from 'node:child_process';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { expect, test } from 'vitest';

const heap = join(import.meta.dirname, '../shared/heap.ts');

interface Told {
  /** Resident MiB when much was in use, and at the end. */
  full: number;
  after: number;
  /** Collections of all that can be, as V8 makes none by itself. */
  asked: number;
}

/** A process that soon needs 100 MiB no longer; `meanwhile` is what it does then, and `asked` says what was asked of V8. */
async function rush(meanwhile: string): Promise<Told> {
  const program = `
    import { constants, PerformanceObserver } from 'node:perf_hooks';
    import { setTimeout } from 'node:timers/promises';
    import { giveBackAtRest } from ${JSON.stringify(heap)};
    const resident = () => process.memoryUsage.rss() / 2 ** 20;
    let asked = 0;
    new PerformanceObserver((list) => {
      for (const { detail } of list.getEntries()) if (detail.flags & constants.NODE_PERFORMANCE_GC_FLAGS_ALL_AVAILABLE_GARBAGE) asked += 1;
    }).observe({ type: 'gc' });
    let held = Array.from({ length: 1_500_000 }, (_, n) => ({ n, text: 'x' + n }));
    const full = resident();
    held = undefined;
    giveBackAtRest(100);
    ${meanwhile}
    console.log(JSON.stringify({ full, after: resident(), asked }));
  `;
  const { stdout } = await promisify(execFile)(process.execPath, [
    '--input-type=module-typescript',
    '-e',
    program,
  ]);
  return JSON.parse(stdout);
}

test('a process that is busy is not held up to give memory back', async () => {
  const { asked } = await rush(`
    for (let n = 0; n < 10; n += 1) {
      for (const until = performance.now() + 90; performance.now() < until; );
      await setTimeout(1);
    }
  `);
  expect(asked).toBe(0);
});

test('a process that rests gives back what it needs no longer', async () => {
  const { full, after, asked } = await rush('while (!asked) await setTimeout(20);');
  expect(asked).toBeGreaterThan(0);
  expect(full - after).toBeGreaterThan(80);
});
