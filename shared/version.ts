// The version of Farhand, the same for all three programs.
import manifest from '../package.json' with { type: 'json' };

export const { version } = manifest;
