// The version of Farhand, the same for all three programs.
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { home } from './install-layout.ts';

const manifest: unknown = JSON.parse(readFileSync(join(home, 'package.json'), 'utf8'));

/** Version in package.json. */
export const version = hasVersion(manifest) ? manifest.version : 'unknown';

function hasVersion(value: unknown): value is { version: string } {
  return (
    typeof value === 'object' && value !== null && 'version' in value && typeof value.version === 'string'
  );
}
