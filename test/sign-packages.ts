// Makes keys and signs packages, as the owner of machines does.
import { createHash, generateKeyPairSync, type KeyObject } from 'node:crypto';
import {
  fingerprintOf,
  type KeyChange,
  type PackageSignature,
  type SignedPackage,
  signPackage,
} from '../shared/agent-package-signature.ts';
import { rawPublicKey } from '../shared/identity-proof.ts';

export interface Signer {
  /** The public key as raw bytes. */
  raw: Buffer;
  pem: string;
  fingerprint: string;
  privateKey: KeyObject;
  /** Signs `bytes` as a package of version 9.9.9. `about` replaces signed fields; `changes` are the key changes. */
  sign(bytes: Buffer, about?: Partial<SignedPackage>, changes?: readonly KeyChange[]): SignedUpgrade;
}

export type SignedUpgrade = SignedPackage & PackageSignature;

export function makeSigner(): Signer {
  const { privateKey, publicKey } = generateKeyPairSync('ed25519');
  const raw = rawPublicKey(publicKey);
  return {
    raw,
    pem: publicKey.export({ format: 'pem', type: 'spki' }).toString(),
    fingerprint: fingerprintOf(raw),
    privateKey,
    sign(bytes, about = {}, key_changes = []) {
      const sha256 = createHash('sha256').update(bytes).digest('hex');
      const what: SignedPackage = {
        ...{ version: '9.9.9', arch: process.arch, kind: 'tar.gz', size: bytes.length, sha256 },
        ...about,
      };
      return { ...what, public_key: raw, signature: signPackage(what, privateKey), key_changes };
    },
  };
}

/** Returns the first message of StageUpgrade for a signed package. */
export function firstMessageFor(signed: SignedUpgrade, more: object = {}): object {
  const { kind, sha256, public_key, signature, key_changes, ...what } = signed;
  return {
    ...what,
    upgrade_id: 'upg_1',
    kind: kind === 'deb' ? 'PACKAGE_KIND_DEB' : 'PACKAGE_KIND_TAR_GZ',
    sha256: Buffer.from(sha256, 'hex'),
    signature: { public_key, signature, key_changes },
    running: 'RUNNING_PROCESSES_WAIT',
    wait_ms: 0,
    link_timeout_ms: 0,
    ...more,
  };
}
