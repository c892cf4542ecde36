#!/usr/bin/env node
// farhand: the command line, a client of the public API alone.
import { statSync } from 'node:fs';
import { enableCompileCache } from 'node:module';
import { homedir } from 'node:os';
import { join } from 'node:path';

/** Caches compiled code, only in a directory that no other user can write to. */
function enableCache(): void {
  try {
    const cache = process.env.XDG_CACHE_HOME || join(homedir(), '.cache');
    const { uid, mode } = statSync(cache);
    if (uid === process.getuid?.() && (mode & 0o022) === 0) enableCompileCache(join(cache, 'farhand'));
  } catch {
    // Without a cache it only starts more slowly.
  }
}

enableCache();
// After that, so that its modules are cached too.
const { run } = await import('./run.ts');
await run(process.argv);
