// The report of an agent about its installation: how it can be upgraded, and the outcome of its last upgrade.
import * as z from 'zod';
import type { Installation__Output } from '../../proto/types/farhand/link/v1/Installation.ts';
import type { LastUpgrade__Output } from '../../proto/types/farhand/link/v1/LastUpgrade.ts';
import { label } from '../../shared/api/shared-schemas.ts';
import { upgradeOutcomes } from '../../shared/api/upgrades.ts';
import { clean } from '../../shared/sanitize-text.ts';

const text = (max: number) => z.string().transform((value) => clean(value).slice(0, max));
const lastUpgradeSchema = z.object({
  upgrade_id: label(0, 200),
  outcome: z.enum(upgradeOutcomes),
  from_version: label(0, 64),
  to_version: label(0, 64),
  reason: text(500),
});
export type LastUpgrade = z.output<typeof lastUpgradeSchema>;

const installationSchema = z.object({
  kind: z.enum(['tar.gz', 'deb']).nullable(),
  upgrade_unit: z.boolean(),
  trusted_key: z.string().regex(/^([0-9a-f]{64})?$/),
  hold_version: label(0, 64),
  last_upgrade: lastUpgradeSchema.nullable(),
});
export type Installation = z.output<typeof installationSchema>;

const kinds: Readonly<Record<string, 'tar.gz' | 'deb'>> = {
  PACKAGE_KIND_TAR_GZ: 'tar.gz',
  PACKAGE_KIND_DEB: 'deb',
};

/**
 * Checks the installation that an agent reports in its hello. Returns undefined if the report is invalid, or missing
 * because the agent supports no upgrades.
 */
export function installationOf(sent: Installation__Output | null): Installation | undefined {
  if (!sent) return undefined;
  const last_upgrade = lastUpgradeOf(sent.last_upgrade) ?? null;
  return installationSchema.safeParse({ ...sent, kind: kinds[sent.kind] ?? null, last_upgrade }).data;
}

/** Checks a report about an upgrade. Returns undefined if there is no report, or if it is invalid. */
export function lastUpgradeOf(sent: LastUpgrade__Output | null | undefined): LastUpgrade | undefined {
  const outcome = sent?.outcome.replace('UPGRADE_OUTCOME_', '').toLowerCase();
  return sent ? lastUpgradeSchema.safeParse({ ...sent, outcome }).data : undefined;
}
