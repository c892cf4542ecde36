// Signs and verifies an agent's proof that it has the private key of its machine.
import { createPublicKey, type KeyObject, sign, verify } from 'node:crypto';

const context = 'farhand-link-v1';
/** The bytes before the raw key in the DER form of an Ed25519 SubjectPublicKeyInfo (RFC 8410 section 4). */
const ed25519Prefix = Buffer.from('302a300506032b6570032100', 'hex');

/** The signed values. They make the signature valid for only one broker, machine and connection. */
export interface Proof {
  nonce: Uint8Array;
  machine_id: string;
  /** SHA-256 of the broker's CA, hexadecimal. */
  fingerprint: string;
}

export function signProof(proof: Proof, privateKey: KeyObject): Buffer {
  return sign(null, signedBytes(proof), privateKey);
}

/** True if a signature is valid for a proof. `publicKey`: raw Ed25519, 32 bytes. */
export function verifyProof(proof: Proof, signature: Uint8Array, publicKey: Uint8Array): boolean {
  return verify(null, signedBytes(proof), publicKeyOf(publicKey), signature);
}

/** Returns the Ed25519 public key with these 32 raw bytes. */
export function publicKeyOf(raw: Uint8Array): KeyObject {
  return createPublicKey({ key: Buffer.concat([ed25519Prefix, raw]), format: 'der', type: 'spki' });
}

/** Returns the 32 raw bytes of an Ed25519 public key. */
export function rawPublicKey(key: KeyObject): Buffer {
  return key.export({ format: 'der', type: 'spki' }).subarray(ed25519Prefix.length);
}

function signedBytes({ nonce, machine_id, fingerprint }: Proof): Buffer {
  const parts = [Buffer.from(context), nonce, Buffer.from(machine_id), Buffer.from(fingerprint)];
  return Buffer.concat(parts.flatMap((part) => [Buffer.from([part.length]), part]));
}
