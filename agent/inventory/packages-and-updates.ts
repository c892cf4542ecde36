// Lists installed packages and pending updates of dpkg, rpm, apk and pacman.
// Never refreshes package lists, and waits for no lock.
import { access, readdir, readFile, stat } from 'node:fs/promises';
import { join } from 'node:path';
import type { InventoryPackage } from '../../proto/types/farhand/agent/v1/InventoryPackage.ts';
import type { InventoryUpdate } from '../../proto/types/farhand/agent/v1/InventoryUpdate.ts';
import { PartFailed, runProgram } from './run-program.ts';

type Signal = AbortSignal;

interface PackageManager {
  /** The package format. It decides how versions are compared. */
  format: 'deb' | 'rpm' | 'apk' | 'pacman';
  /**
   * Files and directories of the package manager's database. On a machine that uses the package manager, one of them is
   * not empty.
   */
  databases: readonly string[];
  installed(signal: Signal): Promise<InventoryPackage[]>;
  updates(signal: Signal): Promise<InventoryUpdate[]>;
}

/** Returns the package manager of this machine; undefined if it is unknown. */
export async function findPackageManager(): Promise<PackageManager | undefined> {
  for (const manager of managers) {
    for (const database of manager.databases) if (await isFilled(database)) return manager;
  }
  return undefined;
}

/**
 * True if a database exists and is not empty. An empty one does not count: the package dpkg of Arch Linux installs one,
 * but pacman manages the packages there.
 */
const isFilled = (path: string): Promise<boolean> =>
  stat(path).then(
    ({ size }) => size > 0,
    () => false,
  );

/** True if a path exists and the agent has the permissions in `mode`, such as R_OK (access(2)). */
export const exists = (path: string, mode?: number): Promise<boolean> =>
  access(path, mode).then(
    () => true,
    () => false,
  );

const linesOf = (text: string): string[] => text.split('\n').filter((line) => line.trim() !== '');

/** Parses lines of three fields with tabs between them: name, version, architecture. */
function threeFields(text: string): InventoryPackage[] {
  return linesOf(text).map((line) => {
    const [name = '', version = '', arch = ''] = line.split('\t');
    return { name, version, arch };
  });
}

// ---- dpkg and apt

async function installedByDpkg(signal: Signal): Promise<InventoryPackage[]> {
  // biome-ignore lint/suspicious/noTemplateCurlyInString: dpkg-query replaces these names
  const format = '${db:Status-Status}\\t${Package}\\t${Version}\\t${Architecture}\\n';
  const text = await runProgram('dpkg-query', ['-W', '-f', format], { signal });
  const present = linesOf(text).filter((line) => line.startsWith('installed\t'));
  return threeFields(present.map((line) => line.slice('installed\t'.length)).join('\n'));
}

async function updatesOfApt(signal: Signal): Promise<InventoryUpdate[]> {
  // When apt runs as root, it locks the lists and writes its caches even for a simulation. These settings prevent both.
  const settings = ['Debug::NoLocking=true', 'Dir::Cache::pkgcache=', 'Dir::Cache::srcpkgcache='];
  const options = settings.flatMap((setting) => ['-o', setting]);
  return parseAptSimulation(await runProgram('apt-get', ['-s', ...options, 'dist-upgrade'], { signal }));
}

/** Parses lines such as `Inst libc6 [2.36-9] (2.36-10 Debian:12 [amd64])`. Skips new packages (without `[2.36-9]`). */
export function parseAptSimulation(text: string): InventoryUpdate[] {
  return [...text.matchAll(/^Inst (\S+) \[(\S+)\] \((\S+) /gm)].map(
    ([, name = '', installed = '', available = '']) => ({ name, installed, available }),
  );
}

// ---- rpm with dnf or zypper

/** Lists the packages in the order of their installation. */
async function installedByRpm(signal: Signal): Promise<InventoryPackage[]> {
  const format = '%{INSTALLTIME}\\t%{NAME}\\t%|EPOCH?{%{EPOCH}:}|%{VERSION}-%{RELEASE}\\t%{ARCH}\\n';
  const lines = linesOf(await runProgram('rpm', ['-qa', '--qf', format], { signal }));
  lines.sort((a, b) => Number.parseInt(a, 10) - Number.parseInt(b, 10));
  const packages = threeFields(lines.map((line) => line.replace(/^\d+\t/, '')).join('\n'));
  // Entries of this name are not packages, but keys that verify packages.
  return packages.filter(({ name }) => name !== 'gpg-pubkey');
}

async function updatesOfRpm(signal: Signal): Promise<InventoryUpdate[]> {
  // On some distributions with dnf, zypper is installed but has no repositories. There, dnf lists the updates.
  const repositories = await repositoriesOfZypper();
  if (repositories.length > 0 || !(await exists('/usr/bin/dnf')))
    return updatesOfZypper(repositories, signal);
  // Exit code 100 means that there are updates. With exit_on_lock, dnf fails at once if another process has its lock.
  const args = ['-q', '-C', '--setopt=exit_on_lock=1', 'check-update'];
  // If the agent runs as root, dnf locks its cache for a moment. The other package managers take no lock.
  const text = await runProgram('dnf', args, { signal, codes: [100] });
  // A package, such as the kernel, may be installed in several versions. The version installed last counts.
  const installed = new Map(
    (await installedByRpm(signal)).flatMap(({ name, arch, version = '' }): [string, string][] => [
      // This entry is used if the update is for another architecture than the installed package.
      [`${name}`, version],
      [`${name}.${arch}`, version],
    ]),
  );
  return parseDnfList(text).map(({ id, available }) => {
    const name = id.replace(/\.[^.]*$/, '');
    return { name, installed: installed.get(id) ?? installed.get(name) ?? '', available };
  });
}

const zypperRepositories = '/etc/zypp/repos.d';

async function repositoriesOfZypper(): Promise<string[]> {
  const files = await readdir(zypperRepositories).catch(() => []);
  const texts = files
    .filter((file) => file.endsWith('.repo'))
    .map((file) => readFile(join(zypperRepositories, file), 'utf8'));
  const sections = (await Promise.all(texts)).flatMap((text) => text.split(/^\[/m).slice(1));
  const enabled = sections.filter((text) => !/^enabled\s*=\s*(0|no|off|false)\s*$/im.test(text));
  return enabled.map((text) => text.slice(0, text.indexOf(']')));
}

async function updatesOfZypper(repositories: readonly string[], signal: Signal): Promise<InventoryUpdate[]> {
  // zypper downloads a missing package list even with --no-refresh. The inventory must not use the network, so it
  // reports the missing list instead of the updates.
  for (const name of repositories)
    if (!(await exists(join('/var/cache/zypp/raw', name.replaceAll('/', '_')))))
      throw new PartFailed(`the package list of ${name} was never fetched: run zypper refresh`);
  // Makes libzypp take no lock.
  const env = { ZYPP_READONLY_HACK: '1' };
  const args = ['--non-interactive', '--no-refresh', '--quiet', 'list-updates'];
  return parseZypperTable(await runProgram('zypper', args, { signal, env }));
}

/** Parses lines such as `bash.x86_64   5.2.26-4.fc40   updates`, up to the list of obsolete packages. */
export function parseDnfList(text: string): { id: string; available: string }[] {
  const [list = ''] = text.split(/^Obsoleting Packages/im);
  return [...list.matchAll(/^(\S+\.\w+)\s+(\S*\d\S*)\s+\S+\s*$/gm)].map(([, id = '', available = '']) => ({
    id,
    available,
  }));
}

/** Parses zypper's table `S | Repository | Name | Current Version | Available Version | Arch`. */
export function parseZypperTable(text: string): InventoryUpdate[] {
  const rows = linesOf(text).map((line) => line.split('|').map((cell) => cell.trim()));
  return rows
    .filter((cells) => cells.length === 6 && cells[0] === 'v')
    .map(([, , name = '', installed = '', available = '']) => ({ name, installed, available }));
}

// ---- apk

const apkDatabases = ['/lib/apk/db/installed', '/usr/lib/apk/db/installed'];

async function installedByApk(): Promise<InventoryPackage[]> {
  for (const file of apkDatabases)
    if (await exists(file)) return parseApkDatabase(await readFile(file, 'utf8'));
  throw new PartFailed('the package database of apk was removed while the inventory was collected');
}

/** Parses paragraphs with lines such as `P:musl`, `V:1.2.4-r2` and `A:x86_64`. */
export function parseApkDatabase(text: string): InventoryPackage[] {
  const field = (paragraph: string, letter: string): string =>
    new RegExp(`^${letter}:(.*)$`, 'm').exec(paragraph)?.[1] ?? '';
  return text
    .split('\n\n')
    .map((one) => ({ name: field(one, 'P'), version: field(one, 'V'), arch: field(one, 'A') }))
    .filter(({ name }) => name !== '');
}

async function updatesOfApk(signal: Signal): Promise<InventoryUpdate[]> {
  const text = await runProgram('apk', ['version', '--no-network', '-l', '<'], { signal });
  return parseApkVersions(text, await installedByApk());
}

/**
 * Parses lines such as `musl-1.2.4-r0 < 1.2.4-r2`. Names may contain hyphens, so it is unclear where a name ends. The
 * text NAME-VERSION before "<" is therefore looked up among the installed packages.
 */
export function parseApkVersions(text: string, packages: readonly InventoryPackage[]): InventoryUpdate[] {
  const byId = new Map(packages.map((one) => [`${one.name}-${one.version}`, one]));
  return [...text.matchAll(/^(\S+)\s+<\s+(\S+)/gm)].flatMap(([, id = '', available = '']) => {
    const { name = '', version: installed = '' } = byId.get(id) ?? {};
    return name ? [{ name, installed, available }] : [];
  });
}

// ---- pacman

async function installedByPacman(signal: Signal): Promise<InventoryPackage[]> {
  const text = await runProgram('pacman', ['-Q'], { signal });
  return linesOf(text).map((line) => {
    const [name = '', version = ''] = line.split(' ');
    return { name, version, arch: '' };
  });
}

async function updatesOfPacman(signal: Signal): Promise<InventoryUpdate[]> {
  // pacman exits with 1 if it failed, and also if there are no updates. Its stderr matches isFailure only if it failed.
  const isFailure = /^error: .*|^warning: database file .*/m;
  return parsePacmanUpdates(await runProgram('pacman', ['-Qu'], { signal, codes: [1], isFailure }));
}

/** Parses lines such as `linux 6.6.1-1 -> 6.6.2-1`, also with `[ignored]` at the end. */
export function parsePacmanUpdates(text: string): InventoryUpdate[] {
  return [...text.matchAll(/^(\S+) (\S+) -> (\S+)/gm)].map(
    ([, name = '', installed = '', available = '']) => ({
      name,
      installed,
      available,
    }),
  );
}

// dpkg comes first: Debian offers pacman and rpm as packages, and these create databases of their own.
const managers: readonly PackageManager[] = [
  {
    format: 'deb',
    databases: ['/var/lib/dpkg/status'],
    installed: installedByDpkg,
    updates: updatesOfApt,
  },
  { format: 'apk', databases: apkDatabases, installed: installedByApk, updates: updatesOfApk },
  {
    format: 'pacman',
    databases: ['/var/lib/pacman/local'],
    installed: installedByPacman,
    updates: updatesOfPacman,
  },
  {
    format: 'rpm',
    databases: ['/usr/lib/sysimage/rpm', '/var/lib/rpm'],
    installed: installedByRpm,
    updates: updatesOfRpm,
  },
];
