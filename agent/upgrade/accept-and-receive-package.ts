// Decides whether the agent accepts an upgrade that the broker describes, and writes the package to the disk.
import { open, rm } from 'node:fs/promises';
import * as z from 'zod';
import type { StageUpgradeCommit__Output } from '../../proto/types/farhand/agent/v1/StageUpgradeCommit.ts';
import type { StageUpgradeOpen__Output } from '../../proto/types/farhand/agent/v1/StageUpgradeOpen.ts';
import { signatureFault } from '../../shared/agent-package-signature.ts';
import { AppError, type Code } from '../../shared/errors.ts';
import { version } from '../../shared/version.ts';
import type { Upload } from '../files/upload-messages.ts';
import {
  type PackageKind,
  requestSchema,
  type UpgradeRequest,
  type UpgradeResult,
} from './files-shared-with-root.ts';

export type Open = StageUpgradeOpen__Output;

interface Machine {
  /** The kind of package that the upgrade unit can replace; undefined if that unit is not installed. */
  installed: PackageKind | undefined;
  /** True if the running program was installed from a package. */
  packaged: boolean;
  holdVersion: string | undefined;
  trusted: Buffer | undefined;
  last: UpgradeResult | undefined;
}

const defaultLinkTimeoutMs = 120_000;

/** Makes an error of the rpc StageUpgrade. docs/agent-protocol.md lists the possible values of `reason`. */
export function refusal(code: Code, reason: string, message: string): AppError {
  return new AppError(code, message, { reason });
}

/**
 * Checks everything that can be checked before the package arrives, including its signature. Returns the request that
 * the agent writes for root. Throws AppError.
 */
export function acceptUpgrade(open: Open, machine: Machine): UpgradeRequest {
  const request = requestOf(open);
  const fault = faultOf(request, machine);
  if (fault) throw refusal(...fault);
  return request;
}

type Fault = [code: Code, reason: string, message: string];

function faultOf(request: UpgradeRequest, machine: Machine): Fault | undefined {
  const { installed, packaged, last } = machine;
  if (!installed)
    return packaged
      ? [
          'not_supported',
          'no_upgrade_unit',
          'the systemd unit farhand-agent-upgrade.path is not installed on this machine; as root on this machine, run farhand-agent install',
        ]
      : [
          'not_supported',
          'not_installed',
          'this agent was not installed as a service from a package; upgrade it by hand',
        ];
  if (last?.upgrade_id === request.upgrade_id)
    return [
      'conflict',
      'already_taken',
      `this machine has already received the upgrade ${request.upgrade_id}`,
    ];
  if (last?.outcome === 'RUNNING')
    return [
      'conflict',
      'in_progress',
      `the upgrade ${last.upgrade_id} of this machine is running; try again later`,
    ];
  return fitFault(request, machine) ?? signerFault(request, machine.trusted);
}

/** Returns why a package does not fit this machine; undefined if it fits. The upgrade unit repeats this check. */
export function fitFault(
  { version: wanted, kind, arch }: Pick<UpgradeRequest, 'version' | 'kind' | 'arch'>,
  { installed, holdVersion }: Pick<Machine, 'installed' | 'holdVersion'>,
): Fault | undefined {
  if (arch !== process.arch)
    return [
      'validation_failed',
      'wrong_architecture',
      `the package is for ${arch}, but this machine is ${process.arch}`,
    ];
  if (kind !== installed)
    return [
      'validation_failed',
      'wrong_kind',
      `the package is a ${kind}, but this agent was installed from a ${installed}`,
    ];
  if (holdVersion !== undefined && wanted !== holdVersion)
    return [
      'permission_denied',
      'held',
      `the owner of this machine accepts only version ${holdVersion} (--hold-version)`,
    ];
  if (wanted === version) return ['conflict', 'same_version', `this machine already runs version ${version}`];
  return undefined;
}

/** Returns what is wrong with the signature of a package; undefined if this machine trusts it. */
export function signerFault(request: UpgradeRequest, trusted: Buffer | undefined): Fault | undefined {
  if (!trusted)
    return [
      'precondition_failed',
      'no_trusted_key',
      'this machine trusts no signing key yet; as root on this machine, run farhand-agent trust-key FILE; FILE is the public key that verifies your packages',
    ];
  const fault = signatureFault(request, request, trusted);
  if (fault === 'untrusted_key')
    return [
      'precondition_failed',
      fault,
      'the package is signed by another key than the one this machine trusts; sign it with the trusted key, or as root on this machine run farhand-agent trust-key FILE',
    ];
  return fault && ['validation_failed', fault, 'the signature is not for this package'];
}

const kinds: Partial<Record<Open['kind'], string>> = {
  PACKAGE_KIND_TAR_GZ: 'tar.gz',
  PACKAGE_KIND_DEB: 'deb',
};

function requestOf({ kind, sha256, signature, ...open }: Open): UpgradeRequest {
  const base64 = (bytes: Buffer | undefined): string => (bytes ?? Buffer.alloc(0)).toString('base64');
  const parsed = requestSchema.safeParse({
    ...open,
    kind: kinds[kind],
    sha256: sha256.toString('hex'),
    link_timeout_ms: open.link_timeout_ms || defaultLinkTimeoutMs,
    public_key: base64(signature?.public_key),
    signature: base64(signature?.signature),
    key_changes: signature?.key_changes.map((change) => ({
      public_key: base64(change.public_key),
      signature: base64(change.signature),
    })),
  });
  if (parsed.success) return parsed.data;
  throw new AppError('invalid_request', z.prettifyError(parsed.error));
}

/** Writes the package to the disk. Throws with the reason wrong_hash if its size or hash differs from the request. */
export async function receivePackage(
  file: string,
  { size, sha256 }: UpgradeRequest,
  upload: Upload<Open, StageUpgradeCommit__Output>,
): Promise<void> {
  await rm(file, { force: true });
  await using handle = await open(file, 'wx', 0o600);
  const wrong = (): AppError =>
    refusal(
      'validation_failed',
      'wrong_hash',
      'the package does not have the size and SHA-256 that were signed; build or upload it again',
    );
  let received = 0;
  for await (const chunk of upload.chunks()) {
    received += chunk.length;
    if (received > size) throw wrong();
    await handle.writeFile(chunk);
  }
  if (received !== size || upload.finish(file).sha256 !== sha256) throw wrong();
  await handle.sync();
}
