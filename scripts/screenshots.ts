// Takes the pictures of the console in docs/, from a real broker with five agents on this machine.
//
//   node scripts/screenshots.ts     takes 11 minutes; needs Debian's package chromium
import { mkdtempSync, rmSync, statSync, writeFileSync } from 'node:fs';
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
/**
 * Milliseconds to wait before the pictures are taken. Each graph of the last hour then has two points, because the
 * broker stores one every 5 minutes.
 */
const graphsMs = 630_000;
/** Maximum number of bytes of a picture in the repository. */
const mostBytes = 150_000;
const size = { width: 1280, height: 640 };
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
  checkSize(path, mostBytes);
}

function checkSize(path: string, most: number): void {
  const { size: bytes } = statSync(path);
  console.log(`${path}: ${bytes} bytes`);
  if (bytes > most) throw new Error(`${path} has more than ${most} bytes`);
}

// ---- The recording

/** Types each line when the shell prints a prompt. */
async function typeInTerminal(page: Page, lines: readonly string[]): Promise<void> {
  const prompts = page.locator('.xterm-rows > div').filter({ hasText: /^\S+[#$]/ });
  for (const [index, line] of lines.entries()) {
    await prompts.nth(index).waitFor();
    await page.keyboard.type(line);
    await page.keyboard.press('Enter');
  }
  await prompts.nth(lines.length).waitFor();
}

async function openTerminal(page: Page): Promise<void> {
  await page.getByRole('link', { name: 'Terminals' }).click();
  await page.getByRole('button', { name: 'Open a terminal' }).click();
  await page.getByText('connected').waitFor();
  await typeInTerminal(page, typed);
}

/** The actions before each picture of the recording, such as a search or a command. */
const scenes: ((page: Page, system: System) => Promise<unknown>)[] = [
  (page) => page.getByRole('link', { name: 'web-2' }).waitFor(),
  async (page) => {
    await page.keyboard.press('Control+k');
    await page.keyboard.type('web-');
    await page.getByRole('option', { name: /web-1/ }).waitFor();
  },
  async (page) => {
    await page.keyboard.press('Enter');
    await page.locator('.chart canvas').nth(3).waitFor();
  },
  openTerminal,
  async (page, { client }) => {
    const command = 'uname -sr; nproc; uptime -p';
    const { id } = await client.batches.create({ tags: ['web'], command });
    await page.goto(page.url().replace(/\/machines.*/, `/batches/${id}`));
    await page.getByText('exit 0').nth(1).waitFor();
  },
  async (page) => {
    await page.goto(page.url().replace(/\/batches.*/, '/machines'));
    await page.getByRole('link', { name: 'db-1' }).click();
    await page.getByRole('link', { name: 'Inventory' }).last().click();
    await page.getByRole('heading', { name: 'Packages' }).waitFor();
  },
];
const sceneSeconds = 2.5;
const mostRecordingBytes = 400_000;
const recordingQuality = 60;

/**
 * Takes the pictures of a recording, and writes them as one animated SVG. If the viewer prefers reduced motion, only
 * the first picture is visible.
 */
async function record(page: Page, system: System): Promise<void> {
  const client = await page.context().newCDPSession(page);
  const pictures: string[] = [];
  for (const act of scenes) {
    await act(page, system);
    await page.mouse.move(0, 0);
    const picture = { format: 'webp', quality: recordingQuality } as const;
    pictures.push((await client.send('Page.captureScreenshot', picture)).data);
  }
  const path = join(docs, 'console.svg');
  writeFileSync(path, animated(pictures));
  checkSize(path, mostRecordingBytes);
}

function animated(pictures: readonly string[]): string {
  const { width, height } = size;
  const share = 100 / pictures.length;
  const seconds = pictures.length * sceneSeconds;
  const images = pictures.map((data, index) => {
    const delay = `animation-delay: ${index * sceneSeconds - seconds}s`;
    return `<image width="${width}" height="${height}" style="${delay}" href="data:image/webp;base64,${data}"/>`;
  });
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" role="img" aria-label="The console: the list of machines, the search, a machine, its terminal, a command on two machines, an inventory">
<style>
image { visibility: hidden } image:first-of-type { visibility: visible }
@media (prefers-reduced-motion: no-preference) {
@keyframes scene { 0% { visibility: visible } ${share.toFixed(3)}%, 100% { visibility: hidden } }
image { animation: scene ${seconds}s step-end infinite }
}
</style>
${images.join('\n')}
</svg>
`;
}

try {
  const system = await start();
  const browser = await chromium.launch({ executablePath: '/usr/bin/chromium', args: ['--no-sandbox'] });
  closing.push(() => browser.close());
  const list = await logIn(browser, system, true);
  await list.waitForTimeout(graphsMs);
  await list.reload();
  await list.getByRole('link', { name: 'web-2' }).waitFor();
  await take(list, 'console-machines.png');
  await record(list, system);
  const terminal = await logIn(browser, system, false);
  await terminal.getByRole('link', { name: 'web-2' }).click();
  await openTerminal(terminal);
  await take(terminal, 'console-terminal.png');
} finally {
  for (const close of closing.reverse()) await close();
}
