// Every page and dialog of the console, in both themes and at both widths: axe-core finds no problem, the content
// security policy blocks nothing, and the browser stores no secret.
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { join } from 'node:path';
import { expect } from 'vitest';
import { shared } from '../close-after-tests.ts';
import { browserTest, type ConsolePage, newLogin, newWindow, startWithConsole, traces } from './browser.ts';
import { filledSystem } from './filled-broker.ts';

const axe = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');

/** Milliseconds until the focus must be back on the button that opened a dialog. */
const focusMs = 5_000;

/** Rules of axe-core whose result depends on the theme. All others need only one theme. */
const themed = ['color-contrast', 'link-in-text-block'];

interface Violation {
  id: string;
  nodes: { html: string }[];
}

/** Returns the problems that axe-core finds on the page as it is now. */
async function violationsOf({ page }: ConsolePage, rules?: readonly string[]): Promise<string[]> {
  // Runs the script through the debugger, because the policy blocks eval and scripts of other origins.
  const client = await page.context().newCDPSession(page);
  const { result: loaded } = await client.send('Runtime.evaluate', { expression: 'typeof axe' });
  if (loaded.value === 'undefined') await client.send('Runtime.evaluate', { expression: axe });
  const options = { resultTypes: ['violations'], ...(rules && { runOnly: rules }) };
  const expression = `axe.run(document, ${JSON.stringify(options)}).then(({ violations }) => violations)`;
  const { result } = await client.send('Runtime.evaluate', {
    expression,
    awaitPromise: true,
    returnByValue: true,
  });
  // The cast names the part of axe-core's result that the test uses.
  const violations = result.value as Violation[];
  return violations.flatMap(({ id, nodes }) => nodes.map(({ html }) => `${id}: ${html.slice(0, 160)}`));
}

/** Returns the problems that axe-core finds in both themes. */
async function violationsInBothThemes(window: ConsolePage): Promise<string[]> {
  const violations = await violationsOf(window);
  await window.page.emulateMedia({ colorScheme: 'dark' });
  violations.push(...(await violationsOf(window, themed)));
  await window.page.emulateMedia({ colorScheme: 'light' });
  const wide = await window.page.evaluate<boolean>('document.documentElement.scrollWidth > innerWidth');
  return wide ? [...violations, 'the page scrolls sideways'] : violations;
}

const filled = shared(filledSystem);

for (const width of [375, 1440] as const) {
  browserTest(`every page is accessible in both themes and within the policy, ${width} px`, async () => {
    const { system, paths } = await filled();
    const window = await newLogin(system, { width });
    const [cookie] = await window.context.cookies();
    const secrets = [system.key, cookie?.value ?? 'no cookie'];
    const found: Record<string, string[]> = {};
    for (const path of paths) {
      await window.load(path);
      const violations = await violationsInBothThemes(window);
      const stored = await traces(window);
      if (secrets.some((secret) => stored.includes(secret))) violations.push('a secret is stored');
      if (violations.length > 0) found[path] = violations;
    }
    expect(found).toEqual({});
    expect(window.faults).toEqual([]);
  });

  browserTest(`every dialog is accessible and used by keyboard alone, ${width} px`, async () => {
    const { system, dialogs } = await filled();
    const window = await newLogin(system, { width });
    const { page } = window;
    const dialog = page.getByRole('dialog');
    // After the last field, Tab leads to the browser's own buttons, and then `document.activeElement` is the body.
    const isOutside = (): Promise<boolean> =>
      page.evaluate<boolean>(`document.activeElement.closest('.shell') !== null &&
        document.activeElement.closest('dialog') === null`);
    const found: Record<string, string[]> = {};
    for (const [path, names] of dialogs) {
      await window.load(path);
      for (const name of names) {
        const opener = page.getByRole('main').getByRole('button', { name, exact: true }).first();
        await opener.focus();
        await page.keyboard.press('Enter');
        await dialog.waitFor();
        const violations = await violationsInBothThemes(window);
        for (let tabs = 0; tabs < 3; tabs += 1) {
          if (await isOutside()) violations.push('the focus is outside');
          await page.keyboard.press('Tab');
        }
        await page.keyboard.press('Escape');
        await dialog.waitFor({ state: 'detached' });
        await opener
          .and(page.locator(':focus'))
          .waitFor({ timeout: focusMs })
          .catch(() => violations.push('the focus does not return to the button'));
        if (violations.length > 0) found[`${path} ${name}`] = violations;
      }
    }
    expect(found).toEqual({});
    expect(window.faults).toEqual([]);
  });
}

browserTest('these tests open every page of the console', async () => {
  const table = readFileSync(join(import.meta.dirname, '../../broker/console/pages.tsx'), 'utf8');
  const patterns = [...table.matchAll(/entry\('([^']+)'/g)].map(([, pattern = '']) => pattern);
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

browserTest('Skip to content leads the keyboard to the page, and leaves the history as it is', async () => {
  const { page, faults } = await newLogin(await startWithConsole());
  const address = page.url();
  const entries = await page.evaluate<number>('history.length');
  const skip = page.getByRole('link', { name: 'Skip to content' });
  for (let times = 0; times < 2; times += 1) {
    await skip.focus();
    await page.keyboard.press('Enter');
    expect(await page.evaluate('document.activeElement.id')).toBe('content');
  }
  await page.keyboard.press('Tab');
  expect(await page.locator('main :focus').count()).toBe(1);
  expect(await page.evaluate<number>('history.length')).toBe(entries);
  expect(page.url()).toBe(address);
  expect(faults).toEqual([]);
});
