// Kills the broker with kill -9 and starts it again while each page is open. The page reports the lost connection,
// recovers by itself, and displays nothing twice.
import { once } from 'node:events';
import { expect, inject } from 'vitest';
import type { TestSystem } from '../start-farhand.ts';
import { program } from '../start-processes.ts';
import { browserTest, type ConsolePage, newCookie, newWindowWith } from './browser.ts';
import { filledSystem } from './filled-broker.ts';

const healMs = 10_000;

/** Starts a broker with the data and addresses of a broker that has ended. */
async function startProcess({ dataDir, url, grpc }: TestSystem) {
  const where = ['--data-dir', dataDir, '--http', new URL(url).host, '--grpc', grpc];
  const broker = program('test/console/broker-process.ts', [inject('consoleFolder'), ...where]);
  await broker.line('broker is up');
  return broker;
}

/** Returns the text of a page, without numbers and times, which change all the time. */
async function textOf({ page }: ConsolePage): Promise<string> {
  const text = await page.evaluate<string>(`document.querySelector('main').innerText`);
  return text
    .replaceAll(/\d+([.,:]\d+)*/g, '#')
    .replaceAll(/just now|(in )?# (ms|s|min|h|d)( ago)?/g, 'T')
    .replaceAll(/\bnow\b|silent for T/g, 'N')
    .replaceAll(/\s+/g, ' ');
}

/** Describes the first difference of two texts: this part of `text` instead of that part of `expected`. */
function differenceOf(text: string, expected: string): string {
  let at = 0;
  while (at < text.length && text[at] === expected[at]) at += 1;
  const from = Math.max(0, at - 30);
  return `${text.slice(from, at + 60)} instead of ${expected.slice(from, at + 60)}`;
}

const banner = ({ page }: ConsolePage) => page.getByText('The page may be out of date');

browserTest(
  'every page says that the broker is away, and heals within 10 s without doing anything twice',
  async () => {
    const { system, paths: all } = await filledSystem();
    // The end of this test covers the page of the terminal.
    const paths = all.filter((path) => !path.endsWith('/terminals'));
    const machine_id = (await system.client.machines.list()).items[0]?.id ?? '';
    const command = 'i=0; while :; do i=$((i+1)); echo "line-$i."; sleep 0.2; done';
    const { id } = await system.client.commands.async({ machine_id, command });
    const { session_id } = await system.client.sessions.create({ machine_id });
    await system.broker.close();
    const first = await startProcess(system);

    await expect.poll(async () => (await system.client.machines.get({ machine_id })).status).toBe('online');
    const cookie = await newCookie(system);
    const open = async (path: string): Promise<ConsolePage> => {
      const window = await newWindowWith(cookie, system);
      await window.load(path);
      return window;
    };
    // Every four pages share a browser context, with one cache and at most six connections to the broker.
    const pages = new Map<string, ConsolePage>();
    let beside: ConsolePage | undefined;
    for (const [index, path] of paths.entries()) {
      const window =
        index % 4 === 0 || !beside ? await newWindowWith(cookie, system) : await beside.another();
      await window.load(path);
      pages.set(path, window);
      beside = window;
    }
    const output = await open(`/commands/${id}`);
    await output.page.getByText('line-3.').waitFor();
    const terminal = await open(`/machines/${machine_id}/terminals/${session_id}`);
    await terminal.page.getByText('connected').waitFor();
    await terminal.page.keyboard.type("echo on''ce");
    await terminal.page.keyboard.press('Enter');
    await terminal.page.locator('.xterm-rows').getByText('once', { exact: true }).waitFor();

    first.kill('SIGKILL');
    await once(first, 'exit');
    const windows = [...pages.values(), output, terminal];
    await Promise.all(windows.map((window) => banner(window).waitFor()));
    expect(await pages.get('/machines')?.page.locator('.machine-row.old').count()).toBe(1);

    await startProcess(system);
    await Promise.all(
      windows.map((window) => banner(window).waitFor({ state: 'detached', timeout: healMs })),
    );
    const fresh = await newWindowWith(cookie, system);
    const differences: Record<string, string> = {};
    for (const [path, window] of pages) {
      await fresh.load(path);
      const isSame = async (): Promise<boolean> => (await textOf(window)) === (await textOf(fresh));
      await expect
        .poll(isSame, { timeout: healMs })
        .toBe(true)
        .catch(async () => {
          differences[path] = differenceOf(await textOf(window), await textOf(fresh));
        });
    }
    expect(differences).toEqual({});
    const linesOf = async (): Promise<number[]> =>
      [...((await output.page.locator('.output-text').textContent()) ?? '').matchAll(/line-(\d+)\./g)].map(
        ([, number]) => Number(number),
      );
    const lines = await linesOf();
    await expect.poll(async () => (await linesOf()).length).toBeGreaterThan(lines.length);
    const later = await linesOf();
    expect(later).toEqual(later.map((_, index) => index + 1));
    await terminal.page.getByText('connected').waitFor();
    await terminal.page.keyboard.type("echo tw''ice");
    await terminal.page.keyboard.press('Enter');
    const rows = terminal.page.locator('.xterm-rows');
    await rows.getByText('twice', { exact: true }).waitFor();
    expect([
      await rows.getByText('once', { exact: true }).count(),
      await rows.getByText('twice', { exact: true }).count(),
    ]).toEqual([1, 1]);
    // Status 503 means that the broker is back, but the machine is not linked again yet.
    const isFault = (text: string): boolean => !/net::ERR_|status of 503/.test(text);
    expect(windows.flatMap(({ faults }) => faults.filter(isFault))).toEqual([]);
  },
  180_000,
);
