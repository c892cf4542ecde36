// Measures the time from a key press or click until the page is painted, in 200 actions on the page of machines.
import { at } from '../start-and-measure-programs.ts';
import type { ConsoleBench } from './broker-tab-and-limits.ts';

const rounds = 25;

type Act = () => Promise<unknown>;

/** Returns the actions, each with the condition that is true once the page displays its result. */
function actionsOf({ tab: { page } }: ConsoleBench): [act: Act, condition: string][] {
  const press =
    (key: string): Act =>
    () =>
      page.keyboard.press(key);
  const click =
    (selector: string): Act =>
    () =>
      page.locator(selector).first().click();
  const count = `document.querySelector('.count')?.textContent`;
  const top = `document.querySelector('.machine-row:not(.head) a')?.textContent`;
  const heading = `document.querySelector('h1')?.textContent`;
  const palette = `document.querySelector('.palette')`;
  return [
    [click('.machine-row.head .sort'), `${top} > 'node-00050'`],
    [click('.machine-row.head .sort'), `${top} < 'node-00050'`],
    [() => page.locator('.search input').press('7'), `${count} === '19'`],
    [() => page.locator('.search input').press('Backspace'), `Number(${count}) >= 100`],
    [click('.machine-row:not(.head) a'), `${heading}?.includes('node-')`],
    [click('.menu a[href="/console/machines"]'), `${top} !== undefined`],
    [press('Control+k'), `${palette} !== null`],
    [press('Escape'), `${palette} === null`],
  ];
}

export async function act(consoleBench: ConsoleBench): Promise<void> {
  const { tab, figures } = consoleBench;
  await tab.goto('/machines');
  await tab.firstRows();
  const actions = actionsOf(consoleBench);
  const contents: number[] = [];
  for (let round = 0; round < rounds; round += 1) {
    for (const [run, condition] of actions) {
      await run();
      contents.push(await tab.when(condition));
    }
  }
  const recorded = await tab.page.evaluate<number[]>('[...probe.interactions.values()]');
  // The browser does not report interactions of less than 16 ms. They count as 16 ms here.
  const missing = Math.max(0, contents.length - recorded.length);
  const paints = [...recorded, ...Array<number>(missing).fill(16)].sort((a, b) => a - b);
  contents.sort((a, b) => a - b);
  figures.most(
    `key or click to the next paint, p95 of ${paints.length} (Event Timing)`,
    at(paints, 0.95),
    50,
    'ms',
  );
  figures.line(
    `longest time from a key or click to the next paint: ${paints.at(-1)} ms; ${missing} of ${paints.length} took less than 16 ms and count as 16 ms`,
  );
  figures.row(
    'key or click until its result is painted (two frames after the change): p50 / p95',
    `${at(contents, 0.5).toFixed(0)} / ${at(contents, 0.95).toFixed(0)} ms`,
  );
}
