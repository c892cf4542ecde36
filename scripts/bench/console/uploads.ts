// Measures uploads of a thousand files in folders, and of one file of 2 GiB: whether the displayed progress is right,
// the memory of the tab, and cancelling.
import { type Dirent, mkdirSync, readdirSync, rmSync, statSync, truncateSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import type { ConsoleBench } from './broker-tab-and-limits.ts';

const smallFiles = 1_000;
const smallBytes = 10_000;
const perFolder = 25;
const largeBytes = 2 * 1024 ** 3;
const sampleMs = 100;
const longestMs = 60_000;

const entries = (folder: string): Dirent[] =>
  readdirSync(folder, { recursive: true, withFileTypes: true }).filter((one) => one.isFile());

/** Returns the number of bytes of all files below a folder, including files that are still being written. */
function bytesBelow(folder: string): number {
  let sum = 0;
  for (const { parentPath, name } of entries(folder)) {
    // The file may be gone, because a temporary file gets its final name when it is complete.
    sum += statSync(join(parentPath, name), { throwIfNoEntry: false })?.size ?? 0;
  }
  return sum;
}

function createTree(folder: string): string {
  const tree = join(folder, 'tree');
  for (let n = 0; n < smallFiles; n += 1) {
    const below = join(tree, `folder-${Math.floor(n / perFolder)}`, 'inner');
    mkdirSync(below, { recursive: true });
    writeFileSync(join(below, `file-${n}`), Buffer.alloc(smallBytes, n));
  }
  return tree;
}

interface Progress {
  value: number;
  title: string;
}

const progress = `({
  value: document.querySelector('.upload-tray progress')?.value ?? 0,
  title: document.querySelector('.upload-tray strong')?.textContent ?? '',
})`;

/**
 * Compares the progress in the upload tray with the bytes on the disk, until the upload is over. Returns the largest
 * difference, as a share of all bytes.
 */
async function followProgress(
  { tab, real }: ConsoleBench,
  bytes: number,
): Promise<{ off: number; title: string }> {
  let off = 0;
  const end = performance.now() + longestMs;
  while (performance.now() < end) {
    const { value, title } = await tab.page.evaluate<Progress>(progress);
    if (title !== '' && !title.startsWith('Uploading')) return { off, title };
    if (title !== '') off = Math.max(off, Math.abs(value - bytesBelow(real.folder)) / bytes);
    await sleep(sampleMs);
  }
  throw new Error(`the upload is not over after ${longestMs / 1000} s`);
}

async function upload(consoleBench: ConsoleBench, what: string, path: string, bytes: number): Promise<void> {
  const { tab, figures, real } = consoleBench;
  await tab.goto(`/machines/${real.id}/files?path=${encodeURIComponent(real.folder)}`);
  await tab.page.locator('.drop-zone').waitFor();
  const begun = performance.now();
  let result = { off: 0, title: '' };
  const peak = await tab.peakMemory(async () => {
    await tab.drop([path]);
    result = await followProgress(consoleBench, bytes);
  });
  const seconds = (performance.now() - begun) / 1_000;
  figures.line(
    `${what}: "${result.title}" after ${seconds.toFixed(1)} s, ${entries(real.folder).length} files`,
  );
  if (bytesBelow(real.folder) !== bytes) throw new Error(`${what}: not all bytes have arrived`);
  figures.most(
    `${what}: largest difference between the displayed progress and the bytes on disk`,
    result.off * 100,
    2,
    '%',
  );
  figures.most(`${what}: memory of the tab`, peak, 100, 'MiB');
  figures.most(`${what}: longest task`, await tab.longestTask(0), 100, 'ms');
  empty(real.folder);
}

function empty(folder: string): void {
  for (const name of readdirSync(folder)) rmSync(join(folder, name), { recursive: true });
}

export async function uploadFiles(consoleBench: ConsoleBench): Promise<void> {
  const { tab, figures, real, folder } = consoleBench;
  const tree = createTree(folder);
  await upload(consoleBench, 'upload of 1,000 files in folders', tree, smallFiles * smallBytes);
  const large = join(folder, 'large');
  writeFileSync(large, '');
  truncateSync(large, largeBytes);
  await upload(consoleBench, 'upload of 2 GiB', large, largeBytes);
  await tab.goto(`/machines/${real.id}/files?path=${encodeURIComponent(real.folder)}`);
  await tab.page.locator('.drop-zone').waitFor();
  await tab.drop([large]);
  await tab.when(`${progress}.value > ${largeBytes / 10}`);
  await tab.page.getByRole('button', { name: 'Cancel' }).click();
  await tab.page.getByText('Uploads cancelled').waitFor();
  const cancelled = performance.now();
  while (entries(real.folder).length > 0 && performance.now() - cancelled < 5_000) await sleep(20);
  figures.line(
    `waited ${(performance.now() - cancelled).toFixed(0)} ms after the cancel for the folder to be empty`,
  );
  figures.most(
    'cancelled upload of 2 GiB: files left on the machine',
    entries(real.folder).length,
    0,
    'files',
  );
}
