#!/usr/bin/env node
// Entry point of the farhand command line, which uses only the public API of brokers.
import { statSync } from 'node:fs';
import { enableCompileCache } from 'node:module';
import { homedir } from 'node:os';
import { join } from 'node:path';

/** Makes Node cache compiled code. The cache directory is used only if no other user can write to it. */
function enableCache(): void {
  try {
    const cache = process.env.XDG_CACHE_HOME || join(homedir(), '.cache');
    const { uid, mode } = statSync(cache);
    if (uid === process.getuid?.() && (mode & 0o022) === 0) enableCompileCache(join(cache, 'farhand'));
  } catch {
    // A failure is ignored: without the compile cache, the program only starts more slowly.
  }
}

enableCache();
// These modules are imported after enableCache(), so that they are cached too.
const { run } = await import('./run-command-line.ts');
await run(process.argv);
