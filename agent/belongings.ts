// What belongs to the agent itself: through it nobody gets at these places, whatever the roots, or else its lock would
// be as good as none.
import { basename, dirname, join, resolve } from 'node:path';

export interface Belongings {
  /** Keys, settings and what starts the agent: neither read nor changed. */
  secret: string[];
  /** What it runs: read, never changed. */
  program: string[];
}

const unit = 'farhand-agent.service';
const units = '/etc/systemd/system';

/** Where systemd looks for the agent's service, for what adds to it, and for what starts it. */
const service = [
  ...[units, '/run/systemd/system', '/usr/lib/systemd/system'].flatMap((directory) => [
    `${directory}/${unit}`,
    `${directory}/${unit}.d`,
  ]),
  `${units}/farhand-.service.d`,
  `${units}.control/${unit}.d`,
  `${units}/multi-user.target.wants/${unit}`,
  '/etc/default/farhand-agent',
];

/** Where packages put the program. */
const installed = [
  '/opt/farhand-agent',
  '/usr/lib/farhand-agent',
  '/usr/bin/farhand-agent',
  '/usr/local/bin/farhand-agent',
];

/** Settings that name places of the agent's own. */
interface Places {
  data_dir: string;
  config?: string | undefined;
  join_token_file?: string | undefined;
}

export function belongingsOf({ data_dir, config, join_token_file }: Places): Belongings {
  const told = [config, join_token_file].flatMap((path) => (path ? [resolve(path)] : []));
  return {
    // The file by itself, too: mounted elsewhere it is not seen to lie in the directory.
    secret: [data_dir, join(data_dir, 'identity.json'), ...told, ...service],
    program: [process.execPath, ...own(import.meta.filename), ...installed],
  };
}

/** The package that a program runs from. A checkout is its owner's to edit. */
function own(file: string): string[] {
  if (file.endsWith('.ts')) return [];
  const directory = dirname(file);
  return [['lib', 'dist'].includes(basename(directory)) ? dirname(directory) : directory];
}
