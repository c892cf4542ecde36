// Makes docs/console-machines.png and docs/console-terminal.png, pictures of the console of a real broker with five
// agents, all on this machine. Takes 11 minutes and needs Debian's chromium. Usage: node scripts/screenshots.ts
import { mkdtempSync, rmSync, statSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { type Browser, chromium, type Page } from 'playwright-core';
import { agentSettings } from '../agent/settings-schema.ts';
import { startAgent } from '../agent/start.ts';
import { withBroker } from '../broker/cli/connect-to-broker.ts';
import { brokerSettings } from '../broker/settings-schema.ts';
import { startBroker } from '../broker/start/index.ts';
import { createLogger } from '../shared/logger.ts';
import { readSettings } from '../shared/read-settings.ts';
import { Farhand } from '../shared/sdk/index.ts';
import { buildConsole } from './build-console.ts';

const docs = join(import.meta.dirname, '../docs');
const machines = [
  ['web-1', 'web,eu'],
  ['web-2', 'web,us'],
  ['db-1', 'db,eu'],
  ['build-1', 'ci'],
  ['edge-1', 'edge,us'],
] as const;
/** Milliseconds until the graphs of the last hour have two points: the broker stores one every 5 minutes. */
const reportsMs = 630_000;
/** Most bytes of a picture in the repository. */
const mostBytes = 150_000;
const size = { width: 1280, height: 640 };
/** The commands that are typed into the terminal. */
const typed = ['nproc', 'ls --color=always /usr', 'df -h / | cut -c1-60'];

const folder = mkdtempSync(join(tmpdir(), 'farhand-screenshots-'));
const closing: (() => unknown)[] = [() => rmSync(folder, { recursive: true, force: true })];

interface System {
  url: string;
  key: string;
  client: Farhand;
}

async function start(): Promise<System> {
  await buildConsole(join(folder, 'console'), { fast: true });
  const log = createLogger('screenshots', 'error');
  const dataDir = join(folder, 'broker');
  const addresses = ['--http', '127.0.0.1:0', '--grpc', '127.0.0.1:0'];
  const settings = readSettings(brokerSettings, { argv: ['--data-dir', dataDir, ...addresses], env: {} });
  const broker = await startBroker(settings, log, { console: join(folder, 'console') });
  closing.push(() => broker.close());
  const { url = '', grpc = '' } = broker;
  const { key } = await withBroker({ dataDir, url: undefined, apiKey: undefined }, (local) =>
    local.keys.create({ name: 'alice', scopes: ['admin'] }),
  );
  const client = new Farhand({ baseUrl: url, apiKey: key });
  const { token } = await client.joinTokens.create({ uses: machines.length });
  for (const [name, tags] of machines) {
    const argv = ['--broker', grpc, '--join-token', token, '--name', name, '--tags', tags];
    const own = readSettings(agentSettings, { argv: [...argv, '--data-dir', join(folder, name)], env: {} });
    const agent = await startAgent(own, log, () => {});
    closing.push(() => agent.close());
  }
  return { url, key, client };
}

async function logIn(browser: Browser, { url, key }: System, dark: boolean): Promise<Page> {
  const context = await browser.newContext({ viewport: size, colorScheme: dark ? 'dark' : 'light' });
  const page = await context.newPage();
  await page.goto(`${url}/console/machines`);
  await page.getByLabel('API key').fill(key);
  await page.keyboard.press('Enter');
  await page.getByRole('link', { name: 'web-2' }).waitFor();
  return page;
}

async function take(page: Page, name: string): Promise<void> {
  const path = join(docs, name);
  // The pointer is moved away, so that no element is highlighted.
  await page.mouse.move(0, 0);
  await page.screenshot({ path, animations: 'disabled' });
  const { size: bytes } = statSync(path);
  console.log(`${path}: ${bytes} bytes`);
  if (bytes > mostBytes) throw new Error(`${name} has more than ${mostBytes} bytes`);
}

try {
  const system = await start();
  const browser = await chromium.launch({ executablePath: '/usr/bin/chromium', args: ['--no-sandbox'] });
  closing.push(() => browser.close());
  const list = await logIn(browser, system, true);
  await list.waitForTimeout(reportsMs);
  await list.reload();
  await list.getByRole('link', { name: 'web-2' }).waitFor();
  await take(list, 'console-machines.png');
  const terminal = await logIn(browser, system, false);
  await terminal.getByRole('link', { name: 'web-1' }).click();
  await terminal.getByRole('link', { name: 'Terminals' }).click();
  await terminal.getByRole('button', { name: 'Open a terminal' }).click();
  await terminal.getByText('connected').waitFor();
  const prompts = terminal.locator('.xterm-rows > div').filter({ hasText: /^\S+[#$]/ });
  for (const [index, line] of typed.entries()) {
    await prompts.nth(index).waitFor();
    await terminal.keyboard.type(line);
    await terminal.keyboard.press('Enter');
  }
  await prompts.nth(typed.length).waitFor();
  await take(terminal, 'console-terminal.png');
} finally {
  for (const close of closing.reverse()) await close();
}
