// Creates the key that signs the packages of the agents, and signs with it. The key file is PEM, encrypted with a
// passphrase.
import { createPrivateKey, createPublicKey, generateKeyPairSync, type KeyObject } from 'node:crypto';
import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import { password } from '@clack/prompts';
import * as z from 'zod';
import {
  fingerprintOf,
  type KeyChange,
  keyChangesSchema,
  type SignedPackage,
  signatureFileSchema,
  signKeyChange,
  signPackage,
} from '../../shared/agent-package-signature.ts';
import { StartError } from '../../shared/errors.ts';
import { rawPublicKey } from '../../shared/identity-proof.ts';
import { reasonOf } from '../../shared/system-error-messages.ts';

export interface Signer {
  /** The public key, as PEM. */
  publicPem: string;
  /** Returns the content of the signature file of a package. */
  sign(what: SignedPackage): string;
}

/** Environment variables with the passphrases of the key and of the previous key, for builds without a terminal. */
const variable = 'FARHAND_SIGN_PASSPHRASE';
const oldVariable = 'FARHAND_OLD_SIGN_PASSPHRASE';

/**
 * Returns the path of the file with all key changes that led to a key. Each change is signed by the earlier key. The
 * file is beside the key file.
 */
const changesFileOf = (file: string): string => `${file}.changes`;

/**
 * Creates a key in `file` and its public key in FILE.pub, and returns the path of FILE.pub. With `oldFile`, also writes
 * the proof of the key change to FILE.changes.
 */
export async function makeSigningKey(file: string, oldFile: string | undefined): Promise<string> {
  if (existsSync(file)) throw new StartError(`${file} exists already; choose another name`);
  const old = oldFile === undefined ? undefined : await readPrivateKey(oldFile, oldVariable);
  const { privateKey, publicKey } = generateKeyPairSync('ed25519');
  const passphrase = await passphraseFor(`Passphrase of the new key ${file}`, variable);
  if (passphrase.length < 8) throw new StartError('the passphrase must have at least 8 characters');
  const pem = privateKey.export({ format: 'pem', type: 'pkcs8', cipher: 'aes-256-cbc', passphrase });
  writeFileSync(file, pem, { mode: 0o600, flag: 'wx' });
  const raw = rawPublicKey(publicKey);
  if (old && oldFile !== undefined) {
    const changes = [...changesOf(oldFile), signKeyChange(raw, old)];
    writeFileSync(changesFileOf(file), jsonText(z.encode(keyChangesSchema, changes)));
  }
  writeFileSync(`${file}.pub`, pemOf(publicKey));
  process.stderr.write(`fingerprint: ${fingerprintOf(raw)}\n`);
  return `${file}.pub`;
}

/** Loads a key for signing. Asks for its passphrase, unless FARHAND_SIGN_PASSPHRASE contains it. */
export async function loadSigningKey(file: string): Promise<Signer> {
  const key = await readPrivateKey(file, variable);
  const publicKey = createPublicKey(key);
  const raw = rawPublicKey(publicKey);
  const key_changes = changesOf(file);
  const last = key_changes.at(-1);
  if (last && !last.public_key.equals(raw))
    throw new StartError(
      `${changesFileOf(file)} belongs to another key than ${file}; use the .changes file that --make-key wrote together with this key`,
    );
  return {
    publicPem: pemOf(publicKey),
    sign(what) {
      const signature = signPackage(what, key);
      const file = { ...what, public_key: raw, signature, key_changes };
      return jsonText(z.encode(signatureFileSchema, file));
    },
  };
}

async function readPrivateKey(file: string, passphraseVariable: string): Promise<KeyObject> {
  const pem = textOf(file);
  const isEncrypted = pem.includes('ENCRYPTED');
  if (!isEncrypted)
    process.stderr.write(`${file} has no passphrase: anyone who can read this file can sign packages\n`);
  const passphrase = isEncrypted
    ? await passphraseFor(`Passphrase of ${file}`, passphraseVariable)
    : undefined;
  const key = privateKeyIn(file, pem, passphrase);
  if (key.asymmetricKeyType !== 'ed25519')
    throw new StartError(`${file} is no Ed25519 key; make one with --make-key`);
  return key;
}

function textOf(file: string): string {
  try {
    return readFileSync(file, 'utf8');
  } catch (error) {
    throw new StartError(reasonOf(error));
  }
}

function privateKeyIn(file: string, pem: string, passphrase: string | undefined): KeyObject {
  try {
    return createPrivateKey({ key: pem, ...(passphrase !== undefined && { passphrase }) });
  } catch (error) {
    const why = error instanceof Error ? error.message : String(error);
    throw new StartError(`${file} cannot be read: it is no private key, or the passphrase is wrong (${why})`);
  }
}

async function passphraseFor(message: string, name: string): Promise<string> {
  const given = process.env[name];
  if (given !== undefined) return given;
  if (!process.stdin.isTTY)
    throw new StartError(`there is no terminal to ask for the passphrase; set ${name}`);
  const typed = await password({ message });
  if (typeof typed !== 'string') throw new StartError('cancelled');
  return typed;
}

const pemOf = (key: KeyObject): string => key.export({ format: 'pem', type: 'spki' }).toString();

function changesOf(file: string): readonly KeyChange[] {
  const changes = changesFileOf(file);
  return existsSync(changes) ? keyChangesSchema.parse(JSON.parse(readFileSync(changes, 'utf8'))) : [];
}

const jsonText = (value: unknown): string => `${JSON.stringify(value, undefined, 2)}\n`;
