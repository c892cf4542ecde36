// The directory that the agent shares with root's upgrade unit. It belongs to root; the agent may write only in
// `incoming`, and root takes nothing from there but bytes that it verifies.
import { existsSync, readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import * as z from 'zod';
import { signatureFileSchema } from '../../shared/package-signature.ts';

export const upgradeDirectory = '/var/lib/farhand-agent-upgrade';

export interface UpgradePaths {
  /** Directory of the agent's user, for a package and the request to install it. */
  incoming: string;
  package: string;
  request: string;
  /** The request that root has taken and not answered yet. */
  taken: string;
  /** What `farhand-agent install` found about the installation. */
  installed: string;
  /** Public key whose packages this machine accepts, as PEM. */
  trustedKey: string;
  /** What became of the last upgrade; the agent reads it. */
  result: string;
  /** The step of a running upgrade, for root alone. It exists from before the switch to the end. */
  state: string;
  /** Root's own copy of the package. */
  copy: string;
  /** The last version as a Debian package. */
  previousDeb: string;
  /** The version before the upgrade, which runs the upgrade to its end. */
  rescue: string;
}

export function upgradePaths(directory: string): UpgradePaths {
  const incoming = join(directory, 'incoming');
  return {
    incoming,
    package: join(incoming, 'package'),
    request: join(incoming, 'request.json'),
    taken: join(directory, 'request.json'),
    installed: join(directory, 'installed.json'),
    trustedKey: join(directory, 'trusted-key.pem'),
    result: join(directory, 'result.json'),
    state: join(directory, 'state.json'),
    copy: join(directory, 'package'),
    previousDeb: join(directory, 'previous.deb'),
    rescue: join(directory, 'rescue'),
  };
}

/** The agent's request to root: the package's description and signature, and how to try it. */
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

const kindSchema = z.enum(['tar.gz', 'deb']);
export type PackageKind = z.output<typeof kindSchema>;
const installedSchema = z.object({ kind: kindSchema });

/** What became of the last upgrade; undefined if there was none. */
export function readResult(directory: string): UpgradeResult | undefined {
  return readJson(upgradePaths(directory).result, resultSchema);
}

/** The kind of package that root's unit can replace; undefined if the unit is not installed. */
export function installedKind(directory: string): PackageKind | undefined {
  const { installed, incoming } = upgradePaths(directory);
  return existsSync(incoming) ? readJson(installed, installedSchema)?.kind : undefined;
}

/** The kind of the package that contains the program with this home directory; undefined if none does. */
export function kindOfHome(home: string): PackageKind | undefined {
  if (home === '/usr/lib/farhand-agent') return 'deb';
  return dirname(home) === '/opt/farhand-agent' ? 'tar.gz' : undefined;
}

/** Parses a file that root has written; undefined if it is missing or damaged. */
function readJson<T extends z.ZodType>(file: string, schema: T): z.output<T> | undefined {
  try {
    return schema.parse(JSON.parse(readFileSync(file, 'utf8')));
  } catch {
    return undefined;
  }
}
