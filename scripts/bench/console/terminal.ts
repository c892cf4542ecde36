// Measures a terminal whose program floods the page with output, and the echo of keys after that.
import { setTimeout as sleep } from 'node:timers/promises';
import { at } from '../start-and-measure-programs.ts';
import type { ConsoleBench } from './broker-tab-and-limits.ts';

const keys = 100;
const betweenKeysMs = 40;
const longestMs = 30_000;

/** A script for the page that records the time from each key press until its echo is painted. */
const watchEchoes = `
  probe.echoes = [];
  const rows = document.querySelector('.xterm-rows');
  const painted = new MessageChannel();
  painted.port1.onmessage = () => {
    if (probe.started) probe.echoes.push(performance.now() - probe.started);
    probe.started = 0;
  };
  // The observer runs before the changed rows are painted. The message that it posts arrives after the painting.
  new MutationObserver((changes) => {
    const isEcho = changes.some(({ target }) => target.textContent.includes('xx'));
    if (isEcho && probe.started) painted.port2.postMessage(0);
  }).observe(rows, { childList: true, subtree: true, characterData: true });
`;

export async function floodTerminal({ tab, figures, real }: ConsoleBench): Promise<void> {
  const { page } = tab;
  await tab.goto(`/machines/${real.id}/terminals`);
  await page.getByRole('button', { name: 'Open a terminal' }).click();
  await page.getByText('connected', { exact: true }).waitFor();
  await page.keyboard.type(`PS1=; yes | head -c 40M; echo the-'end'`);
  const from = await tab.now();
  const begun = performance.now();
  const peak = await tab.peakMemory(async () => {
    await page.keyboard.press('Enter');
    await page.locator('.xterm-rows').getByText('the-end', { exact: true }).waitFor({ timeout: longestMs });
  });
  const seconds = (performance.now() - begun) / 1_000;
  figures.row(
    'terminal, `yes | head -c 40M`: time until its end marker was there',
    `${seconds.toFixed(1)} s`,
  );
  figures.most('terminal, same output: longest task of the page', await tab.longestTask(from), 100, 'ms');
  figures.line(`memory of the tab: ${peak.toFixed(0)} MiB at most`);
  await page.evaluate(watchEchoes);
  await page.keyboard.type('xx');
  for (let n = 0; n < keys; n += 1) {
    await sleep(betweenKeysMs);
    await page.keyboard.press('x');
  }
  await sleep(betweenKeysMs * 5);
  const echoes = (await page.evaluate<number[]>('probe.echoes')).sort((a, b) => a - b);
  figures.most(
    `terminal, after \`yes | head -c 40M\`: time from a key press to its painted echo, p50 of ${echoes.length}`,
    at(echoes, 0.5),
    20,
    'ms',
  );
  figures.line(`p95 ${at(echoes, 0.95).toFixed(1)} ms`);
}
