// The version of Farhand, the same for agent, broker and command line.
import manifest from '../package.json' with { type: 'json' };

export const { version } = manifest;
