// Small root file systems, one for each package manager, each with a repository of tiny packages in a folder. The
// distribution's own tools make the packages and the repository.
import { execFileSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import {
  chmodSync,
  copyFileSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { dirname, join } from 'node:path';
import { temporaryFolder } from '../start-farhand.ts';

const checkout = join(import.meta.dirname, '../..');

/** Names and versions of packages. Each has release 1. */
export type Packages = readonly (readonly [name: string, version: string, arch?: string])[];

export interface PackageManager {
  format: string;
  /** Programs that must be installed. */
  programs: readonly string[];
  /** Files of the root file system, by path. It has the repository at /repository. */
  files: Readonly<Record<string, string>>;
  /** Builds these packages in a folder. */
  build(packages: Packages, folder: string): void;
  /** Makes a repository of the packages in a folder. */
  index(folder: string): void;
  /**
   * Shell lines:
   * - `install` installs the packages `$@`
   * - `fetch` fetches the package lists
   * - `list` prints `name version` of each installed package
   * - `upgrade` installs the updates
   */
  install: string;
  fetch: string;
  list: string;
  upgrade: string;
}

/** Runs a program in the folder `cwd`, which is its HOME too, because an ordinary user may write nowhere else. */
function run(command: readonly string[], cwd: string): string {
  const [program = '', ...args] = command;
  const env = { PATH: '/usr/sbin:/usr/bin:/sbin:/bin', LC_ALL: 'C', HOME: cwd };
  return execFileSync(program, args, { cwd, env, encoding: 'utf8', stdio: ['ignore', 'pipe', 'pipe'] });
}

const inFolder = (folder: string, name: string, text: string): string => {
  const path = join(folder, name);
  mkdirSync(dirname(path), { recursive: true });
  writeFileSync(path, text);
  return path;
};

// ---- dpkg and apt

const apt: PackageManager = {
  format: 'deb',
  programs: ['dpkg-deb', 'apt-get'],
  files: {
    '/etc/apt/sources.list': 'deb [trusted=yes] file:/repository ./\n',
    '/etc/apt/apt.conf.d/test': 'APT::Sandbox::User "root";\n',
    '/var/lib/dpkg/status': '',
    '/var/lib/dpkg/info/format': '1\n',
    '/var/lib/dpkg/updates/.folder': '',
    // On Debian, pacman can be installed too, so its database exists here. The inventory must still report the packages
    // of dpkg.
    '/var/lib/pacman/local/ALPM_DB_VERSION': '9\n',
  },
  build(packages, folder) {
    for (const [name, version] of packages) {
      const source = temporaryFolder('deb');
      const control = `Package: ${name}\nVersion: ${version}-1\nArchitecture: all\nMaintainer: Test <test@example.org>\nDescription: test\n`;
      inFolder(source, 'DEBIAN/control', control);
      chmodSync(source, 0o755);
      const file = join(folder, `${name}-${version.replace(/^\d+:/, '')}-1.deb`);
      run(['dpkg-deb', '--build', '--root-owner-group', source, file], source);
    }
  },
  index(folder) {
    const paragraphs = readdirSync(folder).map((file) => {
      const bytes = readFileSync(join(folder, file));
      const hash = createHash('sha256').update(bytes).digest('hex');
      const control = run(['dpkg-deb', '--field', file], folder);
      return `${control}Filename: ./${file}\nSize: ${bytes.length}\nSHA256: ${hash}\n`;
    });
    inFolder(folder, 'Packages', paragraphs.join('\n'));
  },
  install: 'dpkg --install "$@"',
  fetch: 'apt-get update',
  // biome-ignore lint/suspicious/noTemplateCurlyInString: dpkg-query replaces these names
  list: "dpkg-query --show --showformat='${Package} ${Version}\\n'",
  upgrade: 'apt-get --yes dist-upgrade',
};

// ---- rpm with dnf and zypper

/** Debian's rpm looks for its database in a home directory. These files make it use the usual path. */
const rpmFiles = { '/etc/rpm/macros': '%_dbpath /var/lib/rpm\n', '/var/lib/rpm/.folder': '' };

const rpm = {
  format: 'rpm',
  build(packages: Packages, folder: string) {
    for (const [name, text, arch = 'noarch'] of packages) {
      const [, epoch = '0', version = ''] = /^(?:(\d+):)?(.*)$/.exec(text) ?? [];
      const top = temporaryFolder('rpm');
      const lines = [
        ...['%define debug_package %{nil}', `Name: ${name}`, `Version: ${version}`, 'Release: 1'],
        ...(epoch === '0' ? [] : [`Epoch: ${epoch}`]),
        ...['Summary: test', 'License: MIT', ...(arch === 'noarch' ? ['BuildArch: noarch'] : [])],
        ...['%description', 'test', '%files', ''],
      ];
      const spec = inFolder(top, 'test.spec', lines.join('\n'));
      const folders = ['--define', `_topdir ${top}`, '--define', `_rpmdir ${top}/out`];
      run(['rpmbuild', '-bb', '--quiet', ...folders, spec], top);
      for (const file of readdirSync(join(top, 'out'), { recursive: true, encoding: 'utf8' }))
        if (file.endsWith('.rpm'))
          copyFileSync(join(top, 'out', file), join(folder, file.replace(/.*\//, '')));
    }
  },
  index: (folder: string) => void run(['createrepo_c', '--quiet', folder], folder),
  // All versions of a package stay installed side by side, as with kernels.
  install: 'rpm --install --nodeps "$@"',
  list: "rpm -qa --queryformat '%{NAME} %|EPOCH?{%{EPOCH}:}|%{VERSION}-%{RELEASE}\\n'",
};

const repositoryFile = '[test]\nname=Test repository\nbaseurl=file:///repository\nenabled=1\ngpgcheck=0\n';

const dnf: PackageManager = {
  ...rpm,
  programs: ['rpmbuild', 'createrepo_c', 'dnf'],
  files: {
    ...rpmFiles,
    '/etc/dnf/dnf.conf': '[main]\ngpgcheck=0\ninstallonly_limit=3\n',
    '/etc/yum.repos.d/test.repo': repositoryFile,
    '/etc/zypp/repos.d/test.repo': `[disabled]\nbaseurl=file:///none\nenabled = 0\n`,
  },
  fetch: 'dnf makecache',
  upgrade: 'dnf --assumeyes upgrade',
};

const zypper: PackageManager = {
  ...rpm,
  programs: ['rpmbuild', 'createrepo_c', 'zypper'],
  files: { ...rpmFiles, '/etc/zypp/repos.d/test.repo': repositoryFile },
  fetch: 'zypper --non-interactive refresh',
  upgrade: 'zypper --non-interactive update',
};

// ---- pacman

/** A user and group without rights. */
const user = 65_534;

const makepkgSettings = `CARCH=x86_64
BUILDENV=(!distcc !color !ccache !check !sign)
OPTIONS=(!strip docs libtool staticlibs emptydirs !zipman !purge !debug)
INTEGRITY_CHECK=(sha256)
PKGEXT=.pkg.tar.gz
SRCEXT=.src.tar.gz
COMPRESSGZ=(gzip -c)
`;

const pacman: PackageManager = {
  format: 'pacman',
  programs: ['pacman', 'makepkg', 'repo-add', 'bsdtar', 'fakeroot'],
  files: {
    '/etc/pacman.conf':
      '[options]\nArchitecture = auto\nSigLevel = Never\n[test]\nServer = file:///repository\n',
    '/var/lib/pacman/.folder': '',
    '/var/lib/dpkg/status': '',
  },
  build(packages, folder) {
    // Builds all packages of one version in a single run, because each run takes a second.
    for (const [text, some] of Map.groupBy(packages, ([, version]) => version)) {
      const [, epoch = '0', version = ''] = /^(?:(\d+):)?(.*)$/.exec(text) ?? [];
      const names = some.map(([name]) => name);
      const source = temporaryFolder('pacman');
      const lines = [
        ...[`pkgname=(${names.join(' ')})`, 'pkgbase=test', `pkgver=${version}`, 'pkgrel=1'],
        ...[
          `epoch=${epoch}`,
          'arch=(any)',
          'pkgdesc=test',
          ...names.map((name) => `package_${name}() { :; }`),
        ],
      ];
      inFolder(source, 'PKGBUILD', `${lines.join('\n')}\n`);
      const settings = inFolder(source, 'makepkg.conf', makepkgSettings);
      // makepkg refuses to run as root.
      run(['chown', '-R', String(user), source], source);
      const asUser = ['setpriv', `--reuid=${user}`, `--regid=${user}`, '--clear-groups'];
      run([...asUser, 'makepkg', '--config', settings, '--nodeps'], source);
      for (const file of readdirSync(source))
        if (file.endsWith('.pkg.tar.gz')) copyFileSync(join(source, file), join(folder, file));
    }
  },
  index(folder) {
    const files = readdirSync(folder).map((file) => `./${file}`);
    run(['repo-add', '--quiet', '--prevent-downgrade', 'test.db.tar.gz', ...files], folder);
  },
  install: 'pacman --upgrade --noconfirm "$@"',
  fetch: 'pacman --sync --refresh',
  list: 'pacman --query',
  upgrade: 'pacman --sync --sysupgrade --noconfirm',
};

export const managers = { apt, dnf, zypper, pacman };

// ---- The root file system

/**
 * Mounts the programs of this machine into a root file system, and runs a command there. The mounts are in a mount
 * namespace of their own, so they end with the command.
 */
const enter = `set -e
for path in /usr /proc /sys /dev "$1" "$2"; do mkdir -p "$0$path"; done
for path in /usr "$1" "$2"; do mount --bind --options ro "$path" "$0$path"; done
for path in /proc /sys /dev; do mount --rbind "$path" "$0$path"; done
root=$0; shift 2; exec chroot "$root" "$@"`;

export class Root {
  readonly path = temporaryFolder('root');
  readonly repository = join(this.path, 'repository');
  readonly #manager: PackageManager;

  constructor(manager: PackageManager) {
    this.#manager = manager;
    for (const name of ['bin', 'sbin', 'lib', 'lib64']) symlinkSync(`usr/${name}`, join(this.path, name));
    for (const name of ['tmp', 'run', 'root', 'repository', 'var/tmp', 'var/log', 'var/cache'])
      mkdirSync(join(this.path, name), { recursive: true });
    inFolder(this.path, 'etc/passwd', 'root:x:0:0:root:/root:/bin/sh\n');
    inFolder(this.path, 'etc/group', 'root:x:0:\n');
    inFolder(this.path, 'etc/os-release', 'ID=test\nVERSION_ID=1\n');
    for (const [name, text] of Object.entries(manager.files)) inFolder(this.path, name, text);
  }

  /** Arguments to put before a command, so that it runs in this root. */
  get under(): string[] {
    return ['unshare', '--mount', 'sh', '-c', enter, this.path, checkout, dirname(process.execPath)];
  }

  run(line: string, ...args: string[]): string {
    return run([...this.under, 'sh', '-c', line, 'sh', ...args], this.path);
  }

  install(files: readonly string[]): void {
    this.run(this.#manager.install, ...files.map((file) => join('/repository', file)));
  }

  /** Returns a line `name version` for each package that the package manager lists as installed. */
  installed(): string[] {
    return this.run(this.#manager.list).trim().split('\n').sort();
  }

  /**
   * Returns the size and time of each file, to detect changes. Leaves out logs, temporary files and dnf's list of
   * expired repositories, which dnf writes even with --cacheonly.
   */
  snapshot(): string[] {
    const find = "find /etc /var /root -type f -printf '%p %s %T@\\n'";
    const lines = this.run(find).trim().split('\n');
    return lines
      .filter((line) => !/^\/var\/(log|tmp)\/|\.sqlite-(shm|wal) |\/expired_repos\.json /.test(line))
      .sort();
  }
}
