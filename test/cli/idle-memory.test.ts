// The memory that an idle process releases, and collections while connections arrive. Each test starts a separate
// process, because it measures the memory of the whole process.
import { execFile } from 'node:child_process';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { expect, test } from 'vitest';

const clock = join(import.meta.dirname, '../../shared/clock.ts');
const heap = join(import.meta.dirname, '../../shared/v8-garbage-collection.ts');

/** Starts a process that has 100 MiB of garbage. Returns its resident MiB before and after it runs `meanwhile`. */
async function rush(meanwhile: string): Promise<{ full: number; after: number }> {
  const program = `
    import { setTimeout } from 'node:timers/promises';
    import { collectAtRest } from ${JSON.stringify(heap)};
    const resident = () => process.memoryUsage.rss() / 2 ** 20;
    let held = Array.from({ length: 1_500_000 }, (_, n) => ({ n, text: 'x' + n }));
    const full = resident();
    held = undefined;
    collectAtRest(100);
    ${meanwhile}
    console.log(JSON.stringify({ full, after: resident() }));
  `;
  const args = ['--input-type=module-typescript', '-e', program];
  return JSON.parse((await promisify(execFile)(process.execPath, args)).stdout);
}

test('a busy process is not delayed to release memory', async () => {
  const { full, after } = await rush(`
    for (let n = 0; n < 10; n += 1) {
      for (const until = performance.now() + 90; performance.now() < until; );
      await setTimeout(1);
    }
  `);
  expect(full - after).toBeLessThan(40);
});

test('an idle process releases unused memory, sooner than V8 would', async () => {
  const { full, after } = await rush(
    'for (let n = 0; n < 50 && resident() > full - 80; n += 1) await setTimeout(100);',
  );
  expect(full - after).toBeGreaterThan(80);
});

/** Starts a process that allocates 1.5 GiB while it accepts connections. Returns how often V8 collected its heap. */
async function collectionsWith(connections: number): Promise<number> {
  // This clock fires each timer in the next turn of the event loop. So countConnection() counts the connections per
  // turn, not per second.
  const program = `
    import { constants, PerformanceObserver } from 'node:perf_hooks';
    import { setImmediate as nextTurn } from 'node:timers/promises';
    import { setClock } from ${JSON.stringify(clock)};
    import { countConnection } from ${JSON.stringify(heap)};
    setClock({
      now: Date.now,
      monotonic: () => performance.now(),
      after(ms, run) {
        const turn = setImmediate(run);
        return () => clearImmediate(turn);
      },
    });
    let collections = 0;
    new PerformanceObserver((list) => {
      for (const { detail } of list.getEntries()) if (detail.kind === constants.NODE_PERFORMANCE_GC_MAJOR) collections += 1;
    }).observe({ entryTypes: ['gc'] });
    const held = [];
    while (held.push(Buffer.allocUnsafeSlow(2 ** 20)) < 1_500) {
      for (let n = 0; n < ${connections}; n += 1) countConnection();
      await nextTurn();
    }
    console.log(collections);
  `;
  const args = ['--input-type=module-typescript', '-e', program];
  const { stdout, stderr } = await promisify(execFile)(process.execPath, args);
  expect(stderr).toBe('');
  return Number(stdout);
}

test.skipIf(!process.versions.v8.startsWith('13.'))(
  'while many connections arrive, memory outside of the heap causes fewer collections',
  async () => {
    const [few, many] = [await collectionsWith(0), await collectionsWith(200)];
    expect(few).toBeGreaterThan(8);
    expect(many).toBeLessThan(few / 3);
  },
);
