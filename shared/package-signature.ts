// The signatures of agent packages: their file format, what they sign, and how a machine verifies them against
// the key that it trusts.
import { createHash, type KeyObject, sign, verify } from 'node:crypto';
import * as z from 'zod';
import { publicKeyOf } from './identity-proof.ts';

/** What a signature covers, so that it is valid for no other name, version, architecture or kind of package. */
export interface SignedPackage {
  version: string;
  /** As Node names it: "x64", "arm64". */
  arch: string;
  kind: 'tar.gz' | 'deb';
  size: number;
  /** Hexadecimal. */
  sha256: string;
}

/** A new key with its signature by the key before. Both are raw bytes. */
export interface KeyChange {
  public_key: Buffer;
  signature: Buffer;
}

export interface PackageSignature {
  /** Raw public key: 32 bytes. */
  public_key: Buffer;
  /** 64 bytes. */
  signature: Buffer;
  /** How an earlier key became `public_key`, oldest change first. */
  key_changes: readonly KeyChange[];
}

/** Most changes of the key in one signature. */
const mostKeyChanges = 32;
/** Largest package in bytes. */
const mostPackageBytes = 1024 ** 3;

const base64 = (bytes: number): z.ZodType<Buffer, string> =>
  z.base64().transform((text, context) => {
    const decoded = Buffer.from(text, 'base64');
    if (decoded.length === bytes) return decoded;
    context.addIssue({ code: 'custom', message: `must be ${bytes} bytes` });
    return z.NEVER;
  });

const signedPackageSchema = z.object({
  version: z.string().regex(/^\d[\w.+-]{0,63}$/),
  arch: z.string().regex(/^\w{1,32}$/),
  kind: z.enum(['tar.gz', 'deb']),
  size: z.int().min(1).max(mostPackageBytes),
  sha256: z.string().regex(/^[0-9a-f]{64}$/),
});

export const keyChangesSchema = z
  .array(z.object({ public_key: base64(32), signature: base64(64) }))
  .max(mostKeyChanges);

const packageSignatureSchema = z.object({
  public_key: base64(32),
  signature: base64(64),
  key_changes: keyChangesSchema,
});

/** Content of the file NAME.sig beside a package NAME, as JSON. Keys and signatures are base64. */
export const signatureFileSchema = signedPackageSchema.extend(packageSignatureSchema.shape);

/** The content of a signature file, to be written as JSON. */
export function signatureJson(
  { version, arch, kind, size, sha256 }: SignedPackage,
  { public_key, signature, key_changes }: PackageSignature,
): object {
  const text = (bytes: Buffer): string => bytes.toString('base64');
  const changes = key_changes.map((change) => ({
    public_key: text(change.public_key),
    signature: text(change.signature),
  }));
  const signed = { version, arch, kind, size, sha256 };
  return { ...signed, public_key: text(public_key), signature: text(signature), key_changes: changes };
}

/** Name of a package's signature file. */
export const signatureFileOf = (file: string): string => `${file}.sig`;

/** The text of which a package's signature is made. No field can contain a line break. */
function signedText({ version, arch, kind, size, sha256 }: SignedPackage): Buffer {
  return Buffer.from(`farhand-package-v1\nfarhand-agent\n${version}\n${arch}\n${kind}\n${size}\n${sha256}\n`);
}

/** The text of which the signature of a new key is made. */
function keyChangeText(publicKey: Buffer): Buffer {
  return Buffer.from(`farhand-package-key-v1\n${publicKey.toString('hex')}\n`);
}

export function signPackage(what: SignedPackage, key: KeyObject): Buffer {
  return sign(null, signedText(what), key);
}

/** Signs a new key by the key before. */
export function signKeyChange(publicKey: Buffer, oldKey: KeyObject): KeyChange {
  return { public_key: publicKey, signature: sign(null, keyChangeText(publicKey), oldKey) };
}

/**
 * Verifies a package's signature. Returns what is wrong: `untrusted_key` if no chain of changes leads from the
 * trusted key to the signature's key; undefined if the signature is right.
 */
export function signatureFault(
  what: SignedPackage,
  { public_key, signature, key_changes }: PackageSignature,
  trusted: Buffer,
): 'untrusted_key' | 'wrong_signature' | undefined {
  if (!isTrusted(public_key, key_changes, trusted)) return 'untrusted_key';
  return verify(null, signedText(what), publicKeyOf(public_key), signature) ? undefined : 'wrong_signature';
}

/** True if the trusted key is `key`, or if changes that begin at the trusted key lead to it. */
function isTrusted(key: Buffer, changes: readonly KeyChange[], trusted: Buffer): boolean {
  let current = trusted;
  for (const { public_key, signature } of changes) {
    if (current.equals(key)) return true;
    // Changes before the trusted key are skipped: their signatures are of keys that this machine forgot.
    if (verify(null, keyChangeText(public_key), publicKeyOf(current), signature)) current = public_key;
  }
  return current.equals(key);
}

/** SHA-256 of a raw public key, hexadecimal. */
export function fingerprintOf(raw: Buffer): string {
  return createHash('sha256').update(raw).digest('hex');
}
