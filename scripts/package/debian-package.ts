// Creates a Debian package of a program: its directory in /usr/lib, and its launchers in /usr/bin.
import {
  chmodSync,
  cpSync,
  mkdirSync,
  readdirSync,
  rmSync,
  statSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { type Program, programs } from './program-directories.ts';
import { epoch } from './reproducible-tar.ts';
import { type Arch, run, version } from './shared-by-packaging-steps.ts';

const debianArch: Record<Arch, string> = { x64: 'amd64', arm64: 'arm64' };

export function debName(name: Program, arch: Arch): string {
  return `${name}_${version}_${debianArch[arch]}.deb`;
}

/** Creates the package in `file` from the directory `program`. `level` is the compression level of gzip. */
export async function makeDeb(
  name: Program,
  arch: Arch,
  from: { program: string; scratch: string; file: string; level: number },
): Promise<void> {
  const { program, scratch, file, level } = from;
  mkdirSync(join(scratch, 'DEBIAN'), { recursive: true });
  mkdirSync(join(scratch, 'usr/bin'), { recursive: true });
  // Files are hard-linked instead of copied, because Node is large.
  mkdirSync(join(scratch, 'usr/lib'));
  await run('cp', ['-al', program, join(scratch, 'usr/lib', name)]);
  for (const entry of programs[name].entries) {
    symlinkSync(`../lib/${name}/bin/${entry}`, join(scratch, 'usr/bin', entry));
  }
  await moveShare(join(scratch, 'usr/lib', name, 'share'), join(scratch, 'usr/share'));
  cpSync(join(program, 'LICENSE'), join(scratch, 'usr/share/doc', name, 'copyright'));
  writeFileSync(join(scratch, 'DEBIAN/control'), controlText(name, arch, kibibytesIn(join(scratch, 'usr'))));
  for (const [script, text] of Object.entries(scriptsOf(name))) {
    writeFileSync(join(scratch, 'DEBIAN', script), text);
    chmodSync(join(scratch, 'DEBIAN', script), 0o755);
  }
  const zip = ['-Zgzip', `-z${level}`];
  await run('env', [
    `SOURCE_DATE_EPOCH=${epoch}`,
    'dpkg-deb',
    '--root-owner-group',
    ...zip,
    '--build',
    scratch,
    file,
  ]);
}

/** Moves manual pages and completions to the directories of the system. Compresses the pages, as Debian requires. */
async function moveShare(from: string, to: string): Promise<void> {
  await run('cp', ['-r', from, to]);
  rmSync(from, { recursive: true });
  const pages = readdirSync(join(to, 'man'), { recursive: true, withFileTypes: true });
  const files = pages.filter((page) => page.isFile()).map((page) => join(page.parentPath, page.name));
  await run('gzip', ['-n9', ...files]);
}

/** Returns the installed size as Debian counts it: files in whole kibibytes, any other entry as one kibibyte. */
function kibibytesIn(folder: string): number {
  const entries = readdirSync(folder, { recursive: true, withFileTypes: true });
  const sizes = entries.map((entry) =>
    entry.isFile() ? Math.ceil(statSync(join(entry.parentPath, entry.name)).size / 1024) : 1,
  );
  return sizes.reduce((sum, size) => sum + size, 1);
}

function controlText(name: Program, arch: Arch, kibibytes: number): string {
  return `Package: ${name}
Version: ${version}
Architecture: ${debianArch[arch]}
Maintainer: The Farhand authors <farhand@localhost>
Installed-Size: ${kibibytes}
Depends: libc6 (>= 2.28), libstdc++6
Section: admin
Priority: optional
Description: ${programs[name].summary}
 Contains its own Node. "${name} install" runs the program as a service.
`;
}

/** Returns the maintainer scripts. They do not change a systemd unit that starts a program of another installation. */
function scriptsOf(name: Program): Record<string, string> {
  const isAgent = name === 'farhand-agent';
  // If FARHAND_UPGRADE is set, the package does not restart the agent. farhand-agent-upgrade.service then restarts it,
  // and watches how the new version starts.
  const restarts = isAgent ? '[ -z "$FARHAND_UPGRADE" ] && ' : '';
  const upgrade = isAgent ? `${name}-upgrade` : '';
  const settings = `/etc/farhand/${isAgent ? 'agent' : 'broker'}.toml`;
  const units = '/etc/systemd/system';
  const unit = `${units}/${name}.service`;
  const isOurs = `grep -q '^ExecStart=/usr/bin/${name} ' ${unit} 2>/dev/null`;
  const added = [`${unit}.d`, `${units}.control/${name}.service.d`, `/run/systemd/system/${name}.service.d`];
  return {
    postinst: `#!/bin/sh
set -e
# After an upgrade, a running service is restarted as the new version, with that version's unit file.
if ${restarts}[ "$1" = configure ] && [ -n "$2" ] && [ -d /run/systemd/system ] && ${isOurs}; then
  if systemctl is-active --quiet ${name}.service; then /usr/bin/${name} install || true; fi
fi
`,
    prerm: `#!/bin/sh
set -e
# The service is removed with its program. Its data, settings and account stay until a purge.
if [ "$1" = remove ] && [ -d /run/systemd/system ] && ${isOurs}; then
  /usr/bin/${name} uninstall ${isAgent ? '--keep-data' : '--yes'}
fi
`,
    postrm: `#!/bin/sh
set -e
# Data and account stay if a unit file of another installation exists.
if [ "$1" = purge ] && { [ ! -e ${unit} ] || ${isOurs}; }; then
  rm -f ${unit} ${units}/multi-user.target.wants/${name}.service
  rm -rf ${added.join(' ')}
${
  upgrade &&
  `  rm -f ${units}/${upgrade}.service ${units}/${upgrade}.path ${units}/multi-user.target.wants/${upgrade}.path
`
}  rm -rf /var/lib/${name} ${upgrade && `/var/lib/${upgrade} `}${settings}
  rmdir /etc/farhand 2>/dev/null || true
  if getent passwd ${name} >/dev/null; then
    accounthome=$(getent passwd ${name} | cut -d: -f6)
    userdel ${name} || true
    case $accounthome in /home/${name} | /var/lib/${name}) rm -rf "$accounthome" ;; esac
  fi
  if getent group ${name} >/dev/null; then groupdel ${name} || true; fi
fi
`,
  };
}
