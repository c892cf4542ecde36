// The checks of `farhand-agent doctor` for upgrades by the broker. They cover the trusted key, the systemd unit that
// installs upgrades as root, and the last upgrade.
import { existsSync } from 'node:fs';
import { fingerprintOf } from '../../shared/agent-package-signature.ts';
import { type Finding, ok, warn } from '../../shared/doctor/check-result.ts';
import { StartError } from '../../shared/errors.ts';
import { home } from '../../shared/paths-in-checkout-or-package.ts';
import { runsSystemd } from '../../shared/systemd/control.ts';
import type { AgentSettings } from '../settings-schema.ts';
import { installedKind, kindOfHome, readResult } from './files-shared-with-root.ts';
import { readTrustedKey } from './trusted-key.ts';

const unit = '/etc/systemd/system/farhand-agent-upgrade.path';
const byHand = 'upgrade this agent by hand, as docs/upgrading.md describes';

/** Returns no findings if the owner does not allow upgrades, or if no package has installed the agent. */
export function examineUpgrades({ allow, upgrade_dir: directory }: AgentSettings): Finding[] {
  if (!allow.includes('upgrade') || (!kindOfHome(home) && !installedKind(directory))) return [];
  const last = readResult(directory);
  const failed = last?.outcome === 'FAILED' || last?.outcome === 'ROLLED_BACK';
  return [
    installedKind(directory) && existsSync(unit)
      ? ok('upgrades', 'the broker can upgrade this agent by signed packages')
      : warn(
          'upgrades',
          'the systemd unit farhand-agent-upgrade.path is not installed, so the broker cannot upgrade this agent',
          runsSystemd() ? `run farhand-agent install, or ${byHand}` : byHand,
        ),
    trusted(directory),
    ...(failed
      ? [
          warn(
            'last upgrade',
            `to ${last.to_version}: ${last.reason}`,
            'see journalctl -u farhand-agent-upgrade',
          ),
        ]
      : []),
  ];
}

function trusted(directory: string): Finding {
  const pin = 'run farhand-agent trust-key FILE as root; FILE is the public key that verifies your packages';
  try {
    const key = readTrustedKey(directory);
    if (key) return ok('trusted key', fingerprintOf(key));
    return warn(
      'trusted key',
      'this machine trusts no signing key, so it accepts no upgrade from the broker',
      pin,
    );
  } catch (error) {
    if (!(error instanceof StartError)) throw error;
    return warn('trusted key', error.message, pin);
  }
}
