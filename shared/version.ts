// The one version of all three programs.
import { createRequire } from 'node:module';

const manifest: unknown = createRequire(import.meta.url)('../package.json');

/** As in package.json. */
export const version = hasVersion(manifest) ? manifest.version : 'unknown';

function hasVersion(value: unknown): value is { version: string } {
  return (
    typeof value === 'object' && value !== null && 'version' in value && typeof value.version === 'string'
  );
}
