// Lists the agent's own files that file operations may not change, or may not even read. By changing them, a request
// could change what the machine's owner allows.
import { basename, dirname, join, resolve } from 'node:path';
import { upgradeDirectory } from './upgrade/files-shared-with-root.ts';

export interface ProtectedPaths {
  /** Keys, settings and files that start the agent. Requests may neither read nor change them. */
  secret: string[];
  /** Program files, and settings of systemd for every service. Requests may read them, but never change them. */
  program: string[];
}

const units = ['farhand-agent.service', 'farhand-agent-upgrade.service', 'farhand-agent-upgrade.path'];

/** Directories of systemd's units (`systemd-analyze unit-paths`), and directories of systemd's own settings. */
const unitDirectories = [
  ...['system.control', 'system', 'system.attached'].flatMap((one) => [
    `/etc/systemd/${one}`,
    `/run/systemd/${one}`,
  ]),
  ...['transient', 'generator.early', 'generator', 'generator.late'].map((one) => `/run/systemd/${one}`),
  ...['/usr/local/lib', '/usr/lib', '/lib'].map((one) => `${one}/systemd/system`),
];
const settingDirectories = ['/etc/systemd', '/run/systemd', '/usr/local/lib/systemd', '/usr/lib/systemd'];

/** Files of the agent's systemd service, its drop-ins, and the symlinks by which systemd starts it. */
const service = [
  ...unitDirectories.flatMap((directory) => [
    ...units.flatMap((unit) => [`${directory}/${unit}`, `${directory}/${unit}.d`]),
    ...['farhand-.service.d', 'farhand-agent-.service.d', 'farhand-.path.d'].map(
      (one) => `${directory}/${one}`,
    ),
  ]),
  ...units.map((unit) => `/etc/systemd/system/multi-user.target.wants/${unit}`),
  '/etc/default/farhand-agent',
];

/** Settings of systemd that apply to every service, including the agent's. */
const everyService = [
  ...unitDirectories.map((directory) => `${directory}/service.d`),
  ...settingDirectories.flatMap((directory) => [`${directory}/system.conf`, `${directory}/system.conf.d`]),
];

/**
 * Files and directories in the agent's data directory. Each of them may be a bind mount, and then also has a path
 * outside the data directory. Each is therefore protected on its own. Protection of the data directory alone would not
 * cover that path.
 */
const parts = [
  'identity.json',
  'lock.db',
  'temporary.journal',
  'processes',
  ...['journal', 'output', 'pipes'].map((name) => `processes/${name}`),
  ...['', '.1', '.2', '.3', '.4', '.next'].map((age) => `activity${age}.log`),
];

/** Paths at which packages install the program. */
const installed = [
  '/opt/farhand-agent',
  '/usr/lib/farhand-agent',
  '/usr/bin/farhand-agent',
  '/usr/local/bin/farhand-agent',
];

/** Settings that contain paths of the agent's own files. */
interface Places {
  data_dir: string;
  config?: string | undefined;
  join_token_file?: string | undefined;
  upgrade_dir?: string;
}

export function protectedPathsOf({
  data_dir,
  config,
  join_token_file,
  upgrade_dir = upgradeDirectory,
}: Places): ProtectedPaths {
  const settings = [config, join_token_file].flatMap((path) => (path ? [resolve(path)] : []));
  return {
    secret: [data_dir, ...parts.map((part) => join(data_dir, part)), upgrade_dir, ...settings, ...service],
    program: [process.execPath, ...own(import.meta.filename), ...installed, ...everyService],
  };
}

/** Returns the directory of the package that a program file belongs to. A source checkout is not protected. */
function own(file: string): string[] {
  if (file.endsWith('.ts')) return [];
  const directory = dirname(file);
  return [['lib', 'dist'].includes(basename(directory)) ? dirname(directory) : directory];
}
