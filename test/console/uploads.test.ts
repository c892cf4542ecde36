// Uploads and downloads in the console: whole folders, progress, cancelling, and lost connections.
import { mkdirSync, readdirSync, readFileSync, statSync, truncateSync, writeFileSync } from 'node:fs';
import { connect, createServer } from 'node:net';
import { join } from 'node:path';
import { expect, onTestFinished } from 'vitest';
import { temporaryFolder } from '../start-farhand.ts';
import { browserTest, type ConsolePage, newFolderPage, newLogin, oneMachine, type Page } from './browser.ts';

/** Drops files and folders from the disk onto the page, as from a file manager. */
async function drop({ page, context }: ConsolePage, ...paths: string[]): Promise<void> {
  const client = await context.newCDPSession(page);
  const { x, y } = (await page.locator('.drop-zone').boundingBox()) ?? { x: 0, y: 0 };
  const data = { items: [], files: paths, dragOperationsMask: 1 };
  for (const type of ['dragEnter', 'dragOver', 'drop'] as const)
    await client.send('Input.dispatchDragEvent', { type, x: x + 50, y: y + 50, data });
}

/** Returns the content of all files in a folder, by relative path. */
function contentOf(folder: string): Map<string, string> {
  const files = readdirSync(folder, { recursive: true, withFileTypes: true }).filter((one) => one.isFile());
  return new Map(
    files
      .map(({ parentPath, name }) => join(parentPath, name))
      .sort()
      .map((path) => [path.slice(folder.length), readFileSync(path, 'latin1')]),
  );
}

/** Returns the bytes sent so far, as the list of transfers displays them. */
const sent = (page: Page): Promise<number> =>
  page.getByRole('progressbar', { name: 'Bytes sent' }).evaluate((bar: { value?: number }) => bar.value ?? 0);

browserTest('a thousand files in folders arrive byte for byte', async () => {
  const [source, folder] = [join(temporaryFolder('source'), 'tree'), temporaryFolder('files')];
  for (let n = 0; n < 1_000; n += 1) {
    const inner = join(source, `a${n % 20}`, `b${n % 3}`, 'ä "c"');
    mkdirSync(inner, { recursive: true });
    // Some files are empty, and all files together contain every value of a byte.
    writeFileSync(join(inner, `${n}.bin`), Buffer.alloc(n % 2_000, n));
  }
  const window = await newFolderPage(folder);
  await drop(window, source);
  await window.page.getByText('1000 uploaded').waitFor({ timeout: 80_000 });
  expect(contentOf(join(folder, 'tree'))).toEqual(contentOf(source));
  await window.page.getByRole('button', { name: 'tree', exact: true }).waitFor();
  expect(window.faults).toEqual([]);
});

browserTest(
  'a dropped folder is uploaded to the folder onto which it was dropped, although another folder is open by then',
  async () => {
    const [source, folder] = [join(temporaryFolder('source'), 'tree'), temporaryFolder('files')];
    mkdirSync(source);
    mkdirSync(join(folder, 'other'));
    writeFileSync(join(source, 'a'), 'x');
    writeFileSync(join(folder, 'other/there'), '');
    const window = await newFolderPage(folder);
    const { page, faults } = window;
    await page.evaluate(`(() => {
    const { prototype } = DataTransferItem;
    const { webkitGetAsEntry } = prototype;
    const opened = new Promise((resolve) => { globalThis.goOn = resolve; });
    prototype.webkitGetAsEntry = function () {
      const entry = webkitGetAsEntry.call(this);
      const reader = entry.createReader();
      const readEntries = (...given) => opened.then(() => reader.readEntries(...given));
      entry.createReader = () => ({ readEntries });
      return entry;
    };
  })()`);
    await drop(window, source);
    await page.getByRole('button', { name: 'other', exact: true }).click();
    await page.getByRole('button', { name: 'there', exact: true }).waitFor();
    await page.evaluate('goOn()');
    await page.getByText('1 uploaded').waitFor();
    expect([...contentOf(folder).keys()].sort()).toEqual(['/other/there', '/tree/a']);
    expect(faults).toEqual([]);
  },
);

browserTest('progress is exact to 2 %, and cancelling leaves nothing on the machine', async () => {
  const [source, folder] = [join(temporaryFolder('source'), 'large'), temporaryFolder('files')];
  const bytes = 2 * 1024 ** 3;
  writeFileSync(source, '');
  truncateSync(source, bytes);
  const window = await newFolderPage(folder);
  const { page } = window;
  await drop(window, source);
  const arrived = (): number =>
    readdirSync(folder).reduce(
      (sum, name) => sum + (statSync(join(folder, name), { throwIfNoEntry: false })?.size ?? 0),
      0,
    );
  await expect.poll(() => sent(page), { interval: 10 }).toBeGreaterThan(bytes / 20);
  for (let sample = 0; sample < 5; sample += 1)
    expect(Math.abs((await sent(page)) - arrived()) / bytes).toBeLessThan(0.02);
  await page.getByRole('button', { name: 'Cancel' }).click();
  await page.getByText('Uploads cancelled').waitFor();
  await expect.poll(() => readdirSync(folder)).toEqual([]);
  expect(window.faults).toEqual([]);
});

browserTest('a folder that exists is replaced only after a question', async () => {
  const [source, folder] = [join(temporaryFolder('source'), 'tree'), temporaryFolder('files')];
  for (const [at, content] of [
    [source, 'new'],
    [join(folder, 'tree'), 'old'],
  ] as const) {
    mkdirSync(at);
    writeFileSync(join(at, 'a'), content);
  }
  const window = await newFolderPage(folder);
  await window.page.getByRole('button', { name: 'tree', exact: true }).waitFor();
  await drop(window, source);
  const question = window.page.getByRole('dialog', { name: 'Replace tree?' });
  await question.getByRole('button', { name: 'Cancel' }).click();
  await drop(window, source);
  expect(readFileSync(join(folder, 'tree/a'), 'utf8')).toBe('old');
  await question.getByRole('button', { name: 'Replace' }).click();
  await window.page.getByText('1 uploaded').waitFor();
  expect(readFileSync(join(folder, 'tree/a'), 'utf8')).toBe('new');
  expect(window.faults).toEqual([]);
});

browserTest('a file that appeared since the listing is not replaced without a question', async () => {
  const [source, folder] = [join(temporaryFolder('source'), 'a'), temporaryFolder('files')];
  writeFileSync(source, 'new');
  const window = await newFolderPage(folder);
  writeFileSync(join(folder, 'a'), 'old');
  await drop(window, source);
  const tray = window.page.getByRole('region', { name: 'Uploads' });
  await tray.getByText('1 of 1 uploads failed').waitFor();
  expect(readFileSync(join(folder, 'a'), 'utf8')).toBe('old');
  await tray.getByRole('button', { name: 'Replace' }).click();
  await tray.getByText('1 uploaded').waitFor();
  expect(readFileSync(join(folder, 'a'), 'utf8')).toBe('new');
  expect(window.faults).toEqual([]);
});

/**
 * A proxy that cuts the connection of the first download after 4 MiB. `ranges` has the Range headers of later requests.
 */
async function startBreakingProxy(
  host: string,
  port: number,
): Promise<{ address: string; ranges: string[] }> {
  const ranges: string[] = [];
  let broken = false;
  const server = createServer((client) => {
    const broker = connect(port, host);
    let [isDownload, bytes] = [false, 0];
    client.on('data', (chunk) => {
      const request = chunk.toString('latin1');
      isDownload ||= request.includes('/files/download');
      ranges.push(...(/^range: .*/im.exec(request) ?? []));
      broker.write(chunk);
    });
    broker.on('data', (chunk) => {
      bytes += chunk.length;
      if (isDownload && !broken && bytes > 4 * 1024 ** 2) {
        broken = true;
        broker.destroy();
      } else client.write(chunk);
    });
    for (const [one, other] of [
      [client, broker],
      [broker, client],
    ] as const)
      one.on('error', () => one.destroy()).on('close', () => other.destroy());
    onTestFinished(() => void client.destroy());
  });
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  onTestFinished(() => void server.close());
  const address = server.address();
  return { address: typeof address === 'object' ? `http://127.0.0.1:${address?.port}` : '', ranges };
}

/** Stores downloads as a user's browser does. Playwright would report an interrupted download as cancelled. */
async function storeDownloads(page: Page, folder: string): Promise<void> {
  const { targetInfo } = await (await page.context().newCDPSession(page)).send('Target.getTargetInfo');
  const browser = await page.context().browser()?.newBrowserCDPSession();
  const of =
    targetInfo.browserContextId === undefined ? {} : { browserContextId: targetInfo.browserContextId };
  await browser?.send('Browser.setDownloadBehavior', { behavior: 'allow', downloadPath: folder, ...of });
}

browserTest('a download whose connection broke goes on at the same byte', async () => {
  const [folder, downloads] = [temporaryFolder('files'), temporaryFolder('downloads')];
  const content = Buffer.from(Array.from({ length: 1_500_000 }, (_, n) => `${n}\n`).join(''));
  writeFileSync(join(folder, 'large.log'), content);
  const { system, machine } = await oneMachine();
  const { hostname, port } = new URL(system.url);
  const { address, ranges } = await startBreakingProxy(hostname, Number(port));
  const { page, open } = await newLogin({ ...system, url: address });
  await open(`/machines/${machine}/files?path=${encodeURIComponent(folder)}`);
  await storeDownloads(page, downloads);
  await page.getByRole('link', { name: 'Download large.log' }).click();
  await expect.poll(() => readdirSync(downloads)).toEqual(['large.log']);
  expect(readFileSync(join(downloads, 'large.log')).equals(content)).toBe(true);
  expect(ranges).toHaveLength(1);
});
