// Measures the page of machines: the time until its first rows, its longest task while machines report, and its
// scrolling.
import { setTimeout as sleep } from 'node:timers/promises';
import { at } from '../start-and-measure-programs.ts';
import type { ConsoleBench } from './broker-tab-and-limits.ts';
import { rowHeight } from './measured-tab.ts';

const settledMs = 1_500;
/** Milliseconds for which the page is observed. Machines report every 15 s, so most of them report once. */
const watchedMs = 12_000;
const percent = (share: number): string => `${(share * 100).toFixed(0)} %`;

/** Measures the page with a hundred machines, as if the processor were four times slower. */
export async function measureSlowPage({ tab, figures }: ConsoleBench): Promise<void> {
  await tab.throttle(4);
  await tab.goto('/machines');
  figures.most('100 machines, CPU 4 times slower: first rows', await tab.firstRows(), 1_000, 'ms');
  await sleep(watchedMs);
  const longest = await tab.longestTask(settledMs);
  figures.most(
    '100 machines, CPU 4 times slower: longest task that began 1.5 s to 12 s after the page was opened',
    longest,
    100,
    'ms',
  );
  await tab.throttle(1);
}

export async function measureLargeFleet({ tab, figures, machines }: ConsoleBench): Promise<void> {
  const count = machines.toLocaleString('en');
  for (const rate of [4, 1]) {
    await tab.throttle(rate);
    await tab.goto('/machines');
    const first = await tab.firstRows();
    figures.most(
      `${count} machines${rate > 1 ? `, CPU ${rate} times slower` : ''}: first rows`,
      first,
      1_000,
      'ms',
    );
  }
  for (const [pixels, speed] of [
    [12_000, 2_000],
    [60_000, 20_000],
  ] as const) {
    const { drawn, scripts, blank, bare } = await tab.frames(() => tab.scroll(pixels, speed));
    const at95 = at(drawn, 0.95);
    figures.most(
      `${count} machines: p95 frame of scrolling, ${speed.toLocaleString('en')} px/s`,
      at95,
      20,
      'ms',
    );
    const [script, empty, cut] = [at(scripts, 0.95).toFixed(1), percent(blank), percent(bare)];
    figures.line(
      `time between two animation frames of the page: p95 ${script} ms; frames with a row still loading: ${empty}; scroll events with empty space at an edge of the list: ${cut}`,
    );
  }
  // Scrolls through the whole list, so that the page has loaded every row before its memory is measured.
  const end = machines * rowHeight;
  for (let pixels = 0; pixels < end; pixels += 50 * rowHeight) {
    await tab.page.evaluate(`document.querySelector('.rows-body').scrollTop = ${pixels}`);
    await tab.when(`document.querySelector('.machine-row.blank') === null`);
  }
  figures.most(`${count} machines, after all were loaded: JavaScript heap`, await tab.heap(), 60, 'MiB');
  const longest = await tab.longestTask(settledMs);
  figures.line(`longest task of the browser with the large fleet: ${longest.toFixed(0)} ms`);
}
