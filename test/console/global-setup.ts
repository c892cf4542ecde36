// Runs before the tests of the console: builds it, and starts the one Chromium that all test files share.
import { execFileSync } from 'node:child_process';
import { existsSync, mkdtempSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { chromium } from 'playwright-core';
import type { TestProject } from 'vitest/node';
import { lacks } from '../skip-without-programs.ts';

declare module 'vitest' {
  interface ProvidedContext {
    /** Folder of the built console. */
    consoleFolder: string;
    /** Address of the Chromium to connect to. */
    chromiumAddress: string;
  }
}

/** Chromium without a window needs a quarter less CPU time than with a hidden one. It is a package of its own. */
const withoutWindow = '/usr/lib/chromium/chromium-headless-shell';
const executablePath = existsSync(withoutWindow) ? withoutWindow : '/usr/bin/chromium';

export default async function setup(project: TestProject): Promise<(() => Promise<void>) | undefined> {
  if (lacks('chromium')) return undefined;
  const folder = join(mkdtempSync(join(tmpdir(), 'console-')), 'built');
  execFileSync(process.execPath, [join(import.meta.dirname, '../../scripts/build-console.ts'), folder]);
  // Chromium's sandbox needs rights that containers lack. It is not needed here, because all pages are those
  // of our own broker.
  const server = await chromium.launchServer({ executablePath, args: ['--no-sandbox'] });
  project.provide('consoleFolder', folder);
  project.provide('chromiumAddress', server.wsEndpoint());
  return () => server.close();
}
