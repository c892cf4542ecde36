// Uses dpkg to replace an agent that was installed from a Debian package. For a rollback, first makes a package of the
// installed version.
import { copyFileSync, lstatSync, mkdirSync, writeFileSync } from 'node:fs';
import { mkdtemp, readdir, rename, rm } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { monotonic, sleep } from '../../../shared/clock.ts';
import { StartError } from '../../../shared/errors.ts';
import { must, run } from '../../../shared/systemd/control.ts';
import type { UpgradePaths } from '../files-shared-with-root.ts';
import type { Installer, VersionNames } from './package-installer-interface.ts';
import { assertRuns } from './try-version.ts';

const name = 'farhand-agent';
const home = `/usr/lib/${name}`;
const information = '/var/lib/dpkg/info';
const scripts = ['postinst', 'prerm', 'postrm'];
/** Milliseconds to wait while another program, such as unattended-upgrades, has the lock of dpkg. */
const lockMs = 5 * 60_000;
const retryMs = 5_000;

export class DebianPackage implements Installer {
  readonly command = '/usr/bin/farhand-agent';
  readonly #paths: UpgradePaths;

  constructor(paths: UpgradePaths) {
    this.#paths = paths;
  }

  async prepare(version: string): Promise<VersionNames> {
    const { copy, rescue } = this.#paths;
    const directory = dirname(copy);
    const found = (await must('dpkg-deb', ['--field', copy, 'Package', 'Version'])).trim();
    if (found !== `Package: ${name}\nVersion: ${version}`)
      throw new StartError(
        `the package must contain ${name} ${version}, but its control file says "${found.replace('\n', ', ')}"`,
      );
    const folder = await mkdtemp(join(directory, '.new-'));
    try {
      await must('dpkg-deb', ['--extract', copy, folder]);
      await assertRuns(join(folder, home), version);
    } finally {
      await rm(folder, { recursive: true, force: true });
    }
    await packInstalled(directory, this.#paths.previousDeb);
    await rm(rescue, { recursive: true, force: true });
    await must('cp', ['-a', home, rescue]);
    await must('sync', ['-f', directory]);
    return { before: '', after: '' };
  }

  async forward(): Promise<void> {
    await install(this.#paths.copy);
  }

  async back(): Promise<void> {
    await install(this.#paths.previousDeb);
  }

  async sweep(): Promise<void> {
    // dpkg has removed the files of the version that it replaced.
    const directory = dirname(this.#paths.copy);
    for (const name of await readdir(directory))
      if (/^\.(new|pack)-/.test(name)) await rm(join(directory, name), { recursive: true, force: true });
  }
}

/** Makes a package of the installed version, from its files and from the data that dpkg stores about it. */
async function packInstalled(directory: string, file: string): Promise<void> {
  const folder = await mkdtemp(join(directory, '.pack-'));
  const [fresh, list, archive] = [`${folder}.deb`, `${folder}.list`, `${folder}.tar`];
  try {
    const control = join(folder, 'DEBIAN');
    mkdirSync(control, { mode: 0o755 });
    const status = await must('dpkg-query', ['--status', name]);
    writeFileSync(join(control, 'control'), status.replace(/^(Status|Config-Version): .*\n/gm, ''));
    for (const script of scripts) copyFileSync(join(information, `${name}.${script}`), join(control, script));
    const paths = (await must('dpkg-query', ['--listfiles', name])).trim().split('\n');
    // dpkg lists every file of a package, even documentation that settings of dpkg excluded from the installation. Only
    // files that exist are packed.
    const files = paths.filter((path) => lstatSync(path, { throwIfNoEntry: false })?.isDirectory() === false);
    writeFileSync(list, files.map((path) => `.${path}\n`).join(''));
    await must('tar', ['-C', '/', '-cf', archive, '--no-recursion', '-T', list]);
    await must('tar', ['-C', folder, '-xpf', archive]);
    await must('chmod', ['0755', folder]);
    await must('dpkg-deb', ['--root-owner-group', '-Zgzip', '-z1', '--build', folder, fresh]);
    await rename(fresh, file);
  } finally {
    await rm(folder, { recursive: true, force: true });
    for (const made of [fresh, list, archive]) await rm(made, { force: true });
  }
}

/** Installs a package file, even one of an older version. Waits while another program uses dpkg. */
async function install(file: string): Promise<void> {
  for (const until = monotonic() + lockMs; ; await sleep(retryMs)) {
    // With FARHAND_UPGRADE set, the package's own script does not restart the service.
    const words = [
      'LC_ALL=C',
      'FARHAND_UPGRADE=1',
      'DEBIAN_FRONTEND=noninteractive',
      'dpkg',
      '--install',
      file,
    ];
    const { code, stderr } = await run('env', words);
    if (code === 0) return;
    if (!/\block\b/.test(stderr) || monotonic() > until)
      throw new StartError(`dpkg could not install the package: ${stderr.trim().slice(-500)}`);
  }
}
