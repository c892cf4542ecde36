// Every page in both themes and both widths: nothing that axe-core finds, nothing that the policy refuses.
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { join } from 'node:path';
import { expect } from 'vitest';
import { shared } from '../close-after-tests.ts';
import type { TestSystem } from '../start-farhand.ts';
import { temporaryFolder } from '../start-farhand.ts';
import {
  browserTest,
  type ConsolePage,
  newLogin,
  newWindow,
  startMachine,
  startWithConsole,
} from './browser.ts';

const axe = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');
const hostile = '<img src=x onerror=alert(1)>';

/** Rules of axe-core whose result depends on the theme; all others are about the document. */
const themed = ['color-contrast', 'link-in-text-block'];

interface Violation {
  id: string;
  nodes: { html: string }[];
}

/** What axe-core finds on the page as it is now. */
async function violationsOf({ page }: ConsolePage, rules?: readonly string[]): Promise<string[]> {
  // Through the debugger, since the policy refuses a script of another origin, and eval.
  const client = await page.context().newCDPSession(page);
  await client.send('Runtime.evaluate', { expression: axe });
  const options = { resultTypes: ['violations'], ...(rules && { runOnly: rules }) };
  const expression = `axe.run(document, ${JSON.stringify(options)}).then(({ violations }) => violations)`;
  const { result } = await client.send('Runtime.evaluate', {
    expression,
    awaitPromise: true,
    returnByValue: true,
  });
  // The cast names the part of axe-core's answer that is read.
  const violations = result.value as Violation[];
  return violations.flatMap(({ id, nodes }) => nodes.map(({ html }) => `${id}: ${html.slice(0, 160)}`));
}

/** A broker with something on every page, whose names look like markup. */
async function filledSystem(): Promise<{ system: TestSystem; paths: string[] }> {
  const system = await startWithConsole();
  const { client } = system;
  const machine_id = await startMachine(system, hostile, '<b>x</b>');
  const folder = temporaryFolder('files');
  const { id: command } = await client.commands.create({
    machine_id,
    command: `echo '${hostile}'; echo no >&2; exit 1`,
  });
  const { id: batch } = await client.batches.create({ machine_ids: [machine_id], command: 'true' });
  const schedule = await client.schedules.create({
    name: hostile,
    machine_id,
    command: 'true',
    cron: '@daily',
  });
  await client.schedules.run({ schedule_id: schedule.id });
  const webhook = await client.webhooks.create({
    url: 'https://example.org/x',
    events: ['*'],
    enabled: false,
  });
  await client.keys.create({ name: hostile, scopes: ['machines:read', 'files:write'], tags: ['<b>x</b>'] });
  const machine = `/machines/${machine_id}`;
  const of = (path: string, ...names: string[]): string[] => names.map((name) => `${path}${name}`);
  const paths = [
    ...of('/machines', '', '?q=none'),
    ...of(machine, '', '/terminals', `/files?path=${folder}`, '/files?path=/etc', '/commands', '/activity'),
    `${machine}/files?path=/etc&edit=/etc/hostname`,
    ...of('', '/run', '/commands', `/commands/${command}`, '/batches', `/batches/${batch}`),
    ...of('/schedules', '', '/new', `/${schedule.id}`, `/${schedule.id}/settings`),
    ...of('/webhooks', '', `/${webhook.id}`),
    ...of('', '/events', '/keys', '/join', '/audit', '/profile', '/nothing'),
  ];
  return { system, paths };
}

const filled = shared(filledSystem);

for (const width of [375, 1440] as const) {
  browserTest(`every page is accessible in both themes and within the policy, ${width} px`, async () => {
    const { system, paths } = await filled();
    const window = await newLogin(system, { width });
    const found: Record<string, string[]> = {};
    for (const path of paths) {
      await window.open(path);
      await window.page.getByRole('heading', { level: 1 }).waitFor();
      await expect.poll(() => window.page.locator('.placeholder').count()).toBe(0);
      const violations = await violationsOf(window);
      await window.page.emulateMedia({ colorScheme: 'dark' });
      violations.push(...(await violationsOf(window, themed)));
      await window.page.emulateMedia({ colorScheme: 'light' });
      const wide = await window.page.evaluate<boolean>('document.documentElement.scrollWidth > innerWidth');
      if (wide) violations.push('the page scrolls sideways');
      if (violations.length > 0) found[path] = violations;
    }
    expect(found).toEqual({});
    expect(window.faults).toEqual([]);
  });
}

browserTest('the pages of these tests are all that there are', async () => {
  const table = readFileSync(join(import.meta.dirname, '../../broker/console/pages.tsx'), 'utf8');
  const patterns = [...table.matchAll(/pattern: '([^']+)'/g)].map(([, pattern = '']) => pattern);
  expect(patterns.length).toBeGreaterThan(10);
  const { paths } = await filled();
  const opened = (pattern: string): boolean => {
    const form = new RegExp(
      `^${pattern.replace(/\/:\w+\?/g, '(/[^/?]+)?').replace(/:\w+/g, '[^/?]+')}(\\?|$)`,
    );
    return paths.some((path) => form.test(path));
  };
  expect(patterns.filter((pattern) => !opened(pattern))).toEqual([]);
});

browserTest('the login page is accessible in both themes', async () => {
  const system = await startWithConsole();
  for (const dark of [false, true]) {
    const window = await newWindow(system, { dark });
    await window.open('/machines');
    await window.page.getByLabel('API key').waitFor();
    expect(await violationsOf(window)).toEqual([]);
  }
});
