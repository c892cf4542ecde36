#!/usr/bin/env node
// farhand: the command line, a client of the public API and nothing more.
import { statSync } from 'node:fs';
import { enableCompileCache } from 'node:module';
import { homedir } from 'node:os';
import { join } from 'node:path';

/** What was compiled once need not be again; of a cache only where nobody else may write. */
function keepCompiled(): void {
  try {
    const cache = process.env.XDG_CACHE_HOME || join(homedir(), '.cache');
    const { uid, mode } = statSync(cache);
    if (uid === process.getuid?.() && (mode & 0o022) === 0) enableCompileCache(join(cache, 'farhand'));
  } catch {
    // Slower, no more.
  }
}

keepCompiled();
// Only now, so that these are kept too.
const { run } = await import('./run.ts');
await run(process.argv);
