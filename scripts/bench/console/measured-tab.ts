// A tab of Chromium with the console, and measurements in this tab: paints, long tasks, frames, memory.
import { setTimeout as sleep } from 'node:timers/promises';
import { type Browser, type CDPSession, chromium, type Page } from 'playwright-core';
import { z } from 'zod';
import { mebibytes } from '../start-and-measure-programs.ts';

/**
 * Starts Chromium without its sandbox, because a sandbox needs rights that containers lack. All pages come from our own
 * broker, so that is safe.
 */
export const launchChromium = (): Promise<Browser> =>
  chromium.launch({ executablePath: '/usr/bin/chromium', args: ['--no-sandbox'] });

/** Height in pixels of a row in the list of machines. */
export const rowHeight = 44;

/**
 * Code that runs in a page of the console before the page's own scripts. Its times are in milliseconds since the
 * document was requested.
 */
const probe = `
  const probe = (window.probe = { longTasks: [], interactions: new Map(), frames: [], started: 0 });
  const observe = (type, more, add) => new PerformanceObserver((list) => list.getEntries().forEach(add))
    .observe({ type, buffered: true, ...more });
  observe('longtask', {}, ({ startTime, duration }) => probe.longTasks.push([startTime, duration]));
  observe('event', { durationThreshold: 16 }, ({ interactionId: id, duration }) => {
    if (id) probe.interactions.set(id, Math.max(duration, probe.interactions.get(id) ?? 0));
  });
  for (const type of ['pointerdown', 'keydown'])
    addEventListener(type, ({ timeStamp }) => { probe.started = timeStamp; }, true);
  const painted = (run) => requestAnimationFrame(() => requestAnimationFrame(run));
  /**
   * Resolves to the milliseconds from the last key or mouse press until the condition is true and the page is painted.
   */
  probe.when = (condition) => new Promise((resolve) => {
    const look = () => {
      if (!condition()) return;
      changes.disconnect();
      painted(() => resolve(performance.now() - probe.started));
    };
    // The condition is checked after changes, because a check in each frame would delay the page: while a page
    // requests frames, Chromium delivers messages that follow a key press only with the next frame.
    const changes = new MutationObserver(look);
    changes.observe(document, { childList: true, subtree: true, attributes: true, characterData: true });
    look();
  });
  document.addEventListener('scroll', ({ target }) => {
    if (!probe.counting || !target.matches?.('.rows-body')) return;
    const tops = [...target.querySelectorAll('.row-at')].map((row) => Number.parseFloat(row.style.top));
    const isCovered = Math.min(...tops) <= target.scrollTop
      && Math.max(...tops) + ${rowHeight} >= target.scrollTop + target.clientHeight;
    probe.covered.push(isCovered);
  }, true);
  probe.countFrames = () => {
    probe.frames = [];
    probe.covered = [];
    let last = performance.now();
    const frame = (now) => {
      probe.frames.push({ ms: now - last, blank: document.querySelector('.machine-row.blank') !== null });
      last = now;
      if (probe.counting) requestAnimationFrame(frame);
    };
    probe.counting = true;
    requestAnimationFrame(frame);
  };
  probe.rows = probe.when(() => document.querySelector('.machine-row:not(.head) a') !== null);
`;

export interface Frames {
  /** Milliseconds between two successive frames that Chromium has drawn, sorted. */
  drawn: number[];
  /**
   * Milliseconds between two callbacks of requestAnimationFrame() in the page, sorted. Chromium may draw more often,
   * because it can scroll without running scripts.
   */
  scripts: number[];
  /** Share of the frames with a row that was not loaded yet. */
  blank: number;
  /**
   * Share of the scroll events with empty space at an edge of the list, because the page had not created the rows yet.
   */
  bare: number;
}

export class Tab {
  readonly page: Page;
  readonly #base: string;
  readonly #client: CDPSession;
  readonly #browser: CDPSession;

  /** Opens a new window, and logs in with the key. */
  static async open(browser: Browser, http: string, key: string): Promise<Tab> {
    const context = await browser.newContext({ viewport: { width: 1440, height: 900 } });
    const page = await context.newPage();
    await page.goto(`${http}/console/`);
    await page.getByLabel('API key').fill(key);
    await page.getByRole('button', { name: 'Log in' }).click();
    await page.getByRole('heading', { name: 'Machines', level: 1 }).waitFor();
    await page.addInitScript({ content: probe });
    return new Tab(
      page,
      `${http}/console`,
      await context.newCDPSession(page),
      await browser.newBrowserCDPSession(),
    );
  }

  constructor(page: Page, base: string, client: CDPSession, browser: CDPSession) {
    this.page = page;
    this.#base = base;
    this.#client = client;
    this.#browser = browser;
  }

  /** Loads a path below /console as a new document. */
  async goto(path: string): Promise<void> {
    await this.page.goto(this.#base + path);
  }

  close(): Promise<void> {
    return this.page.context().close();
  }

  /** Slows down the CPU of the page by this factor. */
  async throttle(rate: number): Promise<void> {
    await this.#client.send('Emulation.setCPUThrottlingRate', { rate });
  }

  /** Returns the milliseconds from the request of the document until the first rows were painted. */
  firstRows(): Promise<number> {
    return this.page.evaluate<number>('probe.rows');
  }

  /**
   * Resolves when an expression in the page is true, with the milliseconds since the last key or mouse press that the
   * bench has simulated.
   */
  when(condition: string): Promise<number> {
    return this.page.evaluate<number>(`probe.when(() => ${condition})`);
  }

  /**
   * Returns the duration in milliseconds of the longest task of the page that began at `since` (a value of now()) or
   * later; 0 if none took 50 ms.
   */
  longestTask(since: number): Promise<number> {
    return this.page.evaluate<number>(
      `Math.max(0, ...probe.longTasks.filter(([start]) => start >= ${since}).map(([, ms]) => ms))`,
    );
  }

  now(): Promise<number> {
    return this.page.evaluate<number>('performance.now()');
  }

  /** Measures the frames that are drawn while `work` runs. */
  async frames(work: () => Promise<void>): Promise<Frames> {
    const browser = this.page.context().browser();
    if (!browser) throw new Error('this tab belongs to no browser, so its frames cannot be traced');
    await browser.startTracing(this.page, { categories: ['viz'] });
    await this.page.evaluate('probe.countFrames()');
    await work();
    const { frames, covered } = await this.page.evaluate<{
      frames: { ms: number; blank: boolean }[];
      covered: boolean[];
    }>('probe.counting = false, probe');
    return {
      drawn: gapsOf(drawTimes(await browser.stopTracing())),
      scripts: sorted(frames.map(({ ms }) => ms)),
      blank: frames.filter(({ blank }) => blank).length / frames.length,
      bare: covered.filter((isCovered) => !isCovered).length / covered.length,
    };
  }

  /** Scrolls by a number of pixels in small steps, as with a touchpad. Resolves when the page has scrolled. */
  async scroll(pixels: number, perSecond: number): Promise<void> {
    await this.#client.send('Input.synthesizeScrollGesture', {
      x: 700,
      y: 450,
      yDistance: -pixels,
      speed: perSecond,
      gestureSourceType: 'mouse',
    });
  }

  /** Drops files and folders of this machine onto the page. */
  async drop(paths: string[]): Promise<void> {
    const data = { items: [], files: paths, dragOperationsMask: 1 };
    for (const type of ['dragEnter', 'dragOver', 'drop'] as const)
      await this.#client.send('Input.dispatchDragEvent', { type, x: 700, y: 450, data });
  }

  /** Returns the MiB of JavaScript objects that are in use after a garbage collection. */
  async heap(): Promise<number> {
    await this.#client.send('HeapProfiler.collectGarbage');
    const { usedSize } = await this.#client.send('Runtime.getHeapUsage');
    return usedSize / 1024 ** 2;
  }

  /** Returns the MiB of the tab's process, without mapped files. */
  async memory(): Promise<number> {
    const { processInfo } = await this.#browser.send('SystemInfo.getProcessInfo');
    const renderers = processInfo.filter(({ type }) => type === 'renderer');
    // Chromium may also run a spare renderer for the next tab. It is smaller than the renderer of this tab.
    return Math.max(...renderers.map(({ id }) => mebibytes(id, 'RssAnon')));
  }

  /** Returns the highest memory while `work` runs, measured ten times a second. */
  async peakMemory(work: () => Promise<void>): Promise<number> {
    let [peak, isOver] = [await this.memory(), false];
    const watch = async (): Promise<void> => {
      while (!isOver) {
        peak = Math.max(peak, await this.memory());
        await sleep(100);
      }
    };
    const watching = watch();
    try {
      await work();
    } finally {
      isOver = true;
      await watching;
    }
    return peak;
  }
}

const traceSchema = z.object({
  traceEvents: z.array(z.object({ name: z.string(), ph: z.string(), ts: z.number() })),
});

/** Returns the times, in milliseconds, at which Chromium has drawn according to its trace. */
function drawTimes(trace: Buffer): number[] {
  const { traceEvents } = traceSchema.parse(JSON.parse(trace.toString()));
  const draws = traceEvents.filter(({ name, ph }) => name === 'Display::DrawAndSwap' && ph === 'X');
  return sorted(draws.map(({ ts }) => ts / 1000));
}

const sorted = (values: number[]): number[] => values.sort((a, b) => a - b);

const gapsOf = (times: number[]): number[] =>
  sorted(times.slice(1).map((time, index) => time - (times[index] ?? time)));
