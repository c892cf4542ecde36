// Runs before the tests of the console: builds the console, and starts the Chromium that all test files share.
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

/**
 * A Chromium that cannot show windows. It needs a quarter less CPU time than one with a hidden window. Debian has it as
 * a separate package.
 */
const withoutWindow = '/usr/lib/chromium/chromium-headless-shell';
const executablePath = existsSync(withoutWindow) ? withoutWindow : '/usr/bin/chromium';

export default async function setup(project: TestProject): Promise<(() => Promise<void>) | undefined> {
  if (lacks('chromium')) return undefined;
  const folder = join(mkdtempSync(join(tmpdir(), 'console-')), 'built');
  execFileSync(process.execPath, [join(import.meta.dirname, '../../scripts/build-console.ts'), folder]);
  // Chromium's sandbox needs rights that containers lack. It is not needed, because all pages come from our own broker.
  const server = await chromium.launchServer({ executablePath, args: ['--no-sandbox'] });
  project.provide('consoleFolder', folder);
  project.provide('chromiumAddress', server.wsEndpoint());
  return () => server.close();
}
