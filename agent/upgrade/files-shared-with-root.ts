// The directory that the agent shares with the systemd unit farhand-agent-upgrade, which runs as root. The agent may
// write only in `incoming`, and root verifies all files from there.
import { existsSync, readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import * as z from 'zod';
import { signatureFileSchema } from '../../shared/agent-package-signature.ts';

export const upgradeDirectory = '/var/lib/farhand-agent-upgrade';

export type UpgradePaths = ReturnType<typeof upgradePaths>;

export function upgradePaths(directory: string) {
  const incoming = join(directory, 'incoming');
  return {
    /** Directory in which the agent writes a package and the request to install it. */
    incoming,
    package: join(incoming, 'package'),
    request: join(incoming, 'request.json'),
    /** The request that root has taken but not answered yet. */
    taken: join(directory, 'request.json'),
    /** File in which `farhand-agent install` describes how the agent is installed. */
    installed: join(directory, 'installed.json'),
    /** Public key, as PEM. The machine accepts only packages whose signature this key verifies. */
    trustedKey: join(directory, 'trusted-key.pem'),
    /** File with the outcome of the last upgrade. Root writes it, and the agent reads it. */
    result: join(directory, 'result.json'),
    /**
     * File that only root uses. It contains the phase that a running upgrade has reached. It exists from shortly before
     * the version is switched until the end of the upgrade.
     */
    state: join(directory, 'state.json'),
    /** Root's own copy of the package. */
    copy: join(directory, 'package'),
    /** The previous version as a Debian package. */
    previousDeb: join(directory, 'previous.deb'),
    /** Copy of, or symlink to, the version before the upgrade. The program of that version finishes the upgrade. */
    rescue: join(directory, 'rescue'),
  };
}

/**
 * The agent's request to root to install a package, with the package's description and signature. The new version must
 * link to a broker within `link_timeout_ms`.
 */
export const requestSchema = signatureFileSchema.extend({
  upgrade_id: z.string().regex(/^[\w-]{1,64}$/),
  link_timeout_ms: z.int().min(10_000).max(3_600_000),
});
export type UpgradeRequest = z.output<typeof requestSchema>;

const resultSchema = z.object({
  upgrade_id: z.string(),
  outcome: z.enum(['RUNNING', 'SUCCEEDED', 'ROLLED_BACK', 'FAILED']),
  from_version: z.string(),
  to_version: z.string(),
  reason: z.string(),
  finished_at_ms: z.number().optional(),
});
export type UpgradeResult = z.output<typeof resultSchema>;

export type PackageKind = UpgradeRequest['kind'];
const installedSchema = signatureFileSchema.pick({ kind: true });

/** Returns the outcome of the last upgrade; undefined if there was none. */
export function readResult(directory: string): UpgradeResult | undefined {
  return readJson(upgradePaths(directory).result, resultSchema);
}

/** Returns the kind of package that the upgrade unit can replace; undefined if the unit is not installed. */
export function installedKind(directory: string): PackageKind | undefined {
  const { installed, incoming } = upgradePaths(directory);
  return existsSync(incoming) ? readJson(installed, installedSchema)?.kind : undefined;
}

/** Returns the kind of package that installed the program in this directory; undefined if no package did. */
export function kindOfHome(home: string): PackageKind | undefined {
  if (home === '/usr/lib/farhand-agent') return 'deb';
  return dirname(home) === '/opt/farhand-agent' ? 'tar.gz' : undefined;
}

/** Parses a file that root has written. Returns undefined if the file is missing or damaged. */
function readJson<T extends z.ZodType>(file: string, schema: T): z.output<T> | undefined {
  try {
    return schema.parse(JSON.parse(readFileSync(file, 'utf8')));
  } catch {
    return undefined;
  }
}
