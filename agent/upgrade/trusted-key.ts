// The key that this machine trusts to sign packages, and the verb `farhand-agent trust-key`, by which root pins it.
import { createPublicKey } from 'node:crypto';
import { existsSync, readFileSync } from 'node:fs';
import { chmod, mkdir } from 'node:fs/promises';
import { fingerprintOf } from '../../shared/agent-package-signature.ts';
import { writeDurably } from '../../shared/durable-file.ts';
import { StartError, UsageError } from '../../shared/errors.ts';
import { publicKeyOf, rawPublicKey } from '../../shared/identity-proof.ts';
import { reasonOf } from '../../shared/system-error-messages.ts';
import { upgradeDirectory, upgradePaths } from './files-shared-with-root.ts';

const usage =
  'farhand-agent trust-key FILE: makes this machine trust the public key in FILE, which verifies upgrade packages';

/**
 * Reads the trusted key as 32 raw bytes. Returns undefined if no key is pinned. Throws StartError if the key's file is
 * damaged.
 */
export function readTrustedKey(directory: string): Buffer | undefined {
  const file = upgradePaths(directory).trustedKey;
  return existsSync(file) ? readPublicKey(file) : undefined;
}

/** Reads an Ed25519 public key in PEM. Throws StartError unless the file contains one. */
export function readPublicKey(file: string): Buffer {
  let text: string;
  try {
    text = readFileSync(file, 'utf8');
  } catch (error) {
    throw new StartError(reasonOf(error));
  }
  try {
    if (text.includes('PRIVATE KEY')) throw new StartError('');
    const key = createPublicKey(text);
    if (key.asymmetricKeyType === 'ed25519') return rawPublicKey(key);
  } catch {
    // The file contains a private key, or no key. The error below says which file is needed.
  }
  throw new StartError(
    `${file} is no Ed25519 public key in PEM; npm run package -- --make-key FILE writes one to FILE.pub`,
  );
}

/** Pins a key. Only root can call this, because the directory belongs to root. */
export async function pinKey(directory: string, key: Buffer): Promise<void> {
  await mkdir(directory, { recursive: true });
  // The agent must be able to enter the directory, whatever root's umask is.
  await chmod(directory, 0o755);
  const pem = publicKeyOf(key).export({ format: 'pem', type: 'spki' });
  await writeDurably(upgradePaths(directory).trustedKey, pem, { mode: 0o644 });
}

/** Reads the trusted key. Unlike readTrustedKey(), returns undefined also if its file is damaged. */
export function readUsableKey(directory: string): Buffer | undefined {
  try {
    return readTrustedKey(directory);
  } catch {
    return undefined;
  }
}

/** Runs `farhand-agent trust-key FILE`. Returns the text to print. */
export async function trustKey(argv: readonly string[], directory = upgradeDirectory): Promise<string> {
  const [file, ...more] = argv;
  if (argv.includes('--help')) return `${usage}\n`;
  if (file === undefined || more.length > 0 || file.startsWith('-')) throw new UsageError(usage);
  if (process.getuid?.() !== 0) throw new StartError('trust-key must be run as root; use sudo', 1);
  const key = readPublicKey(file);
  const before = readUsableKey(directory);
  await pinKey(directory, key);
  const replaced = before && !before.equals(key) ? `, and no longer ${fingerprintOf(before)}` : '';
  return `This machine now accepts packages signed by ${fingerprintOf(key)}${replaced}.\n`;
}
