// The signatures of agent packages: the format of their files, the data that they cover, and their verification.
import { createHash, type KeyObject, sign, verify } from 'node:crypto';
import * as z from 'zod';
import { publicKeyOf } from './identity-proof.ts';

const mostKeyChanges = 32;
const mostPackageBytes = 1024 ** 3;

/** Base64 of exactly this number of bytes. */
const base64 = (bytes: number) =>
  z.codec(
    z.base64(),
    z.instanceof(Buffer).refine(({ length }) => length === bytes, `must be ${bytes} bytes`),
    { decode: (text) => Buffer.from(text, 'base64'), encode: (decoded) => decoded.toString('base64') },
  );

/** A new public key (raw bytes), and its signature by the previous key (raw bytes). */
const keyChangeSchema = z.object({ public_key: base64(32), signature: base64(64) });
export type KeyChange = z.output<typeof keyChangeSchema>;

export const keyChangesSchema = z.array(keyChangeSchema).max(mostKeyChanges).readonly();

/** The data that a signature covers. The signature is valid for no other version, architecture or kind of package. */
const signedPackageSchema = z.object({
  version: z.string().regex(/^\d[\w.+-]{0,63}$/),
  /** Architecture by its name in Node: "x64" or "arm64". */
  arch: z.string().regex(/^\w{1,32}$/),
  kind: z.enum(['tar.gz', 'deb']),
  size: z.int().min(1).max(mostPackageBytes),
  /** SHA-256 of the package, in hexadecimal. */
  sha256: z.string().regex(/^[0-9a-f]{64}$/),
});
export type SignedPackage = z.output<typeof signedPackageSchema>;

const packageSignatureSchema = z.object({
  /** The key that verifies `signature`, as raw bytes. */
  public_key: base64(32),
  /** The signature of the package, as raw bytes. */
  signature: base64(64),
  /** The key changes that lead to `public_key`, oldest first, for machines that still trust an earlier key. */
  key_changes: keyChangesSchema,
});
export type PackageSignature = z.output<typeof packageSignatureSchema>;

/** Content of the file NAME.sig beside a package NAME, as JSON. Keys and signatures are base64. */
export const signatureFileSchema = signedPackageSchema.extend(packageSignatureSchema.shape);

export const signatureFileOf = (file: string): string => `${file}.sig`;

/** Returns the text that is signed for a package. It is unambiguous, because no field can contain a line break. */
function signedText({ version, arch, kind, size, sha256 }: SignedPackage): Buffer {
  return Buffer.from(`farhand-package-v1\nfarhand-agent\n${version}\n${arch}\n${kind}\n${size}\n${sha256}\n`);
}

/** Returns the text that the previous key signs for a new key. */
function keyChangeText(publicKey: Buffer): Buffer {
  return Buffer.from(`farhand-package-key-v1\n${publicKey.toString('hex')}\n`);
}

export function signPackage(what: SignedPackage, key: KeyObject): Buffer {
  return sign(null, signedText(what), key);
}

export function signKeyChange(publicKey: Buffer, oldKey: KeyObject): KeyChange {
  return { public_key: publicKey, signature: sign(null, keyChangeText(publicKey), oldKey) };
}

/**
 * Returns what is wrong with a package's signature; undefined if it is valid. `untrusted_key`: no chain of key changes
 * leads from the trusted key to the signing key.
 */
export function signatureFault(
  what: SignedPackage,
  { public_key, signature, key_changes }: PackageSignature,
  trusted: Buffer,
): 'untrusted_key' | 'wrong_signature' | undefined {
  if (!isTrusted(public_key, key_changes, trusted)) return 'untrusted_key';
  return verify(null, signedText(what), publicKeyOf(public_key), signature) ? undefined : 'wrong_signature';
}

/** Returns true if the trusted key is `key`, or if key changes lead from the trusted key to `key`. */
function isTrusted(key: Buffer, changes: readonly KeyChange[], trusted: Buffer): boolean {
  let current = trusted;
  for (const { public_key, signature } of changes) {
    if (current.equals(key)) return true;
    // A key change that `current` did not sign is skipped. It may be older than the trusted key.
    if (verify(null, keyChangeText(public_key), publicKeyOf(current), signature)) current = public_key;
  }
  return current.equals(key);
}

/** Returns the SHA-256 of a raw public key, in hexadecimal. */
export function fingerprintOf(raw: Buffer): string {
  return createHash('sha256').update(raw).digest('hex');
}
