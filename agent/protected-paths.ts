// The paths that no file operation reaches, whatever the roots: the agent's own keys, settings, service and program. Else
// its lock would be as good as none.
import { basename, dirname, join, resolve } from 'node:path';

export interface ProtectedPaths {
  /** Keys, settings and what starts the agent: neither read nor changed. */
  secret: string[];
  /** Program files: may be read, never changed. */
  program: string[];
}

const unit = 'farhand-agent.service';

/** Where systemd looks for units (`systemd-analyze unit-paths`), and for its own settings. */
const unitDirectories = [
  ...['system.control', 'system', 'system.attached'].flatMap((one) => [
    `/etc/systemd/${one}`,
    `/run/systemd/${one}`,
  ]),
  ...['transient', 'generator.early', 'generator', 'generator.late'].map((one) => `/run/systemd/${one}`),
  ...['/usr/local/lib', '/usr/lib', '/lib'].map((one) => `${one}/systemd/system`),
];
const settingDirectories = ['/etc/systemd', '/run/systemd', '/usr/local/lib/systemd', '/usr/lib/systemd'];

/** The agent's service, what adds to it, and what starts it. */
const service = [
  ...unitDirectories.flatMap((directory) => [
    `${directory}/${unit}`,
    `${directory}/${unit}.d`,
    `${directory}/farhand-.service.d`,
  ]),
  `/etc/systemd/system/multi-user.target.wants/${unit}`,
  '/etc/default/farhand-agent',
];

/** What adds to every service, so to the agent's too. */
const everyService = [
  ...unitDirectories.map((directory) => `${directory}/service.d`),
  ...settingDirectories.flatMap((directory) => [`${directory}/system.conf`, `${directory}/system.conf.d`]),
];

/** Files of the data directory, each by itself: one that is mounted elsewhere does not lie below the directory. */
const parts = [
  'identity.json',
  'lock.db',
  'temporary.journal',
  'processes',
  ...['journal', 'output', 'pipes'].map((name) => `processes/${name}`),
  ...['', '.1', '.2', '.3', '.4', '.next'].map((age) => `activity${age}.log`),
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

export function protectedPathsOf({ data_dir, config, join_token_file }: Places): ProtectedPaths {
  const settings = [config, join_token_file].flatMap((path) => (path ? [resolve(path)] : []));
  return {
    secret: [data_dir, ...parts.map((part) => join(data_dir, part)), ...settings, ...service],
    program: [process.execPath, ...own(import.meta.filename), ...installed, ...everyService],
  };
}

/** The package that a program runs from. A checkout is its owner's to edit. */
function own(file: string): string[] {
  if (file.endsWith('.ts')) return [];
  const directory = dirname(file);
  return [['lib', 'dist'].includes(basename(directory)) ? dirname(directory) : directory];
}
