// Decides from the broker's data whether the agent of a machine can be upgraded to a version. The agent may still
// refuse the upgrade later.
import type { Api, Reply } from '../../shared/api/route-table.ts';
import type { Obstacle } from '../../shared/api/upgrades.ts';
import { version as brokerVersion } from '../../shared/version.ts';
import type { Facts } from '../presence/stored-facts-and-metrics.ts';
import type { Machine } from '../state/index.ts';
import type { AgentPackage, Catalog } from './available-packages.ts';

export interface Refusal {
  reason: Obstacle;
  message: string;
}

const byHand = 'upgrade the agent by hand once, as docs/upgrading.md describes';

/** Returns the package to send, or the reason why the machine cannot be upgraded. */
export function packageFor(
  machine: Machine,
  facts: Facts | undefined,
  target: string,
  catalog: Catalog,
): AgentPackage | Refusal {
  const { installation, agent_version = '', arch = '', capabilities = [] } = facts ?? {};
  if (agent_version === target) return refusal('current', `the agent already has version ${target}`);
  const forbidden = heldOrPinned(machine, target);
  if (forbidden) return forbidden;
  if (!installation)
    return refusal(
      'not_supported',
      `agent version ${agent_version} cannot be upgraded by the broker: ${byHand}`,
    );
  const { kind, upgrade_unit, trusted_key, hold_version } = installation;
  if (kind === null)
    return refusal(
      'not_supported',
      'the agent was not installed as a service from a tar.gz or .deb package: upgrade it by hand',
    );
  if (!upgrade_unit)
    return refusal(
      'not_supported',
      'the systemd unit farhand-agent-upgrade.path is not installed on the machine: run farhand-agent install there as root',
    );
  if (hold_version !== '' && hold_version !== target)
    return refusal('held', `the machine’s owner accepts only version ${hold_version} (--hold-version)`);
  if (!capabilities.includes('upgrade'))
    return refusal(
      'not_allowed',
      'the machine’s owner does not allow upgrades: see the agent’s option --allow',
    );
  if (trusted_key === '')
    return refusal(
      'no_key',
      'the machine trusts no signing key yet: run farhand-agent trust-key FILE as root on the machine; FILE is the public key that verifies your packages',
    );
  return signedPackage(catalog, { version: target, arch, kind }, trusted_key);
}

/** Returns the refusal if `agent_hold` or `agent_pin` of a machine forbids a version, otherwise undefined. */
export function heldOrPinned({ agent_hold, agent_pin }: Machine, target: string): Refusal | undefined {
  if (agent_hold)
    return refusal('held', 'upgrades of this machine are on hold: set its agent_hold to false to allow them');
  if (agent_pin === undefined || agent_pin === target) return undefined;
  return refusal('pinned', `the machine is pinned to version ${agent_pin}: change its agent_pin`);
}

function signedPackage(
  catalog: Catalog,
  what: { version: string; arch: string; kind: string },
  trustedKey: string,
): AgentPackage | Refusal {
  const fitting = catalog.filter(
    (one) => one.version === what.version && one.arch === what.arch && one.kind === what.kind,
  );
  // A signed package is preferred.
  const found = fitting.find(({ signature }) => signature) ?? fitting[0];
  const name = `${what.version} for ${what.arch} (${what.kind})`;
  if (!found)
    return refusal(
      'no_package',
      `this broker has no agent package ${name}: upload it with farhand packages upload`,
    );
  if (!found.signature)
    return refusal(
      'no_package',
      `the package ${found.file} is not signed: build it with npm run package -- --sign-key FILE`,
    );
  // `key_changes` lead from older keys to the key that signed the package: each new key is signed by the previous one.
  // A machine that trusts one of the older keys accepts the package. Only the machine can verify the chain, so the
  // broker accepts every package with `key_changes` here.
  if (found.signature.key_changes.length > 0 || found.signed_by === trustedKey) return found;
  return refusal(
    'other_key',
    `the machine does not trust the key that signed the package ${found.file}: sign it with the trusted key, or run farhand-agent trust-key FILE as root on the machine; FILE is the public key that verifies the package`,
  );
}

const refusal = (reason: Obstacle, message: string): Refusal => ({ reason, message });

export const isRefusal = (one: AgentPackage | Refusal): one is Refusal => 'reason' in one;

type State = Reply<Api['machines']['get']>['upgrade'];

/** Returns the field `upgrade` of a machine in the API: whether the broker can upgrade the machine, or why not. */
export function upgradeStateOf(machine: Machine, facts: Facts | undefined, catalog: Catalog): State {
  const target = machine.agent_pin ?? brokerVersion;
  const found = packageFor(machine, facts, target, catalog);
  const { kind = null, trusted_key = '', hold_version = '', last_upgrade = null } = facts?.installation ?? {};
  const refused = isRefusal(found) ? found : undefined;
  return {
    available: refused?.reason === 'current' || refused?.reason === 'no_package' ? null : target,
    possible: refused === undefined,
    reason: refused?.reason ?? null,
    message: refused?.message ?? null,
    pin: machine.agent_pin ?? null,
    hold: machine.agent_hold ?? false,
    kind,
    key: trusted_key || null,
    hold_version: hold_version || null,
    last: last_upgrade,
  };
}
