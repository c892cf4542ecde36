// The steps of `farhand-agent install` that prepare a machine for upgrades by the broker. They make the upgrade unit's
// directory, and pin the key that the machine trusts.
import { existsSync } from 'node:fs';
import { chmod, chown, mkdir, realpath } from 'node:fs/promises';
import { dirname } from 'node:path';
import { writeDurably } from '../../shared/durable-file.ts';
import { StartError } from '../../shared/errors.ts';
import { home, shipped } from '../../shared/paths-in-checkout-or-package.ts';
import type { Installation } from '../../shared/systemd/install.ts';
import { kindOfHome, upgradeDirectory, upgradePaths } from './files-shared-with-root.ts';
import { pinKey, readPublicKey, readTrustedKey } from './trusted-key.ts';

/** Paths of the launchers that packages install. They are the same in every version. */
const launchers = ['/usr/bin/farhand-agent', '/usr/local/bin/farhand-agent'];

/**
 * Returns the part of the installation plan for the systemd units that upgrade the agent; undefined if no package can
 * replace this agent.
 * `trustKey`: the file with the key to pin.
 */
export async function planUpgradeUnit(
  command: readonly string[],
  trustKey: string | undefined,
): Promise<Installation['helper']> {
  const [launcher = ''] = command;
  const kind = launchers.includes(launcher) ? kindOfHome(await homeOf(launcher)) : undefined;
  const given = trustKey === undefined ? undefined : readPublicKey(trustKey);
  // No package installed this agent: it runs from a checkout or npm.
  if (!kind) {
    if (given)
      throw new StartError(
        '--trust-key: the broker can upgrade only an agent that was installed from a package; leave out --trust-key',
      );
    return undefined;
  }
  const carried = shipped('trusted-key.pem', () => '');
  // Without --trust-key, the key in the package is pinned if the machine trusts no key yet.
  const first = existsSync(carried) && !readTrustedKey(upgradeDirectory) ? readPublicKey(carried) : undefined;
  const key = given ?? first;
  return {
    blocks: [kind === 'deb' ? 'deb' : 'tar'],
    command: [launcher],
    async prepare({ uid, gid }) {
      const { incoming, installed } = upgradePaths(upgradeDirectory);
      await mkdir(incoming, { recursive: true });
      await chmod(upgradeDirectory, 0o755);
      await chown(incoming, uid, gid);
      await chmod(incoming, 0o700);
      await writeDurably(installed, JSON.stringify({ kind }), { mode: 0o644 });
      if (key) await pinKey(upgradeDirectory, key);
    },
  };
}

/**
 * Follows the link of a launcher to its program, and returns the directory of the package that contains this program.
 * If there is no such link, returns the directory of the running program.
 */
async function homeOf(launcher: string): Promise<string> {
  const real = await realpath(launcher).catch(() => '');
  return real.endsWith('/bin/farhand-agent') ? dirname(dirname(real)) : home;
}
