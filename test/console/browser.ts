// Opens pages of the console in Chromium, with a real broker and a logged-in user, and collects all errors of the page.
import { type Browser, type BrowserContext, chromium, type Page } from 'playwright-core';
import { inject, onTestFinished } from 'vitest';
import type { Tuning } from '../../broker/start/index.ts';
import { atEnd, shared } from '../close-after-tests.ts';
import { needs } from '../skip-without-programs.ts';
import { startFarhand, type TestSystem } from '../start-farhand.ts';

export type { Page } from 'playwright-core';

/** Time limit of a test in milliseconds. It is long, because a browser is slow on a busy machine. */
const longest = 300_000;
const needsChromium = needs('chromium');

/** A test that needs a browser. It is skipped without Debian's Chromium, and its name says that. */
export const browserTest = (name: string, work: () => Promise<void>, ms = longest): void =>
  needsChromium(name, work, ms);

/** The Chromium that all test files share. */
const connect = shared(async (): Promise<Browser> => {
  const browser = await chromium.connect(inject('chromiumAddress'));
  // Closes the connection and its windows. The browser itself runs until all test files have ended.
  atEnd(() => browser.close());
  return browser;
});

/** Starts a broker that serves the built console. */
export const startWithConsole = (flags: string[] = [], tuning: Tuning = {}): Promise<TestSystem> =>
  startFarhand({ flags, tuning: { ...tuning, console: inject('consoleFolder') } });

/** Starts a broker with the data and addresses of a broker that has ended. */
export const restart = ({ dataDir, url, grpc }: TestSystem): Promise<TestSystem> =>
  startFarhand({
    dataDir,
    flags: ['--http', new URL(url).host, '--grpc', grpc],
    tuning: { console: inject('consoleFolder') },
  });

export interface Look {
  dark?: boolean;
  width?: 375 | 1440;
}

export interface ConsolePage {
  page: Page;
  context: BrowserContext;
  /** Errors of the page, violations of its content security policy, and requests to other origins. */
  faults: string[];
  /** Opens the page at this path below /console. */
  open(path: string): Promise<void>;
  /** Opens the page at this path. Resolves when it has loaded its data. */
  load(path: string): Promise<void>;
  /** Opens another window of the same browser context, with the same logins and cache. */
  another(): Promise<ConsolePage>;
}

/**
 * Messages that a browser prints for expected errors: no login, a forbidden request, a missing object, a wrong field in
 * a form, a file that another user has saved meanwhile, and a stream that ends with the login.
 */
const expectedError = /status of (401|403|404|409|412|422)|ERR_INCOMPLETE_CHUNKED_ENCODING/;

/** Opens a window in a new browser context, without a login. */
export async function newWindow(
  system: TestSystem,
  { dark = false, width = 1440 }: Look = {},
): Promise<ConsolePage> {
  const context = await (await connect()).newContext({
    viewport: { width, height: width === 375 ? 740 : 900 },
    colorScheme: dark ? 'dark' : 'light',
    reducedMotion: 'reduce',
    permissions: ['clipboard-read', 'clipboard-write'],
  });
  onTestFinished(() => context.close());
  return newPageOf(context, system);
}

async function newPageOf(context: BrowserContext, system: TestSystem): Promise<ConsolePage> {
  const page = await context.newPage();
  const faults: string[] = [];
  page.on('console', (message) => {
    const isFault = ['error', 'warning'].includes(message.type()) && !expectedError.test(message.text());
    if (isFault) faults.push(`console: ${message.text()} (${message.location().url})`);
  });
  page.on('dialog', (dialog) => {
    faults.push(`dialog: ${dialog.message()}`);
    void dialog.dismiss();
  });
  page.on('pageerror', (error) => faults.push(`error: ${error.message}`));
  page.on('request', (request) => {
    const url = new URL(request.url());
    if (!['data:', 'blob:'].includes(url.protocol) && url.host !== new URL(system.url).host)
      faults.push(`request to ${url.origin}`);
  });
  await page.addInitScript({
    content: `document.addEventListener('securitypolicyviolation', ({ violatedDirective, blockedURI, sourceFile }) => {
      console.error('policy: ' + violatedDirective + ' refused ' + blockedURI + ' of ' + sourceFile);
    });`,
  });
  const open = async (path: string): Promise<void> => {
    await page.goto(`${system.url}/console${path}`);
  };
  const load = async (path: string): Promise<void> => {
    await open(path);
    await page.getByRole('heading', { level: 1 }).waitFor();
    await page.locator('.placeholder').first().waitFor({ state: 'detached' });
  };
  const another = (): Promise<ConsolePage> => newPageOf(context, system);
  return { page, context, faults, open, load, another };
}

/** Types a key into the login page. */
export async function logIn({ page, open }: ConsolePage, key: string): Promise<void> {
  await open('/machines');
  await page.getByLabel('API key').fill(key);
  await page.getByRole('button', { name: 'Log in' }).click();
  await page.getByRole('heading', { name: 'Machines', level: 1 }).waitFor();
}

/** Logs in over the API. Resolves with the secret in the cookie. */
export async function newCookie(system: TestSystem, key = system.key): Promise<string> {
  const { headers } = await system.call('POST', '/logins', { key, body: { name: 'Chromium' } });
  const [, secret = ''] = /^__Host-farhand=([^;]+)/.exec(headers.get('set-cookie') ?? '') ?? [];
  return secret;
}

/** Opens a browser window that has the cookie of a login, without opening a page. */
export async function newWindowWith(
  cookie: string,
  system: TestSystem,
  look: Look = {},
): Promise<ConsolePage> {
  const made = await newWindow(system, look);
  // Playwright sets a secure cookie only for an https URL. Chromium then also sends it over http to this machine.
  const url = system.url.replace('http:', 'https:');
  const attributes = { httpOnly: true, secure: true, sameSite: 'Strict' as const };
  await made.context.addCookies([{ name: '__Host-farhand', value: cookie, url, ...attributes }]);
  return made;
}

/** Opens a logged-in browser window, by default with the broker's first key. */
export async function newLogin(
  system: TestSystem,
  { key, ...look }: Look & { key?: string } = {},
): Promise<ConsolePage> {
  const made = await newWindowWith(await newCookie(system, key), system, look);
  await made.open('/machines');
  await made.page.getByRole('heading', { name: 'Machines', level: 1 }).waitFor();
  return made;
}

/** Starts an agent. Resolves with the id of its machine. */
export async function startMachine(system: TestSystem, name: string, tags?: string): Promise<string> {
  await system.agent({ name, ...(tags !== undefined && { tags }) });
  const { items } = await system.client.machines.list({ name });
  return items[0]?.id ?? '';
}

/** A script that makes a page believe that its tab is in the foreground or in the background. */
export const setVisibility = (state: 'visible' | 'hidden'): string =>
  `Object.defineProperty(document, 'visibilityState', { value: '${state}', configurable: true });
  document.dispatchEvent(new Event('visibilitychange'))`;

/** A broker with one machine, `web-1`, for all tests of a file. */
export const oneMachine = shared(async () => {
  const system = await startWithConsole();
  return { system, machine: await startMachine(system, 'web-1') };
});

/** Opens a folder of `web-1` in the file browser. Resolves when files can be dropped there. */
export async function newFolderPage(folder: string): Promise<ConsolePage> {
  const { system, machine } = await oneMachine();
  const window = await newLogin(system);
  await window.open(`/machines/${machine}/files?path=${encodeURIComponent(folder)}`);
  await window.page.locator('.drop-zone').waitFor();
  return window;
}

/** Returns everything that the browser has stored for a page: storages, address, history, and the page itself. */
export async function traces({ page }: ConsolePage): Promise<string> {
  const client = await page.context().newCDPSession(page);
  const { entries } = await client.send('Page.getNavigationHistory');
  const inPage = await page.evaluate<unknown>(`(async () => [
    { ...localStorage }, { ...sessionStorage }, document.cookie, location.href, history.state,
    await indexedDB.databases(), await caches.keys(), document.documentElement.outerHTML,
  ])()`);
  return JSON.stringify([entries, inPage]);
}
