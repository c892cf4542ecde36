// Replaces an agent that was installed from a tar.gz. The versions lie side by side in /opt/farhand-agent, and the link
// `current` points to the running one.
import { mkdtemp, readdir, readlink, rename, rm, symlink } from 'node:fs/promises';
import { join } from 'node:path';
import { syncDirectory } from '../../../shared/durable-file.ts';
import { must } from '../../../shared/systemd/control.ts';
import type { UpgradePaths } from '../files-shared-with-root.ts';
import type { Installer, VersionNames } from './package-installer-interface.ts';
import { assertRuns } from './try-version.ts';

const place = '/opt/farhand-agent';
const current = join(place, 'current');
const previous = join(place, 'previous');

export class TarVersions implements Installer {
  readonly command = '/usr/local/bin/farhand-agent';
  readonly #paths: UpgradePaths;

  constructor(paths: UpgradePaths) {
    this.#paths = paths;
  }

  async prepare(version: string): Promise<VersionNames> {
    const before = await readlink(current);
    const folder = await mkdtemp(join(place, '.new-'));
    const after = `${version}-${folder.slice(-6)}`;
    try {
      await must('tar', ['-xzf', this.#paths.copy, '-C', folder, '--no-same-owner', '--strip-components=1']);
      await must('chmod', ['0755', folder]);
      await assertRuns(folder, version);
      // The new version is flushed to the disk before it can become current. Otherwise a power failure could leave its
      // files empty.
      await must('sync', ['-f', folder]);
      await rename(folder, join(place, after));
    } catch (error) {
      await rm(folder, { recursive: true, force: true });
      throw error;
    }
    await rm(this.#paths.rescue, { recursive: true, force: true });
    await symlink(join(place, before), this.#paths.rescue);
    return { before, after };
  }

  async forward({ after }: VersionNames): Promise<void> {
    await point(after);
  }

  async back({ before }: VersionNames): Promise<void> {
    await point(before);
  }

  /** Keeps the previous version too, because an administrator may want to start it again. */
  async sweep(): Promise<void> {
    const kept = ['current', 'previous', await readlink(current), await readlink(previous).catch(() => '')];
    for (const name of await readdir(place)) {
      if (!kept.includes(name)) await rm(join(place, name), { recursive: true, force: true });
    }
  }
}

/**
 * Makes the link `current` point to the version `name`. If another version was current before, the link `previous` then
 * points to that version. Each link is replaced atomically.
 */
async function point(name: string): Promise<void> {
  const before = await readlink(current).catch(() => name);
  if (before !== name) await link('previous', before);
  await link('current', name);
  await syncDirectory(place);
}

async function link(path: string, target: string): Promise<void> {
  const fresh = join(place, `.${path}-new`);
  await rm(fresh, { force: true });
  await symlink(target, fresh);
  await rename(fresh, join(place, path));
}
