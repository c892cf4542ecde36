// The version of Farhand, the same for all three programs.
import manifest from '../package.json' with { type: 'json' };

/** Version in package.json. */
export const { version } = manifest;
