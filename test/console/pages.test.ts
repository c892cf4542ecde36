// Every page in both themes and both widths: nothing that axe-core finds, nothing that the policy refuses.
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { expect } from 'vitest';
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

interface Violation {
  id: string;
  nodes: { html: string }[];
}

/** What axe-core finds on the page as it is now. */
async function violationsOf({ page }: ConsolePage): Promise<string[]> {
  // Through the debugger, since the policy refuses a script of another origin, and eval.
  const client = await page.context().newCDPSession(page);
  await client.send('Runtime.evaluate', { expression: axe });
  const expression = `axe.run(document, { resultTypes: ['violations'] }).then(({ violations }) => violations)`;
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

for (const dark of [false, true]) {
  for (const width of [375, 1440] as const) {
    const name = `every page is accessible and within the policy, ${dark ? 'dark' : 'light'}, ${width} px`;
    browserTest(
      name,
      async () => {
        const { system, paths } = await filledSystem();
        const window = await newLogin(system, { dark, width });
        const found: Record<string, string[]> = {};
        for (const path of paths) {
          await window.open(path);
          await window.page.getByRole('heading', { level: 1 }).waitFor();
          await expect.poll(() => window.page.locator('.placeholder').count()).toBe(0);
          const violations = await violationsOf(window);
          const wide = await window.page.evaluate<boolean>(
            'document.documentElement.scrollWidth > innerWidth',
          );
          if (wide) violations.push('the page scrolls sideways');
          if (violations.length > 0) found[path] = violations;
        }
        expect(found).toEqual({});
        expect(window.faults).toEqual([]);
      },
      300_000,
    );
  }
}

browserTest('the login page is accessible in both themes', async () => {
  const system = await startWithConsole();
  for (const dark of [false, true]) {
    const window = await newWindow(system, { dark });
    await window.open('/machines');
    await window.page.getByLabel('API key').waitFor();
    expect(await violationsOf(window)).toEqual([]);
  }
});
